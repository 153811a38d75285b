"""Which client groups train side by side, how many clients at once, and why others do not.

The configuration and the round decide, never a rank: what a client is trained with is part of its
bits.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import lightning.pytorch as L
import torch
from torch import nn, optim
from torch.optim import Optimizer

from lightfed.local.group_state import GroupState, Packing
from lightfed.local.hooks import SESSION_HOOKS, SessionFleet, SessionHooks
from lightfed.local.memory import client_bytes
from lightfed.local.session import Autocast
from lightfed.models.compiled import compiled_layers
from lightfed.models.trials import trial_copy
from lightfed.packs.known_layers import listens_to_gradients, may_mix_samples, unknown
from lightfed.packs.pack_check import CLIENTS, batch_sizes, difference_in_packs
from lightfed.packs.stacked_optimizer import ELEMENTWISE
from lightfed.utils.errors import UserError, reason
from lightfed.utils.torch_private import _ConvNd

log = logging.getLogger(__name__)

SideBySide = Literal["auto", "off"] | bool | int

# Clients of a pack under `auto`, the same if they are tiny, and the optimizers that it packs.
AUTO = 32
AUTO_OF_TINY = 64
_AUTO_OPTIMIZERS = (optim.SGD, optim.Adam, optim.AdamW)

# MiB of a pack where the configuration does not say, by the kind of device. More would leave the
# caches of a CPU. A GPU has gigabytes, and 32 clients of a small convolutional network take one.
# Not the memory of this GPU decides: the same configuration makes the same packs on another one.
MEMORY = {"cpu": 256, "gpu": 2048}

_MEBIBYTE = 1 << 20
_FLOAT_BYTES = 4

# What a pack needs to be faster on a CPU, measured on the networks of benchmarks/packs.py.
#
# Fewer clients gain nothing.
_FEWEST_CLIENTS = 6
# Above these forward FLOPs of a batch one client keeps a CPU busy.
_MOST_FLOPS = 5e7
_MOST_FLOPS_OF_CONVOLUTIONS = 1e7
# Above this number of bytes, the parameters and gradients of several clients leave a core's cache.
# Frozen parameters do not count: there is one copy of them for all clients.
_MOST_PARAMETER_BYTES = 512 << 10
# More than `AUTO` tiny clients are in a pack, as long as their parameters have no more bytes than
# this together. With larger ones nothing is gained.
_PACK_BYTES = 1 << 20


class _TrainsAlone(Exception):
    """The clients of a group train one after the other; the text says why."""


@dataclass
class Packs:
    """How the configuration wants clients to be trained.

    Attributes:
        side_by_side: Number of clients in a pack, "auto" or "off".
        memory: MiB for the rows, gradients and activations of a pack; None for MEMORY.

    Raises:
        UserError: The number is below 2, or there is no memory.
    """

    side_by_side: SideBySide = "auto"
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.side_by_side is False:  # YAML reads a bare off as a boolean
            self.side_by_side = "off"
        if isinstance(self.side_by_side, int) and self.side_by_side < 2:
            raise UserError(
                "model.side_by_side",
                str(self.side_by_side),
                "give the number of clients in a pack, 2 or more, or auto, or off",
            )
        if self.memory is not None and self.memory < 1:
            raise UserError("model.pack_memory", f"{self.memory} MiB", "give at least 1")

    def of(
        self,
        fleet: SessionFleet,
        state: GroupState,
        make: Callable[[L.LightningModule], Optimizer | str],
        context: Autocast | None,
    ) -> Packing:
        """Return how a group is packed.

        Args:
            fleet: The clients.
            state: The group. Its module is left as it is: everything is tried on a copy.
            make: Makes the optimizer of a module, or says why its clients have to train alone.
            context: Autocast of the Trainer's precision; None in full precision.

        Raises:
            UserError: As many clients as the user asks for do not fit `memory`.
        """
        if self.side_by_side == "off":
            return Packing(reason="model.side_by_side: off")

        if state.table.reason:
            return self._alone(state, state.table.reason)

        if state.group.count == 1:
            return Packing(reason="its only client")

        for hooks in fleet.hooks:
            if not hooks_allow_packs(hooks):
                name = type(hooks).__name__
                return Packing(reason=f"{name} does not declare side_by_side for its session hooks")

        try:
            return self._packing(fleet, state, make, context)
        except _TrainsAlone as obstacle:
            return self._alone(state, str(obstacle))

    def memory_on(self, device: torch.device) -> int:
        """Return the MiB of a pack on a kind of device, whatever memory this machine has."""
        if self.memory is not None:
            return self.memory
        return MEMORY["cpu" if device.type == "cpu" else "gpu"]

    def _alone(self, state: GroupState, obstacle: str) -> Packing:
        """Say why a group is not packed: a warning if the user has asked for packs."""
        level = logging.INFO if self.side_by_side == "auto" else logging.WARNING
        log.log(level, "group %s trains one client at a time: %s", state.name, obstacle)
        return Packing(reason=obstacle)

    def _packing(
        self,
        fleet: SessionFleet,
        state: GroupState,
        make: Callable[[L.LightningModule], Optimizer | str],
        context: Autocast | None,
    ) -> Packing:
        """Return how a group is packed; arguments as for `of`.

        Raises:
            _TrainsAlone: It is not packed.
            UserError: As many clients as the user asks for do not fit `memory`.
        """
        if fleet.data.task == "columns":
            raise _TrainsAlone("its samples have named columns")

        # A graph of torch.compile is one client's. In a pack it would be compiled again for every
        # number of clients and size of a batch, until torch gives up.
        for layer in compiled_layers(state.module).values():
            raise _TrainsAlone(f"{type(layer).__name__} is compiled, for one client at a time")

        if self.side_by_side == "auto":
            obstacle = unknown(state.module) or _unprofitable(fleet, state)
            if obstacle:
                raise _TrainsAlone(obstacle)

        module, kind = self._copy_and_optimizer(state, make)
        # Momentum is the only state of an optimizer that packs hand on to a client's next session.
        hands_on = fleet.optimizers is not None
        if hands_on and kind is not optim.SGD and not hasattr(kind, "stacked"):
            raise _TrainsAlone(f"{kind.__name__} hands on how many steps a client has taken")

        if self.side_by_side == "auto":
            return self._automatic(fleet, state, module, kind)
        return self._of_a_number(fleet, state, module, context)

    def _copy_and_optimizer(
        self,
        state: GroupState,
        make: Callable[[L.LightningModule], Optimizer | str],
    ) -> tuple[L.LightningModule, type[Optimizer]]:
        """Return a copy of the group's module for trials, and the class of its optimizer.

        Raises:
            _TrainsAlone: The module cannot be copied, or the optimizer cannot step several clients.
        """
        # A copy would not have these hooks, so that no trial could see what they do.
        if any(listens_to_gradients(layer) for layer in state.module.modules()):
            raise _TrainsAlone("its tensors or layers have hooks on gradients")

        try:
            module = trial_copy(state.module)
        except Exception as error:  # a user's module can raise anything
            raise _TrainsAlone(f"it cannot be copied: {reason(error)}") from error

        # `configure_optimizers` may ask the Trainer. The steps of a trial belong to no session.
        module.trainer = state.trainer
        optimizer = make(module)
        module.trainer = None

        if isinstance(optimizer, str):
            raise _TrainsAlone(optimizer)
        _check_optimizer(optimizer, module)
        return module, type(optimizer)

    def _automatic(
        self,
        fleet: SessionFleet,
        state: GroupState,
        module: L.LightningModule,
        kind: type[Optimizer],
    ) -> Packing:
        """Return the packing of `auto`."""
        if kind not in _AUTO_OPTIMIZERS and not hasattr(kind, "stacked"):
            raise _TrainsAlone(
                f"its optimizer is {kind.__name__}; set model.side_by_side to a number"
            )

        memory = self.memory_on(state.store.device)
        fitting = int(memory * _MEBIBYTE / _bytes_in_a_pack(fleet, state, module))
        if fitting < AUTO:
            raise _TrainsAlone(f"{AUTO} clients take more than model.pack_memory, {memory} MiB")

        most = min(_most_clients(state), fitting)
        least = _FEWEST_CLIENTS if state.store.device.type == "cpu" else 2
        return Packing(most, least, even=may_mix_samples(module))

    def _of_a_number(
        self,
        fleet: SessionFleet,
        state: GroupState,
        module: L.LightningModule,
        context: Autocast | None,
    ) -> Packing:
        """Return the packing if the user has given a number of clients."""
        even = may_mix_samples(module)
        known = not unknown(module)
        if not known:
            difference = difference_in_packs(module, state, fleet.data, context, even=even)
            if difference:
                raise _TrainsAlone(difference)

        wanted = min(int(self.side_by_side), state.group.count)
        memory = self.memory_on(state.store.device)
        fitting = int(memory * _MEBIBYTE / _bytes_in_a_pack(fleet, state, module))
        if wanted > fitting:
            found = f"{wanted}, and {fitting} clients fit model.pack_memory, {memory} MiB"
            fix = "lower it" if fitting > 1 else "set it to off"
            raise UserError("model.side_by_side", found, f"{fix}, or raise model.pack_memory")

        if not known and fleet.ranks.rank == 0:
            log.warning(
                "group %s trains %d clients at once, as model.side_by_side says, although its "
                "network or step is unknown: in a trial, %d clients with batches of %s samples "
                "had the results of clients alone; later steps and other data are not checked",
                state.name,
                wanted,
                CLIENTS,
                _in_words(batch_sizes(even=even)),
            )
        return Packing(wanted, even=even, known=known)


def hooks_allow_packs(hooks: SessionHooks) -> bool:
    """Return whether the hooks of sessions keep a client's state out of Python attributes.

    A class that overrides a hook has to declare `side_by_side` again: what its parent says is about
    other hooks.
    """
    for kind in type(hooks).__mro__:
        if kind is SessionHooks:
            break
        if "side_by_side" in vars(kind):
            return hooks.side_by_side is not False
        if any(name in vars(kind) for name in SESSION_HOOKS):
            return False
    return True


def _check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise `_TrainsAlone` if an optimizer cannot step several clients at once."""
    groups = optimizer.param_groups
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    if stepped != trained:
        raise _TrainsAlone("its optimizer has only some of the parameters")

    kind = type(optimizer)
    if kind not in ELEMENTWISE and not hasattr(kind, "stacked"):
        raise _TrainsAlone(f"{kind.__name__} may mix the parameters of a tensor")

    if any(group.get("fused") or group.get("differentiable") for group in groups):
        raise _TrainsAlone("its optimizer is fused or differentiable")


