"""HeteroFL's models have the shapes of the released code's (golden/heterofl)."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from lightfed_kernels import Layout
from safetensors.torch import load_file
from torch import Tensor

from lightfed.algorithms.heterofl import HeteroFL
from lightfed.core.cohort import Cohort
from lightfed.models.cnn import Conv
from tests.small import GOLDEN, data_of, fleet_of

NAMES = ["conv_iid_abcde", "conv_noniid_abcde", "conv_nonorm"]
OUTPUT = ("blocks.21.weight", "blocks.21.bias")


class Golden:
    """One recorded round: what the server had, sent, got back and made of it."""

    def __init__(self, name: str) -> None:
        folder = GOLDEN / "heterofl"
        self.meta: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
        self.tensors = load_file(folder / f"{name}.safetensors")
        self.target = self.layout("global_before")
        self.clients: list[int] = self.meta["user_idx"]

    def layout(self, prefix: str) -> Layout:
        names = self.meta["param_shapes"]
        return Layout.build((n, tuple(self.tensors[f"{prefix}/{n}"].shape)) for n in names)

    def row(self, prefix: str) -> Tensor:
        layout = self.layout(prefix)
        row = layout.new_row()
        for name, view in layout.views(row).items():
            view.copy_(self.tensors[f"{prefix}/{name}"])
        return row

    def labels(self, client: int) -> tuple[int, ...]:
        return tuple(self.meta["label_split"][str(client)])


@pytest.mark.parametrize(
    ("name", "norm"),
    [("conv_iid_abcde", "bn"), ("conv_noniid_abcde", "bn"), ("conv_nonorm", "none")],
)
def test_the_models_have_the_shapes_of_the_released_code(name: str, norm: str) -> None:
    golden = Golden(name)
    levels = golden.meta["levels_by_client"]
    hidden = [golden.meta["param_shapes"][f"blocks.{b}.weight"][0] for b in (0, 5, 10, 15)]
    model = partial(Conv, hidden=hidden, norm=norm)  # type: ignore[arg-type]
    data = data_of(
        torch.zeros(12, 1, 8, 8), torch.arange(12) % 6, [[k] for k in range(len(levels))]
    )
    fed = fleet_of([Cohort(1, model, level=level) for level in levels], HeteroFL(), data)
    for client, state in zip(golden.clients, fed.cohorts, strict=True):
        shapes = {e.name.removeprefix("net."): list(e.shape) for e in state.layout.floats}
        layout = golden.layout(f"distributed/{client}")
        assert shapes == {e.name: list(e.shape) for e in layout}
        assert state.output_layer(6) == tuple(f"net.{name}" for name in OUTPUT)
