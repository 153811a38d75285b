"""How the clients of a group are tested at once, under the configuration."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lightfed.local.client_group import GroupState
from lightfed.local.hooks import Hooks, Tested
from lightfed.local.packed.evaluation import Together
from lightfed.local.packed.forward import graph_of
from lightfed.local.packed.graph import NetworkGraph
from lightfed.local.packs.rules import Packs
from lightfed.models.build import blank
from lightfed.utils.rng import streams

_MODELS = ("evaluated", "evaluated_server", "local")  # hooks that bind what is tested
_MEBI = 1 << 20
_MOST = 128  # clients at once under `auto`
_ROWS = 5
_BUSY_CONVOLUTIONS = 1e7
_BUSY = 5e7


class Federated(Protocol):
    """The part of the federation that the decision depends on."""

    algorithm: Hooks
    data: Any
    groups: list[GroupState]


def together(
    packs: Packs, fleet: Federated, kind: Tested, group: int
) -> tuple[Together, int] | None:
    """How the clients of a group are tested at once, and how many; None for one by one."""
    method = type(fleet.algorithm).__mro__
    declared = _first_with(method, "tests_together")
    if packs.side_by_side == "off" or any(_first_with(method, n) < declared for n in _MODELS):
        return None
    together = fleet.algorithm.tests_together(fleet, kind, group)
    if together is None:
        return None
    if together.module.training:
        together.module.eval()
    state = fleet.groups[group]
    own, auto = together.rows is not None, packs.side_by_side == "auto"
    graph = graph_of(together.module, training=False)
    busy = auto and _busy(state, fleet.data.batch_size)
    x = blank(fleet.data, samples=2).to(state.store.device)
    if graph is None or (own and (busy or not _runs(graph, together.module, x))):
        return None
    fits = max(1, packs.memory * _MEBI // (4 * state.layout.size * _ROWS))
    return together, min(_MOST, fits) if auto else int(packs.side_by_side)


def _first_with(order: Sequence[type], name: str) -> int:
    """The position of the first class that defines an attribute."""
    return next(i for i, kind in enumerate(order) if name in vars(kind))


def _busy(state: GroupState, batch_size: int) -> bool:
    """Whether the batches of one client keep a CPU busy."""
    convolves = any(isinstance(part, _ConvNd) for part in state.module.modules())
    limit = _BUSY_CONVOLUTIONS if convolves else _BUSY
    return state.store.device.type == "cpu" and state.flops * batch_size > limit


@torch.no_grad()
def _runs(graph: NetworkGraph, module: nn.Module, x: Tensor) -> bool:
    """Whether a graph in evaluation runs on two clients; some layers refuse only then."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    values = {name: torch.stack([tensor] * 2) for name, tensor in tensors}
    try:
        graph(torch.stack([x] * 2), values, lambda: streams((), x.device))
    except Exception:  # of options that it does not know
        return False
    return True
