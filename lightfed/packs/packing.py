"""Which client groups train side by side, how many clients at once, and why others do not.

The configuration and the round decide, never a rank: what a client is trained with is part of its
bits.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import lightning.pytorch as L
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.client_group import GroupState, Packing, ignore
from lightfed.local.hooks import SESSION_HOOKS, SessionFleet, SessionHooks
from lightfed.local.memory import client_bytes
from lightfed.local.session import Autocast
from lightfed.models.attributes import attributes
from lightfed.models.image_format import channels_first
from lightfed.models.trials import trial_copy
from lightfed.packs import stacked
from lightfed.packs.session import PackForward, has_known_loss
from lightfed.packs.stacked_optimizer import ELEMENTWISE
from lightfed.state.optimizer_state import settings_of
from lightfed.state.rows import LiveModule, Row
from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.rng import python_states, seeded
from lightfed.utils.torch_private import _BatchNorm, _ConvNd, tree_flatten

log = logging.getLogger(__name__)

SideBySide = Literal["auto", "off"] | bool | int

# Layers that `auto` packs: tests/packs/test_what_packs.py holds each against clients alone. A
# network of the package declares `packs` in its class: its forward only calls its layers, and
# operators that do not mix samples.
LAYERS: tuple[type[nn.Module], ...] = (
    nn.Sequential, nn.Identity, nn.Flatten, nn.Linear, nn.Conv1d, nn.Conv2d, nn.BatchNorm1d,
    nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d,
    nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.Dropout, nn.ReLU, nn.LeakyReLU,
    nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh,
)  # fmt: skip
_OPTIMIZERS = (optim.SGD, optim.Adam, optim.AdamW)

AUTO = 32  # clients of a pack under `auto`
_FEW = 6  # clients of a pack; on a CPU fewer gain nothing
_MEBI = 1 << 20
# Forward FLOPs of a batch above which one client keeps a CPU busy, and a pack gains nothing; and
# bytes of its parameters, of which those of several clients, with gradients, leave a core's cache
# (measured on the networks of benchmarks/packs.py).
_BUSY_CONVOLUTIONS = 1e7
_BUSY = 5e7
_LARGE = 512 << 10

_CLIENTS = 3  # of the check of a user's module
# Samples of the clients' batches in its steps; without `even` the smaller ones are filled up.
_EVEN = ((4, 4, 4), (2, 2, 2), (3, 3, 3))
_UNEVEN = ((4, 4, 4), (2, 2, 2), (4, 3, 2))
_CLOSE = 1e-4
_SEEDING, _SEEDS = (torch, torch.random), ("manual_seed", "seed")


@dataclass
class Packs:
    """How the configuration wants clients to be trained.

    Attributes:
        side_by_side: clients of a pack, auto or off.
        memory: MiB for the rows, gradients and activations of a pack.

    Raises:
        UserError: a number below 2, or no memory.
    """

    side_by_side: SideBySide = "auto"
    memory: int = 256

    def __post_init__(self) -> None:
        if self.side_by_side is False:  # a bare off in YAML
            self.side_by_side = "off"
        if isinstance(self.side_by_side, int) and self.side_by_side < 2:
            fix = "give the clients of a pack, 2 or more, or auto, or off"
            raise UserError("model.side_by_side", str(self.side_by_side), fix)
        if self.memory < 1:
            raise UserError("model.pack_memory", f"{self.memory} MiB", "give at least 1")

    def of(
        self,
        fleet: SessionFleet,
        state: GroupState,
        make: Callable[[L.LightningModule], Optimizer | str],
        context: Autocast | None,
    ) -> Packing:
        """How a group is packed.

        `make` makes the optimiser of a module, or says why that trains alone. It gets a copy of the
        group's module: its own is left as it is.
        """
        if self.side_by_side == "off":
            return Packing(reason="model.side_by_side: off")
        if state.table.reason:
            level = logging.INFO if self.side_by_side == "auto" else logging.WARNING
            log.log(level, "group %s trains one client at a time: %s", state.name,
                    state.table.reason)  # fmt: skip
            return Packing(reason=state.table.reason)
        if state.group.count == 1:
            return Packing(reason="its only client")
        for hooks in fleet.hooks:
            if not _hooks_allow(hooks):
                name = type(hooks).__name__
                return Packing(reason=f"{name} does not declare side_by_side for its session hooks")
        auto = self.side_by_side == "auto"
        why = unknown(state.module) or _unprofitable(fleet, state) if auto else ""
        if fleet.data.task == "columns":
            why = "its samples are named columns"
        found = why or self._found(fleet, state, make, context)
        if isinstance(found, Packing):
            return found
        level = logging.INFO if auto else logging.WARNING
        log.log(level, "group %s trains one client at a time: %s", state.name, found)
        return Packing(reason=found)

    def _found(
        self,
        fleet: SessionFleet,
        state: GroupState,
        make: Callable[[L.LightningModule], Optimizer | str],
        context: Autocast | None,
    ) -> Packing | str:
        """How a group is packed that may be, or why it is not."""
        if any(_listened(part) for part in state.module.modules()):  # copies have no such hooks
            return "its tensors or layers have hooks on gradients"
        try:
            module = trial_copy(state.module)
        except Exception as error:  # of a user's module
            return f"it cannot be copied: {reason(error)}"
        module.trainer = state.trainer
        optimizer = make(module)
        module.trainer = None  # a check's steps are of no session
        if isinstance(optimizer, str) or (why := _mixes(optimizer, module)):
            return optimizer if isinstance(optimizer, str) else why
        kind, even = type(optimizer), couples(module)
        if fleet.optimizers is not None and kind is not optim.SGD and not hasattr(kind, "stacked"):
            return f"{kind.__name__} hands on how many steps a client has taken"
        if self.side_by_side == "auto":
            if kind not in _OPTIMIZERS and not hasattr(kind, "stacked"):
                return f"its optimiser is {kind.__name__}; set model.side_by_side to a number"
            if client_bytes(module, state, fleet.data) * AUTO > self.memory * _MEBI:
                return f"{AUTO} clients take more than model.pack_memory, {self.memory} MiB"
            return Packing(AUTO, _FEW if state.store.device.type == "cpu" else 2, even)
        known, most = not unknown(module), min(int(self.side_by_side), state.group.count)
        if not known and (why := differs(module, state, fleet.data, context, even=even)):
            return why
        fits = int(self.memory * _MEBI / client_bytes(module, state, fleet.data))
        found = f"{most}, and {fits} clients fit model.pack_memory, {self.memory} MiB"
        fix = "lower it" if fits > 1 else "set it to off"
        require(most <= fits, "model.side_by_side", found, f"{fix}, or raise model.pack_memory")
        if not known and fleet.ranks.rank == 0:
            log.warning(
                "group %s trains %d clients at once, as model.side_by_side says: its network or "
                "step is not known, and %d clients of %s samples a batch were trained as alone; "
                "what happens only later, or with other data, is not checked",
                state.name, most, _CLIENTS, text_of_sizes(even=even),
            )  # fmt: skip
        return Packing(most, even=even, known=known)


def unknown(module: L.LightningModule) -> str:
    """Why `auto` does not know what a module's step does; empty if it does."""
    if not has_known_loss(module):
        return f"{type(module).__name__} has a training step of its own"
    net: Any = module.net
    frozen = not all(p.requires_grad for p in module.parameters())
    return strange(net) or ("it has frozen parameters" if frozen else shared(module))


