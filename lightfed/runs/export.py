"""Exports weights as plain safetensors files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from safetensors.torch import save_file
from torch import Tensor

from lightfed.api.fleet import Fleet
from lightfed.state.rows import ModelLayout, Row
from lightfed.state.server_model import ServerModel

Exported = Literal["server", "clients"]


def state_dict(layout: ModelLayout, row: Row) -> dict[str, Tensor]:
    """A row as the network's state dict, by names without the prefix of `ClientModule`."""
    named = layout.floats.views(row.floats) | layout.integers.views(row.integers)
    return {
        name.removeprefix("net."): tensor.detach().cpu().clone() for name, tensor in named.items()
    }


def export(fleet: Fleet, folder: Path, *, kinds: Sequence[Exported]) -> None:
    """Write each rank's share of `server.safetensors` (one a model), `client<k>.safetensors`."""
    if "server" in kinds and fleet.ranks.rank == 0:
        for name, module in fleet.algorithm.named_modules():
            if isinstance(module, ServerModel):
                suffix = "" if name == "model" else f"-{name}"
                _save(state_dict(module.layout, module.row), folder / f"server{suffix}.safetensors")
    if "clients" in kinds:
        rank, world = fleet.ranks.rank, fleet.ranks.world
        share = range(rank, fleet.clients, world)
        for client in fleet.mine(range(fleet.clients)) if fleet.algorithm.stateful else share:
            layout, row = fleet.algorithm.client_row(fleet, client)
            _save(state_dict(layout, row), folder / f"client{client}.safetensors")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def export_masks(fleet: Fleet, folder: Path) -> None:
    """Write `client<k>.safetensors` with the packed `mask` of every client that has one.

    Bit i of word w is element 32 w + i of a row. Each rank writes its own clients.
    """
    if not fleet.algorithm.stateful:
        return
    for client in fleet.mine(range(fleet.clients)):
        mask = fleet.mask(client)
        if mask is not None:
            _save({"mask": mask.cpu()}, folder / f"client{client}.safetensors")