def _unprofitable(fleet: SessionFleet, state: GroupState) -> str:
    """Return why packing would not pay on this device; empty if it does."""
    if state.store.device.type != "cpu":
        return ""

    clients_in_a_round = fleet.work.share(fleet.clients) * state.group.count
    if clients_in_a_round < _FEWEST_CLIENTS:
        return f"only {clients_in_a_round:.3g} clients in a round"

    convolves = any(isinstance(layer, _ConvNd) for layer in state.module.modules())
    most_flops = _MOST_FLOPS_OF_CONVOLUTIONS if convolves else _MOST_FLOPS
    if state.flops * fleet.data.largest_batch > most_flops:
        return "one client keeps a CPU busy"

    if _FLOAT_BYTES * state.layout.parameter_numel > _MOST_PARAMETER_BYTES:
        return "the parameters of one client fill a CPU's cache"

    return ""


def _bytes_in_a_pack(fleet: SessionFleet, state: GroupState, module: L.LightningModule) -> float:
    """Estimate the bytes that a client takes in a pack."""
    # Copies of models that its network compares its own with, as MOON's.
    rows_besides = getattr(getattr(module, "net", None), "rows_besides", 0)
    return client_bytes(module, state, fleet.data) + rows_besides * state.row_bytes


def _most_clients(state: GroupState) -> int:
    """Return how many clients of a group a pack has at most.

    Every pack takes the same time beside its arithmetic, which tiny clients have little of. The
    number follows from the network alone, so that it is the same on any number of ranks.
    """
    parameter_bytes = _FLOAT_BYTES * state.layout.parameter_numel
    return max(AUTO, min(AUTO_OF_TINY, _PACK_BYTES // max(1, parameter_bytes)))


def _in_words(numbers: list[int]) -> str:
    """Return numbers as a list in a sentence."""
    *first, last = numbers
    return ", ".join(map(str, first)) + f" and {last}"