def strange(net: nn.Module) -> str:
    """Which layer of a network is not known; empty if all are."""
    for name, part in net.named_modules():
        kind = type(part)
        if kind not in LAYERS and not vars(kind).get("packs", False):
            return f"{name or 'the network'} is a {kind.__name__}"
        if "forward" in vars(part) or not _known_hooks(part):
            return f"{name or 'the network'} has hooks"
        if isinstance(part, _BatchNorm) and part.momentum is None:
            return f"{name} has no momentum"
    return ""


def shared(module: nn.Module) -> str:
    """Whether layers or parameters have several names."""
    layers = [*module.named_modules(remove_duplicate=False)]
    tensors = [*module.named_parameters(remove_duplicate=False)]
    if len(layers) > len([*module.modules()]):
        return "a layer has several names"
    return "layers share parameters" if len(tensors) > len([*module.parameters()]) else ""


def couples(module: L.LightningModule) -> bool:
    """Whether its layers or its loss may mix the samples of a batch."""
    if not has_known_loss(module):
        return True
    net: Any = module.net
    return bool(strange(net)) or any(isinstance(part, _BatchNorm) for part in net.modules())


def _known_hooks(part: nn.Module) -> bool:
    """Whether a layer has no hooks but those of the package."""
    before, after = part._forward_pre_hooks.values(), part._forward_hooks.values()
    own = all(hook is channels_first for hook in before)
    own &= all(getattr(hook, "stacked", False) for hook in after)
    return own and not _listened(part)


