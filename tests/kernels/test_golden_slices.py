"""HeteroFL's slices and averages, as the released code computes them (golden/heterofl)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightfed_kernels import Layout, Members, SliceTable, slice_merge_, slice_take_
from safetensors.torch import load_file
from torch import Tensor

NAMES = [
    "conv_iid_abcde",
    "conv_noniid_abcde",
    "conv_nonorm",
    "resnet18_iid_aeec",
    "transformer_abcde",
]
GOLDEN = Path(__file__).parents[1] / "golden" / "heterofl"

# Names of the output layer, whose rows are labels; of the language model, the token rows too.
LABEL_ROWS = {
    "conv": ("blocks.21.weight", "blocks.21.bias"),
    "resnet18": ("linear.weight", "linear.bias"),
    "transformer": (
        "decoder.linear2.weight",
        "decoder.linear2.bias",
        "transformer_embedding.embedding.weight",
    ),
}


class Golden:
    """One recorded round: what the server had, sent, got back and made of it."""

    def __init__(self, name: str) -> None:
        self.meta: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
        self.tensors = load_file(GOLDEN / f"{name}.safetensors")
        self.target = self.layout("global_before")
        self.clients: list[int] = self.meta["user_idx"]
        self.label_rows = LABEL_ROWS[name.split("_")[0]]

    def layout(self, prefix: str) -> Layout:
        names = self.meta["param_shapes"]
        return Layout.build((n, tuple(self.tensors[f"{prefix}/{n}"].shape)) for n in names)

    def row(self, prefix: str, device: torch.device) -> Tensor:
        layout = self.layout(prefix)
        row = layout.new_row(device=device)
        for name, view in layout.views(row).items():
            view.copy_(self.tensors[f"{prefix}/{name}"])
        return row

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Heads of the attention layers: rows of q, k and v, columns of o."""
        heads = self.meta.get("cfg", {}).get("heads", 1)
        found: dict[str, tuple[int, ...]] = {}
        for entry in self.target:
            layer = entry.name.split(".")[-2]
            if layer in ("linear_q", "linear_k", "linear_v"):
                found[entry.name] = (heads, 1)[: len(entry.shape)]
            elif layer == "linear_o" and len(entry.shape) == 2:
                found[entry.name] = (1, heads)
        return found

    def table(self, label_rows: tuple[str, ...], device: torch.device) -> SliceTable:
        """Every client is a level."""
        levels = [self.layout(f"distributed/{client}") for client in self.clients]
        return SliceTable.build(
            self.target, levels, groups=self.groups(), label_rows=label_rows, device=device
        )

    def merged(self, label_rows: tuple[str, ...], device: torch.device) -> Tensor:
        members = Members.build(
            self.table(label_rows, device),
            range(len(self.clients)),
            labels=[self.meta["label_split"][str(client)] for client in self.clients],
        )
        rows = [self.row(f"local_after/{client}", device) for client in self.clients]
        return slice_merge_(self.row("global_before", device), rows, members).cpu()


@pytest.mark.parametrize("name", NAMES)
def test_what_a_client_is_sent_is_what_the_released_code_sends(
    name: str, device: torch.device
) -> None:
    golden = Golden(name)
    table = golden.table((), device)
    outs = [layout.new_row(device=device) for layout in table.sources]
    slice_take_(golden.row("global_before", device), outs, table, range(len(outs)))
    for client, out in zip(golden.clients, outs, strict=True):
        assert torch.equal(out, golden.row(f"distributed/{client}", device))


@pytest.mark.parametrize("name", NAMES)
def test_the_average_is_the_released_codes(name: str, device: torch.device) -> None:
    golden = Golden(name)
    found = golden.merged(golden.label_rows, device)
    # The released code adds in float32.
    assert (found - golden.row("global_after", torch.device("cpu"))).abs().max() <= 1e-6


@pytest.mark.parametrize("name", ["conv_noniid_abcde", "transformer_abcde"])
def test_the_label_rows_change_the_average(name: str, device: torch.device) -> None:
    """Guards the test above: without the restriction the recorded average is missed by far."""
    golden = Golden(name)
    found = golden.target.views(golden.merged((), device))
    expected = golden.target.views(golden.row("global_after", torch.device("cpu")))
    for entry, view in found.items():
        close = torch.allclose(view, expected[entry], rtol=0.0, atol=1e-3)
        assert close == (entry not in golden.label_rows), entry
