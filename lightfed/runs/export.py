"""Exports weights as plain safetensors files."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn

from lightfed.api.fleet import Fleet
from lightfed.models.client_module import NetworkClient
from lightfed.state.rows import ModelLayout, Row
from lightfed.state.server_model import ServerModel
from lightfed.utils.atomic_io import write_atomically
from lightfed.utils.errors import require

Exported = Literal["server", "clients"]

# The types of a safetensors file.
_STORED = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8,
        torch.int8, torch.int16, torch.int32, torch.int64,
    }
)  # fmt: skip


def state_dict(layout: ModelLayout, row: Row, module: nn.Module | None = None) -> dict[str, Tensor]:
    """A row as a state dict of the module, or of the user's network in a `NetworkClient`.

    Tensors to which `module` gives several names have all of them.
    """
    return _named(_views(layout, row), module)


def _views(layout: ModelLayout, row: Row) -> dict[str, Tensor]:
    return layout.floats.views(row.floats) | layout.integers.views(row.integers)


def _named(named: dict[str, Tensor], module: nn.Module | None) -> dict[str, Tensor]:
    tied: dict[int, list[str]] = defaultdict(list)
    for name, tensor in module.state_dict(keep_vars=True).items() if module else ():
        tied[id(tensor)].append(name)
        if name in named:
            named[name] = named[name].to(tensor.dtype)  # rows are float32 and int64
    for names in tied.values():
        held = next((named[name] for name in names if name in named), None)
        named |= {} if held is None else dict.fromkeys(names, held)
    network = module is None or isinstance(module, NetworkClient)
    bare = network and all(name.startswith("net.") for name in named)
    prefix = "net." if bare else ""
    return {name.removeprefix(prefix): x.detach().cpu().clone() for name, x in named.items()}


def check(fleet: Fleet, kinds: Sequence[Exported]) -> None:
    """Reject an export that would only fail after the last round."""
    for state in fleet.groups if kinds else ():
        for name, p in state.live.frozen.items():
            found = f"{name} is {p.dtype}, which a safetensors file cannot hold"
            fix = "set it to [], or give the parameter another type"
            require(p.dtype in _STORED, "model.export", found, fix)
    if "clients" in kinds:
        here = fleet.mine(range(fleet.clients)) if fleet.stateful else [0]
        for client in here[:1]:
            fleet.deployed(client)


def export(fleet: Fleet, folder: Path, *, kinds: Sequence[Exported]) -> None:
    """Write each rank's share of `server.safetensors` (one a model), `client<k>.safetensors`.

    The server's lack tensors that stay with clients; all have what is in rows. Frozen parameters
    that all groups share are written once, as `base.safetensors`; others are in the clients' files.
    A module with `export_adapter(folder)` also writes `client<k>/` in a form of its own.
    """
    shared, first = fleet.base.shared, fleet.groups[0]
    if kinds and fleet.ranks.rank == 0 and shared:
        tensors = {name: first.live.frozen[name].data for name in shared}
        _save(_named(tensors, first.module), folder / "base.safetensors")
    if "server" in kinds and fleet.ranks.rank == 0:
        for name, module in fleet.algorithm.named_modules():
            if isinstance(module, ServerModel):
                suffix = "" if name == "model" else f"-{name}"
                named = _views(module.layout, module.row)
                sent = {n: tensor for n, tensor in named.items() if n not in fleet.personal}
                _save(_named(sent, first.module), folder / f"server{suffix}.safetensors")
    if "clients" in kinds:
        rank, world = fleet.ranks.rank, fleet.ranks.world
        share = range(rank, fleet.clients, world)
        for client in fleet.mine(range(fleet.clients)) if fleet.stateful else share:
            rows, state = fleet.deployed(client), fleet.groups[fleet.home_group(client)]
            own = {n: p.data for n, p in state.live.frozen.items() if n not in shared}
            tensors = state_dict(rows.live.layout, rows.row(client), state.module)
            _save(tensors | _named(own, state.module), folder / f"client{client}.safetensors")
            if hasattr(state.module, "export_adapter"):
                with rows.bound(client) as module:
                    module.export_adapter(folder / f"client{client}")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write(save(tensors)))


def export_masks(fleet: Fleet, folder: Path) -> None:
    """Write `client<k>.safetensors` with the packed `mask` of every client that has one.

    Bit i of word w is element 32 w + i of a row. Each rank writes its own clients.
    """
    if not fleet.stateful:
        return
    for client in fleet.mine(range(fleet.clients)):
        mask = fleet.kept.mask(client)
        if mask is not None:
            _save({"mask": mask.cpu()}, folder / f"client{client}.safetensors")
