"""Which client groups train side by side, how many clients at once, and why others do not.

The configuration alone decides, never a rank's load or its free memory: how a client is trained is
part of its bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lightfed.local.client_group import GroupState
from lightfed.local.client_module import ClientModule, MaskedLanguageClient
from lightfed.local.hooks import SESSION_HOOKS, Hooks, Tested
from lightfed.local.local_work import LocalWork
from lightfed.local.optimizer import Stepper
from lightfed.local.packed.evaluation import Together
from lightfed.local.packed.forward import graph_of
from lightfed.local.packed.graph import NetworkGraph
from lightfed.local.packed.steps.packing import Capture, Packing, on_device
from lightfed.local.packed.steps.steppers import packed_stepper
from lightfed.local.packed.steps.trial import tried
from lightfed.local.session import Runtime
from lightfed.models.build import DataSpec, blank
from lightfed.state.costs import activation_bytes
from lightfed.utils.errors import UserError
from lightfed.utils.rng import streams

SideBySide = Literal["auto", "off"] | bool | int

# Under vmap fewer clients than this have other bits: torch then takes other algorithms.
FLOOR = 3
_PAIR = 2  # with several threads a product of one matrix has other bits than one of several
_MODELS = ("evaluated", "evaluated_server", "local")  # hooks that bind what is tested
_FEW = 6  # clients of a group in a round; fewer gain nothing
_MEBI = 1 << 20
_MOST = 128  # clients of a pack under `auto`
# Rows in work at once: parameters, gradients, momentum, a copy in case the pack fails.
_ROWS = 5
# Kept for the backward pass, with gradients; convolutions also keep columns (packs.py --memory).
_ACTIVATIONS, _COLUMNS = 1.5, 5.0
# Forward FLOPs of a batch above which one client keeps a CPU busy, and a pack gains nothing; and
# bytes of its parameters, of which those of several clients, with gradients, leave a core's cache
# (measured on the networks of tests/benchmarks/packs.py).
_BUSY_CONVOLUTIONS = 1e7
_BUSY = 5e7
_LARGE = 512 << 10
_BUSY_VMAP = 4e6  # vmap takes milliseconds of Python a step


class Federated(Protocol):
    """The part of the federation that the decision depends on."""

    algorithm: Hooks
    clients: int
    data: Any
    groups: list[GroupState]
    work: LocalWork


class BatchedData(DataSpec, Protocol):
    """Data that comes in batches."""

    batch_size: int


@dataclass(frozen=True)
class Packed:
    """How the configuration wants clients to be trained.

    Attributes:
        side_by_side: clients of a pack, auto or off.
        memory: MiB for the rows, gradients and activations of a pack; bounds auto.
        capture: whether a device replays recorded steps, auto or off.

    Raises:
        UserError: a number below 2, or no memory.
    """

    side_by_side: SideBySide = "auto"
    memory: int = 256
    capture: Capture = "auto"

    def __post_init__(self) -> None:
        for name in ("side_by_side", "capture"):
            if getattr(self, name) is False:  # a bare off in YAML
                object.__setattr__(self, name, "off")
        if self.capture not in ("auto", "off"):
            raise UserError("model.capture", str(self.capture), "give auto or off")
        if isinstance(self.side_by_side, int) and self.side_by_side < 2:
            fix = "give the clients of a pack, 2 or more, or auto, or off"
            raise UserError("model.side_by_side", str(self.side_by_side), fix)
        if self.memory < 1:
            raise UserError("model.pack_memory", f"{self.memory} MiB", "give at least 1")

    def packings(
        self,
        fleet: Federated,
        steppers: Sequence[tuple[Stepper, bool]],
        data: BatchedData,
        runtime: Runtime,
    ) -> list[Packing]:
        """Decide how each group is trained; steppers say if they take the round's rate."""
        share = fleet.work.share(fleet.clients)
        return [
            self._packing(state, stepper, fleet.algorithm, data, share, runtime)
            for state, (stepper, _) in zip(fleet.groups, steppers, strict=True)
        ]

    def together(self, fleet: Federated, kind: Tested, group: int) -> tuple[Together, int] | None:
        """How the clients of a group are tested at once, and how many; None for one by one."""
        method = type(fleet.algorithm).__mro__
        declared = _first_with(method, "tests_together")
        if self.side_by_side == "off" or any(_first_with(method, n) < declared for n in _MODELS):
            return None
        together = fleet.algorithm.tests_together(fleet, kind, group)
        if together is None:
            return None
        if together.module.training:
            together.module.eval()
        state = fleet.groups[group]
        own, auto = together.rows is not None, self.side_by_side == "auto"
        graph = graph_of(together.module, training=False)
        busy = auto and _busy(state, fleet.data.batch_size)
        x = _zeros(state, fleet.data)
        if graph is None or (own and (busy or not _runs(graph, together.module, x))):
            return None
        fits = max(1, self.memory * _MEBI // (4 * state.layout.size * _ROWS))
        return together, min(_MOST, fits) if self.side_by_side == "auto" else int(self.side_by_side)

    def _packing(
        self,
        state: GroupState,
        stepper: Stepper,
        algorithm: Hooks,
        data: BatchedData,
        share: float,
        runtime: Runtime,
    ) -> Packing:
        if self.side_by_side == "off":
            return Packing(reason="model.side_by_side: off")
        why = _unfit(state, algorithm, scaled=runtime.scaler is not None)
        if not why and self.side_by_side == "auto":
            why = _unprofitable(state, data.batch_size, share * state.group.count)
        starts = type(algorithm).session_start is not Hooks.session_start
        step = why or tried(state, data, runtime.forward_context, starts=starts)
        if isinstance(step, str):
            return Packing(reason=step)
        pulls = type(algorithm).proximal is not Hooks.proximal
        packed = packed_stepper(stepper, state.live.trainable, pulls=pulls)
        if isinstance(packed, str):
            return Packing(reason=packed)
        floor = FLOOR if graph_of(state.module) is None else _PAIR
        pull = _received_pull(algorithm)
        packing = Packing(floor=floor, stepper=packed)
        packing = on_device(packing, state, stepper, step, pull=pull, capture=self.capture)
        most = self.side_by_side
        if most == "auto":
            anchors = int(pulls and packing.fused is not None)
            one = client_bytes(state, data, rows=_ROWS + packing.matrices + anchors)
            most = min(_MOST, int(self.memory * _MEBI / one))
        return replace(packing, most=max(int(most), floor))


def client_bytes(state: GroupState, data: BatchedData, *, rows: int = _ROWS) -> float:
    """An estimate of the memory that a client takes in a pack, with so many rows of its own."""
    batch = data.batch_size * activation_bytes(state.module, _zeros(state, data))
    kept = _COLUMNS if _has(state.module, (_ConvNd,)) else _ACTIVATIONS
    return 4 * state.layout.size * rows + kept * batch


def _unfit(state: GroupState, algorithm: Hooks, *, scaled: bool) -> str:
    """Why a group cannot be packed; empty if it can."""
    if state.group.count == 1:
        return "its only client"
    if not _hooks_allow(algorithm):
        return f"{type(algorithm).__name__} does not declare side_by_side for its session hooks"
    if _hooked(state.module):
        return "its tensors or layers have hooks on gradients"
    return "16-mixed scales the loss of each session" if scaled else ""


def _hooks_allow(algorithm: Hooks) -> bool:
    """Whether an algorithm's session hooks keep a client's state out of Python attributes.

    A class that overrides a hook has to declare it again: what its parent says is of other hooks.
    """
    order = type(algorithm).__mro__
    declared = _first_with(order, "side_by_side")
    if order[declared] is Hooks:
        declared = len(order)
    hooks = [_first_with(order, name) for name in SESSION_HOOKS]
    overridden = [place for place in hooks if order[place] is not Hooks]
    if any(place < declared for place in overridden):
        return False
    return algorithm.side_by_side is not False


def _received_pull(algorithm: Hooks) -> float | None:
    """How strongly clients are pulled to the model received; None if gradients change otherwise."""
    order = type(algorithm).__mro__
    changed, declared = (_first_with(order, n) for n in ("local_gradient", "received_pull"))
    if order[changed] is Hooks:
        return 0.0
    return algorithm.received_pull or None if declared <= changed else None


def _hooked(module: nn.Module) -> bool:
    """Whether something listens to gradients, which are those of several clients here."""
    parts = any(part._backward_hooks or part._backward_pre_hooks for part in module.modules())
    return parts or any(
        p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters()
    )


def _first_with(order: Sequence[type], name: str) -> int:
    """The position of the first class that defines an attribute."""
    return next(i for i, kind in enumerate(order) if name in vars(kind))


def _unprofitable(state: GroupState, batch_size: int, expected: float) -> str:
    """Why packing would not pay on this device; empty if it does."""
    if type(state.module) not in (ClientModule, MaskedLanguageClient):
        return "its training_step may keep Python state; set model.side_by_side to a number"
    if state.store.device.type != "cpu":
        return ""
    if expected < _FEW:
        return f"{expected:.3g} clients in a round"
    flops = state.flops * batch_size
    if graph_of(state.module) is None and flops > _BUSY_VMAP:
        return "its layers are not all known, and a step of vmap costs more than it saves"
    if _busy(state, batch_size):
        return "one client keeps a CPU busy"
    large = 4 * state.layout.parameter_numel > _LARGE
    return "the parameters of one client fill a CPU's cache" if large else ""


def _busy(state: GroupState, batch_size: int) -> bool:
    """Whether the batches of one client keep a CPU busy."""
    limit = _BUSY_CONVOLUTIONS if _has(state.module, (_ConvNd,)) else _BUSY
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


def _zeros(state: GroupState, data: DataSpec) -> Tensor:
    return blank(data, samples=2).to(state.store.device)


def _has(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(part, kinds) for part in module.modules())
