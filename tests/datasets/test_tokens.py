"""`Hub` with a tokenizer, made here and saved to a folder; and targets from a table."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.optim import Adam

from lightfed.algorithms.fedavg import FedAvg
from lightfed.data.partition.schemes import Dirichlet, Partitioner
from lightfed.datasets.hub import Hub
from lightfed.datasets.text import tokenizer_of
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.utils.errors import UserError
from tests.datasets import kit, tables
from tests.small import fit

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

WORDS = ["a", "bee", "cat", "dog", "saw", "##s"]  # their numbers begin with 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of eight words, at most six a sample, and tables."""
    root = tmp_path_factory.mktemp("tokens")
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    tables.tokenizer(root / "tiny", WORDS, model_max_length=6, model_input_names=inputs)
    texts = ["a cat", "a dog saw bees", "cats", "a bee saw a cat saw a dog"] * 4
    rows = [
        {
            "text": text,
            "tags": [len(word) for word in text.split()],
            "label": ["short", "long"][i % 2],
            "score": i / 2,
            "site": i % 4,
        }
        for i, text in enumerate(texts)
    ]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    bad = [rows[0], rows[1], rows[2] | {"text": None}] * 2
    (root / "bad.jsonl").write_text("\n".join(map(json.dumps, bad)))
    return root


def prepared(root: Path, partition: Partitioner | None = None, **given: Any) -> Any:
    paths = {"path": str(root / "rows.jsonl"), "tokenizer": str(root / "tiny")}
    return kit.prepared(Hub(**paths | {"test": 0.25} | given), partition)


def samples(data: Any) -> dict[str, torch.Tensor]:
    return data.train.batch(torch.arange(len(data.train)))


def test_texts_have_classes(folder: Path) -> None:
    data = prepared(folder, Dirichlet(10.0), text="text")
    assert data.dataset.classes == ("long", "short")
    batch = samples(data)
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert batch["input_ids"].shape == (12, 6)  # cut to what the tokenizer takes
    rows = {tuple(row) for row in batch["input_ids"].tolist()}
    assert rows == {(2, 4, 0, 0, 0, 0), (2, 5, 6, 3, 7, 0), (4, 7, 0, 0, 0, 0), (2, 3, 6, 2, 4, 6)}
    assert torch.equal(batch["attention_mask"], (batch["input_ids"] != 0).long())
    assert set(batch["labels"].tolist()) == {0, 1}
    short = data.train.batch(
        torch.tensor([i for i in range(12) if batch["attention_mask"][i].sum() == 2])
    )
    assert short["input_ids"].shape[1] == 2


def test_token_ids_are_labels_without_classes(folder: Path) -> None:
    table = folder / "only.jsonl"
    table.write_text("\n".join(json.dumps({"text": "a cat saw" + " a dog" * n}) for n in range(4)))
    data = prepared(folder, path=str(table), max_length=5)  # its only column
    assert data.dataset.classes == ()
    own = samples(data)
    ids = own["input_ids"]
    assert ids.shape[1] == 5
    assert torch.equal(own["labels"], ids.masked_fill(own["attention_mask"] == 0, -100))


def refused(folder: Path, key: str, **given: Any) -> str:
    return kit.refused(key, prepared, folder, **{"text": "text"} | given)


def test_what_cannot_be_tokenized_is_refused(folder: Path, monkeypatch: Any) -> None:
    assert "nowhere" in refused(folder, "tokenizer", tokenizer="./nowhere")
    refused(folder, "tokenizer", tokenizer=str(folder))
    assert "7" in refused(folder, "max_length", max_length=7)
    refused(folder, "max_length", max_length=0)
    refused(folder, "text", text="title")
    refused(folder, "tokenizer", text=None, features="site")
    refused(folder, "max_length", tokenizer=None, max_length=3)
    refused(folder, "label", label="tags")
    refused(folder, "label", label="score")
    assert "sample 2" in refused(
        folder, "text", path=str(folder / "bad.jsonl"), test="train[3:]", train="train[:3]"
    )
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"init_args\.tokenizer: .*pip install transformers"):
        tokenizer_of("bert-base-uncased")


class Classifier(L.LightningModule):
    """A model of transformers, whose loss is its own."""

    def __init__(self, positions: int = 6) -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=positions,
        )  # fmt: skip
        self.model = transformers.BertForSequenceClassification(config)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("loss", self.model(**batch).loss)


def federation(model: Any, lr: float = 0.02) -> Federation:
    return Federation(FedAvg(), [ClientGroup(2, model)], optimizer=partial(Adam, lr=lr))


def test_a_model_of_transformers_learns(folder: Path, tmp_path: Path) -> None:
    data = prepared(folder, text="text")
    trainer = fit(federation(Classifier, 0.05), data, tmp_path, rounds=6)
    assert trainer.callback_metrics["global/loss"] < 0.3  # of two classes, at first 0.69


class Writer(Classifier):
    """Writes the next token."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=8, n_positions=6, n_embd=8, n_layer=1, n_head=2, bos_token_id=0,
            eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        self.model = transformers.GPT2LMHeadModel(config)


def test_a_causal_model_of_transformers_learns(folder: Path, tmp_path: Path) -> None:
    table = folder / "cycle.jsonl"
    rows = [{"text": " ".join((["a", "bee", "cat"] * 2)[n % 3 : 4])} for n in range(24)]
    table.write_text("\n".join(map(json.dumps, rows)))
    data = prepared(folder, path=str(table))
    trainer = fit(federation(Writer, 0.1), data, tmp_path, rounds=18)
    assert trainer.callback_metrics["global/loss"] < 0.5  # of eight words, at first 2.1


def test_texts_longer_than_the_model_takes_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="max_length") as error:
        fit(federation(partial(Classifier, 5)), prepared(folder, text="text"), tmp_path)
    assert error.value.key == "model.clients.0.model"
    fit(federation(partial(Classifier, 5)), prepared(folder, text="text", max_length=5), tmp_path)
