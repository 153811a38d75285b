"""HeteroFL's slices and averages, as the released code computes them (golden/heterofl)."""

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
from lightfed.core.coverage import Accumulate, Merge, leading_slices, take
from lightfed.models.cnn import Conv
from tests.core.oracle import finish
from tests.small import CPU, GOLDEN, data_of, fleet_of

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


@pytest.mark.parametrize("name", NAMES)
def test_what_a_client_is_sent_is_what_the_released_code_sends(name: str) -> None:
    golden = Golden(name)
    before = golden.row("global_before")
    for client in golden.clients:
        layout = golden.layout(f"distributed/{client}")
        coverage = leading_slices(golden.target, layout, label_rows=OUTPUT)
        out = take(before, coverage, layout.new_row())
        assert torch.equal(out, golden.row(f"distributed/{client}"))


@pytest.mark.parametrize("accumulate", ["float64", "fixed"])
@pytest.mark.parametrize("name", NAMES)
def test_the_average_is_the_released_codes(name: str, accumulate: Accumulate) -> None:
    golden = Golden(name)
    total = float(len(golden.clients))
    merge = Merge(golden.target.size, total=total, accumulate=accumulate, device=CPU)
    for client in golden.clients:
        layout = golden.layout(f"local_after/{client}")
        coverage = leading_slices(golden.target, layout, label_rows=OUTPUT)
        labels = golden.labels(client)
        merge.count(coverage, weight=1.0, labels=labels)
        merge.add(golden.row(f"local_after/{client}"), coverage, weight=1.0, labels=labels)
    after = finish(merge, golden.row("global_before"))
    # The released code adds in float32.
    assert (after - golden.row("global_after")).abs().max() <= 1e-6


def test_the_label_rows_change_the_average() -> None:
    """Guards the test above: without the restriction the recorded average is missed by far."""
    golden = Golden("conv_noniid_abcde")
    merge = Merge(golden.target.size, total=5.0, accumulate="float64", device=CPU)
    for client in golden.clients:
        coverage = leading_slices(golden.target, golden.layout(f"local_after/{client}"))
        merge.count(coverage, weight=1.0)
        merge.add(golden.row(f"local_after/{client}"), coverage, weight=1.0)
    found = golden.target.views(finish(merge, golden.row("global_before")))
    expected = golden.target.views(golden.row("global_after"))
    for name in found:
        close = torch.allclose(found[name], expected[name], rtol=0.0, atol=1e-3)
        assert close == (name not in OUTPUT), name


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
