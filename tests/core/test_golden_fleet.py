"""HeteroFL's models, slices and averages through a fleet, as in the released code (golden)."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightfed_kernels import Layout
from safetensors.torch import load_file
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.heterofl import HeteroFL
from lightfed.core.cohort import Cohort, Task
from lightfed.core.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.models.cnn import Conv
from lightfed.models.resnet import PreActResNet
from lightfed.models.transformer import Transformer
from tests.small import GOLDEN, Given, Tensors, fleet_of


class Recorded(FederatedDataModule):
    """Of a recorded round: only the labels of the clients, and what a model has to know."""

    def __init__(self, labels: list[list[int]], classes: int, shape: tuple[int, ...], task: Task):
        x, y = torch.zeros(len(labels), *shape), torch.zeros(len(labels), dtype=torch.int64)
        dataset = Tensors(x, y, classes=classes, test=(x, y))
        dataset.task = task
        super().__init__(dataset, Given(*[[k] for k in range(len(labels))]))
        self._held = labels

    @override
    def labels(self, client: int) -> Tensor:
        return torch.tensor(self._held[client])


class Golden:
    """One recorded round: what the server had, sent, got back and made of it."""

    def __init__(self, name: str, model: Callable[..., nn.Module]) -> None:
        self.meta: dict[str, Any] = json.loads((GOLDEN / f"heterofl/{name}.json").read_text())
        self.tensors = load_file(GOLDEN / f"heterofl/{name}.safetensors")
        self.clients: list[int] = self.meta["user_idx"]
        levels = self.meta["levels_by_client"]
        labels = [self.meta["label_split"][str(k)] for k in range(len(levels))]
        cfg = self.meta.get("cfg", {})
        words = "num_tokens" in cfg
        shapes: dict[str, list[int]] = self.meta["param_shapes"]
        channels = next(iter(shapes.values()))[1]
        data = Recorded(
            labels,
            cfg["num_tokens"] if words else 6,
            (cfg["bptt"],) if words else (channels, 8, 8),
            "masked_lm" if words else "classification",
        )
        self.algorithm = HeteroFL(mask_token=False)  # as in the released code
        cohorts = [Cohort(1, partial(model, **settings(name, self.meta)), level=x) for x in levels]
        self.fed: Fleet = fleet_of(cohorts, self.algorithm, data)

    def fill(self, row: Tensor, layout: Layout, prefix: str) -> None:
        """Put recorded tensors into a row: one to one, in the order of the parameters."""
        names = self.meta["param_shapes"]
        for view, name in zip(layout.views(row).values(), names, strict=True):
            view.copy_(self.tensors[f"{prefix}/{name}"])

    def recorded(self, layout: Layout, prefix: str) -> Tensor:
        row = layout.new_row()
        self.fill(row, layout, prefix)
        return row


def settings(name: str, meta: dict[str, Any]) -> dict[str, Any]:
    """The recorded model's arguments."""
    cfg, shapes = meta.get("cfg", {}), meta["param_shapes"]
    if name.startswith("conv"):
        hidden = [shapes[f"blocks.{b}.weight"][0] for b in (0, 5, 10, 15)]
        return {"hidden": hidden, "norm": "none" if name == "conv_nonorm" else "bn"}
    if name.startswith("resnet"):
        return {"hidden": cfg["hidden_size"], "blocks": cfg["blocks"], "norm": cfg["norm"]}
    return {key: cfg[key] for key in ("embedding", "heads", "hidden", "layers")}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("conv_iid_abcde", Conv),
        ("conv_noniid_abcde", Conv),
        ("conv_nonorm", Conv),
        ("resnet18_iid_aeec", PreActResNet),
        ("transformer_abcde", Transformer),
    ],
)
def test_a_round_is_the_released_codes(name: str, model: Callable[..., nn.Module]) -> None:
    golden = Golden(name, model)
    fed, server = golden.fed, golden.algorithm.model
    golden.fill(server.floats, server.layout.floats, "global_before")
    fed.send(server, golden.clients)
    for client in golden.clients:
        layout = fed.state(client).layout.floats
        sent = golden.recorded(layout, f"distributed/{client}")
        assert torch.equal(fed.row(client).floats, sent)
        golden.fill(fed.row(client).floats, layout, f"local_after/{client}")
    fed.merge(golden.clients, into=server, weights="uniform")
    after = golden.recorded(server.layout.floats, "global_after")
    # The released code adds in float32.
    assert (server.floats - after).abs().max() <= 1e-6