def _listened(part: nn.Module) -> bool:
    """Whether something listens to gradients, which are those of several clients here."""
    return bool(part._backward_hooks or part._backward_pre_hooks) or any(
        p._backward_hooks or p._post_accumulate_grad_hooks
        for p in part._parameters.values()
        if p is not None
    )


def _mixes(optimizer: Optimizer, module: nn.Module) -> str:
    """Why an optimiser cannot step the parameters of several clients at once."""
    kind, groups = type(optimizer), optimizer.param_groups
    own = {id(p) for group in groups for p in group["params"]}
    if own != {id(p) for p in module.parameters() if p.requires_grad}:
        return "its optimiser has a part of the parameters"
    if kind not in ELEMENTWISE and not hasattr(kind, "stacked"):
        return f"{kind.__name__} may mix the parameters of a tensor"
    if any(group.get("fused") or group.get("differentiable") for group in groups):
        return "its optimiser is fused or differentiable"
    return ""


def _hooks_allow(hooks: SessionHooks) -> bool:
    """Whether the hooks of sessions keep a client's state out of Python attributes.

    A class that overrides a hook has to declare it again: what its parent says is of other hooks.
    """
    for kind in type(hooks).__mro__:
        if kind is SessionHooks:
            break
        if "side_by_side" in vars(kind):
            return hooks.side_by_side is not False
        if any(name in vars(kind) for name in SESSION_HOOKS):
            return False
    return True


def _unprofitable(fleet: SessionFleet, state: GroupState) -> str:
    """Why packing would not pay on this device; empty if it does."""
    if state.store.device.type != "cpu":
        return ""
    expected = fleet.work.share(fleet.clients) * state.group.count
    if expected < _FEW:
        return f"{expected:.3g} clients in a round"
    convolves = any(isinstance(part, _ConvNd) for part in state.module.modules())
    limit = _BUSY_CONVOLUTIONS if convolves else _BUSY
    if state.flops * fleet.data.largest_batch > limit:
        return "one client keeps a CPU busy"
    large = 4 * state.layout.parameter_numel > _LARGE
    return "the parameters of one client fill a CPU's cache" if large else ""


def text_of_sizes(*, even: bool) -> str:
    """The sizes of the batches that `differs` looks at, in words."""
    sizes = sorted({size for step in (_EVEN if even else _UNEVEN) for size in step})
    return ", ".join(map(str, sizes[:-1])) + f" and {sizes[-1]}"


def differs(
    module: L.LightningModule,
    state: GroupState,
    data: FederatedDataModule,
    context: Autocast | None,
    *,
    even: bool,
) -> str:
    """How steps of a few clients at once differ from those of each alone; empty if they do not.

    Three batches of other sizes, on copies of a module: every gradient and buffer, what the module
    keeps in Python, and the settings of its optimisers. `even` as of `Packing`.

    A pack draws other numbers for each client (`randomness="different"`). So the check has two
    parts: with the draws that a client has alone ("same"), and, where a client alone draws nothing
    that a seed changes, as a pack draws.
    """
    if shared(module):
        return shared(module)
    if any(getattr(part, "padding_idx", None) is not None for part in module.modules()):
        return "vmap would train the padding of an embedding"
    device = state.store.device
    try:
        with seeded(0, device):
            check = partial(_Check, module, state, data, context, even=even)
            return check().difference("same") or check().own_seeds() or _drawn(check)
    except UserError:
        raise
    except Exception as error:  # whatever a user's step does that vmap cannot follow
        return reason(error)[:200]


