"""A tagger of sequences and a line, with their data; also named in configurations by their path."""

from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassF1Score
from typing_extensions import override

from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.partition.schemes import Dirichlet, Quantity
from lightfed.data.torch_data import FromTorch
from lightfed.testing.case import CLIENTS

WORDS, TAGS, LONGEST = 12, 3, 9


def sentences(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Words, their mask, and a tag for each word that depends on the word before it."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = torch.randint(1, WORDS, (2 + number % (LONGEST - 1),), generator=draw)
        rows.append({
            "ids": ids, "mask": torch.ones_like(ids), "labels": ids.roll(1) % TAGS,
            "topic": torch.tensor(number % 4),
        })  # fmt: skip
    return rows


def tagged(test_seed: int = 1) -> FederatedDataModule:
    dataset = FromTorch(sentences(20 * CLIENTS, 0), sentences(33, test_seed), by="topic")  # type: ignore[arg-type]
    return FederatedDataModule(dataset, Dirichlet(1.0), batch_size=8, eval_batch_size=10)


class Tagger(L.LightningModule):
    """Tags words by themselves, their places and the word before; forward takes a batch."""

    def __init__(self, positions: int = LONGEST) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(positions, 8)
        self.hidden, self.drop = nn.Conv1d(8, 8, 2, padding=1), nn.Dropout(0.1)
        self.out = nn.Linear(8, TAGS)
        self.f1 = MulticlassF1Score(TAGS, ignore_index=-100)

    @override
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.hidden((x * batch["mask"].unsqueeze(2)).transpose(1, 2))[:, :, : ids.shape[1]]
        return self.out(self.drop(x.relu().transpose(1, 2)))

    def _loss(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(self(batch), batch)
        self.log("train/loss", loss)
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self(batch)
        self.log("loss", self._loss(logits, batch))
        self.f1.update(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("f1", self.f1)


def points(count: int = 120, seed: int = 0) -> TensorDataset:
    """(count, 3) inputs and (count,) targets of a line with noise."""
    draw = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(count, 3, generator=draw), torch.randn(count, generator=draw)
    return TensorDataset(x, x @ torch.tensor([1.0, -2.0, 0.5]) + 3 + noise / 10)


def measured(**given: Any) -> FederatedDataModule:
    dataset = FromTorch(points(), points(40, seed=1))
    return FederatedDataModule(dataset, Quantity(2.0), batch_size=8, eval_batch_size=9, **given)


line = partial(nn.Linear, 3, 1)


class Points(TensorDataset):
    """`points` by a class, for configurations."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(*points(60, seed).tensors)