def _drawn(check: Callable[[], "_Check"]) -> str:
    """How a pack's own draws differ from those of a client alone, if it has none."""
    if check().draws():
        return ""
    found = check().difference("different")
    return found and f"it draws from a seed of its own: {found}"


class _NoTrainer:
    """Takes the place of `self.trainer` in a check: it says something else to each client."""

    def __getattr__(self, name: str) -> Any:
        # An AttributeError within a property would be taken for one of the module.
        raise RuntimeError(f"its step asks the Trainer for {name}")


class _Check:
    """Some clients with different models, and batches of each."""

    def __init__(
        self,
        module: L.LightningModule,
        state: GroupState,
        data: FederatedDataModule,
        context: Autocast | None,
        *,
        even: bool,
    ) -> None:
        self._stacked, self._context = deepcopy(module).train(), context
        self._alone = deepcopy(module).train()
        self._layout = state.layout
        for copy in (self._stacked, self._alone):
            copy.log = copy.log_dict = ignore  # type: ignore[method-assign]
            copy.trainer = _NoTrainer()  # type: ignore[assignment]
        factors = 1 + torch.arange(_CLIENTS)[:, None] / 16
        floats = state.initial.floats.repeat(_CLIENTS, 1)
        floats[:, : state.layout.parameter_size] *= factors
        integers = state.initial.integers.repeat(_CLIENTS, 1)
        self._rows = Row(floats, integers).to(state.store.device)
        self._sizes = _EVEN if even else _UNEVEN
        x, y = data.train_batch(0, sum(_CLIENTS * max(sizes) for sizes in self._sizes))
        self._batches: list[tuple[Tensor, ...]] = []
        first = 0
        for sizes in self._sizes:
            most = max(sizes)
            places = torch.arange(first, first + _CLIENTS * most, device=x.device) % len(x)
            first += _CLIENTS * most
            batch = tuple(part[places].unflatten(0, (_CLIENTS, most)) for part in (x, y))
            self._batches.append(batch)

    def own_seeds(self) -> str:
        """Whether a step of a client alone sets the seed of torch's generators."""
        calls: list[str] = []
        own = {(home, name): getattr(home, name) for home in _SEEDING for name in _SEEDS}

        def seeds(*_: Any) -> Any:
            calls.append("a seed")
            return torch.default_generator.manual_seed(0)

        try:
            for home, name in own:
                setattr(home, name, seeds)
            self._losses(seed=0)
        finally:
            for (home, name), function in own.items():
                setattr(home, name, function)
        return "its step sets the seed of a generator" if calls else ""

    def draws(self) -> bool:
        """Whether a client's losses follow the seed of its session."""
        return self._losses(seed=0) != self._losses(seed=1)

    def _losses(self, seed: int) -> list[float]:
        """The losses of the first client alone."""
        module: Any = self._alone
        live = LiveModule(module, self._layout)
        live.bind(Row(self._rows.floats[0].clone(), self._rows.integers[0].clone()))
        losses = []
        for index, batch in enumerate(self._batches):
            alone = tuple(part[0, : self._sizes[index][0]].clone() for part in batch)
            with seeded(seed, alone[0].device), (self._context or torch.enable_grad)():
                losses.append(float(_loss_of(module.training_step(alone, index)).detach()))
        live.unbind()
        live.restore()
        return losses

    def difference(self, randomness: str) -> str:
        """The first tensor that differs, with such draws as of `torch.func.vmap`."""
        forward = PackForward(self._stacked, self._layout, self._context)
        values = stacked.gather(self._layout, self._rows, self._stacked)
        outside = {n: b for n, b in self._stacked.named_buffers() if n not in values}
        values |= {n: torch.stack([b] * _CLIENTS) for n, b in outside.items()}
        leaves = [values[name].requires_grad_() for name in forward.trained]
        kept, python = attributes(self._stacked), python_states()
        settings = _settings(self._stacked)
        found: list[dict[str, Tensor | None]] = []
        for index, batch in enumerate(self._batches):
            x, y = (part.clone() for part in batch)
            sizes = self._sizes[index]
            unequal = None
            if len(set(sizes)) > 1:
                unequal = torch.tensor(sizes, device=x.device)
            with seeded(index, x.device):
                before = python_states()
                losses, _, grads = forward(
                    values, {}, leaves, (x, y), index, unequal, randomness=randomness
                )
                if python_states() != before:
                    return "its step draws from random or numpy"
            buffers = {n: v.detach().clone() for n, v in values.items() if n in forward.buffers}
            found.append({"the loss": losses, **_named(forward.trained, grads), **buffers})
        if attributes(self._stacked) != kept or python_states() != python:
            return "its step keeps numbers or tensors in attributes that are no buffers"
        if _settings(self._stacked) != settings:
            return "its step changes the settings of its optimiser"
        return next(filter(None, map(self._compare, range(_CLIENTS), [found] * _CLIENTS)), "")

    def _compare(self, client: int, found: Sequence[Mapping[str, Tensor | None]]) -> str:
        """The first tensor that differs for a client."""
        module: Any = self._alone
        live = LiveModule(module, self._layout)
        initial = {n: b.clone() for n, b in self._stacked.named_buffers()}
        live.bind(Row(self._rows.floats[client].clone(), self._rows.integers[client].clone()))
        for name, buffer in module.named_buffers():
            if name not in {e.name for e in [*self._layout.floats, *self._layout.integers]}:
                buffer.copy_(initial[name])
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        for index, packed_step in enumerate(found):
            own = self._sizes[index][client]
            batch = tuple(part[client, :own].clone() for part in self._batches[index])
            with seeded(index, batch[0].device), (self._context or torch.enable_grad)():
                output = module.training_step(batch, index)
            loss = _loss_of(output)
            grads = torch.autograd.grad(loss.reshape(()), live.trainable, allow_unused=True)
            buffers = {n: b.clone() for n, b in module.named_buffers()}
            mine = {"the loss": loss.detach(), **_named(names, grads), **buffers}
            scale = max((float(g.abs().max()) for g in grads if g is not None), default=1.0)
            for name, value in mine.items():
                other = packed_step.get(name)
                packed = None if other is None else other[client]
                if not _close(value, packed, scale, exact=self._context is None):
                    return f"in a pack {name} differs from that of a client alone"
        live.unbind()
        return ""


def _loss_of(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, dict) else output
    return loss


def _settings(module: nn.Module) -> list[dict[str, Any]]:
    """The settings of the optimisers that a module holds, such as their rates."""
    held = [value for part in module.modules() for value in vars(part).values()]
    leaves, _ = tree_flatten([value for value in held if not isinstance(value, nn.Module)])
    return [
        dict(settings_of(group))
        for leaf in leaves
        if isinstance(leaf, Optimizer)
        for group in leaf.param_groups
    ]


def _named(names: Sequence[str], grads: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    return {f"the gradient of {n}": g for n, g in zip(names, grads, strict=True)}


def _close(alone: Tensor | None, packed: Tensor | None, scale: float, *, exact: bool) -> bool:
    """Whether two tensors are equal but for rounding, of the sums that all gradients are.

    `scale` is the largest gradient of a parameter; `exact` in full precision.
    """
    if alone is None or packed is None:
        return alone is packed
    one, other = alone.double().flatten(), packed.double().flatten()
    limit = _CLOSE if exact else 0.05
    size = max(float(one.abs().max()) if one.numel() else 0.0, scale / 100)
    return torch.allclose(one, other, rtol=limit, atol=limit * size, equal_nan=True)
