"""Client groups: the clients of one architecture, as configured and as held on a rank."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer

from lightfed.lightning_fits.hook_table import MODULE_HOOKS, HookTable, check_module, table_of
from lightfed.lightning_fits.session_trainer import SessionHost, SessionTrainer
from lightfed.local.logbook import batch_size
from lightfed.local.session import LocalSession
from lightfed.models.agreement import Gathers, agree, are_alike, is_small, warn_of_draws
from lightfed.models.build import DataSpec, blank, build_network, class_of, parameters_of
from lightfed.models.bypassed import AdapterCalls, call_every_layer, note_of_attention
from lightfed.models.client_module import (
    ClientModule,
    MaskedLanguageClient,
    NetworkClient,
    Regressor,
)
from lightfed.models.own_network import OwnNames
from lightfed.models.split import evaluating
from lightfed.models.tensors import check_buffer, check_memory, check_trained, expand_buffers
from lightfed.models.trials import on_trial
from lightfed.state.costs import forward_flops, passes
from lightfed.state.frozen_base import FrozenBase
from lightfed.state.rows import LiveModule, ModelLayout, Row, RowStore
from lightfed.state.staging import Staging
from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.keys import LEVELS
from lightfed.utils.lightning_private import is_overridden
from lightfed.utils.rng import derive_seed, seeded

_NO_HOST = SessionHost()
_OURS = "lightfed.networks."


@dataclass
class ClientGroup:
    """The clients that share one architecture.

    Attributes:
        count: Number of clients in the group.
        model: Network, or LightningModule, of these clients. `num_classes`, `input_shape` and
            `rate` are passed if its constructor accepts them.
        rate: Width of the model relative to the full one, in (0, 1]; passed to the model's
            constructor as `rate`. 1 if neither rate nor level is set.
        level: a to e for the rates 1, 1/2, 1/4, 1/8, 1/16; also the group's name in reports.
        name: Name in metrics and reports; by default the level, or the model's class with a width
            below 1, or the argument `rank`, appended.
    """

    count: int
    model: Callable[[], nn.Module]
    rate: float | None = None
    level: Literal["a", "b", "c", "d", "e"] | None = None
    name: str | None = None

    @property
    def width(self) -> float:
        """The rate, from `rate` or `level`."""
        if self.rate is not None:
            return self.rate
        return LEVELS[self.level] if self.level else 1.0

    @property
    def is_ours(self) -> bool:
        """Whether the network is one of this package, whose draws are seeded."""
        return str(getattr(class_of(self.model), "__module__", "")).startswith(_OURS)

    def check(self, position: int, *, least: int = 1) -> None:
        """Validate the values; a UserError names the key of this group.

        `least` is the smallest number of clients.
        """
        key, fix = f"model.clients.{position}", f"give at least {least}"
        require(self.count >= least, f"{key}.count", f"{self.count} clients", fix)
        ratio, found = self.rate is None or 0 < self.rate <= 1, f"{self.rate} is outside (0, 1]"
        require(ratio, f"{key}.rate", found, "give a width ratio such as 0.5")
        found = f"both rate {self.rate} and level {self.level} are given"
        require(self.rate is None or self.level is None, f"{key}.rate", found, "keep one")
        fix = (
            "name a class (class_path and init_args), so that every rank builds its own; "
            "for torchvision's models: class_path: Torchvision, init_args: {name: resnet18}"
        )
        built, found = isinstance(self.model, nn.Module), f"a built {type(self.model).__name__}"
        require(not built, f"{key}.model", found, fix)
        fits = self.width == 1.0 or "rate" in parameters_of(self.model)
        found = f"a width of {self.width:g}, and {class_of(self.model).__name__} takes no rate"
        fix = "give its constructor the argument rate, or each group init_args of its own"
        require(fits, f"{key}.{'rate' if self.level is None else 'level'}", found, fix)

    def build(self, data: DataSpec, *, position: int, seed: int) -> L.LightningModule:
        """Build the group's module on the CPU.

        Its initial values are a function of (seed, position).

        Raises:
            UserError: the model's constructor refuses its arguments.
        """
        with seeded(derive_seed(seed, "init", client=position)):
            key = f"model.clients.{position}.model"
            module = build_network(self.model, data, rate=self.width, key=key)
        check_memory(module, key)
        expand_buffers(module)
        if isinstance(module, L.LightningModule):
            _check_user_module(module, position)
            return module
        found = f"{type(module).__name__} is a network, and the samples are named columns"
        fix = "name a LightningModule whose training_step takes such batches"
        require(data.task != "columns", key, found, fix)
        if data.task == "masked_lm":
            return MaskedLanguageClient(module)
        if data.task == "regression":
            return Regressor(module)
        return ClientModule(module, num_classes=data.num_classes)


def group_names(groups: Sequence[ClientGroup]) -> list[str]:
    """Names, levels or classes and widths; a repeated name gets its position appended."""
    names: list[str] = []
    for position, group in enumerate(groups):
        name = group.name or group.level or _kind(group) or str(position)
        names.append(f"{name}-{position}" if name in names else name)
    return names


def _kind(group: ClientGroup) -> str:
    """The class of the model and its width or rank; "" for a function without a name."""
    name = str(getattr(class_of(group.model), "__name__", ""))
    width = "" if group.width == 1.0 else f"-{group.width:g}"
    rank = getattr(group.model, "keywords", {}).get("rank")
    width += "" if rank is None else f"-r{rank}"
    return name + width if name.isidentifier() else ""


def _check_user_module(module: L.LightningModule, position: int) -> None:
    key, name = f"model.clients.{position}.model", type(module).__name__
    trains, fix = is_overridden("training_step", module), "define one that returns a batch's loss"
    require(trains, key, f"{name} has no training_step", fix)
    check_module(module, key)


def _is_built_again(build: Callable[[], nn.Module], module: nn.Module) -> bool:
    """Whether a second building gives the same network; True if there is none."""
    try:
        return are_alike(module, build())
    except Exception:  # of the user's constructor, such as a file that is open already
        return True


def _check_types(module: nn.Module, layout: ModelLayout, key: str) -> None:
    """Reject tensors that rows cannot hold as they are; those in no row keep any type."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    for place, entry in enumerate(layout.floats):
        check = check_trained if place < layout.parameters else check_buffer
        check(entry.name, tensors[entry.name], key)
    for entry in layout.integers:
        check_buffer(entry.name, tensors[entry.name], key)


def _flops(module: L.LightningModule, data: DataSpec, position: int, *, transferred: bool) -> float:
    """Forward FLOPs of a sample; rejects a model with wrong input or output shapes.

    Hooks that transfer batches may change their shape (`transferred`): then a forward that fails
    says nothing.
    """
    if not isinstance(module, NetworkClient) and not is_overridden("forward", module):
        return 0.0  # no forward, which Lightning does not require: its cost is unknown
    if not module.automatic_optimization:
        return 0.0  # several networks, as of a GAN: what its forward takes is unknown
    key, shape = f"model.clients.{position}.model", tuple(data.input_shape)
    try:
        with on_trial(module) as trial, torch.no_grad(), evaluating(trial):
            output = trial(blank(data, samples=2))
    except NotImplementedError:
        return 0.0
    except Exception as error:  # of the user's forward
        if transferred:
            return 0.0
        found = f"it cannot take samples of shape {shape} ({reason(error)})"
        raise UserError(key, found, "use a model, or init_args, that can") from error
    flops = 0.0
    # It takes such a batch, but perhaps not where operations are counted.
    with suppress(Exception), on_trial(module) as trial:
        flops = forward_flops(trial, blank(data, samples=2))
    if isinstance(module, ClientModule) and hasattr(module.net, "losses"):
        # Networks that are trained but not evaluated count too.
        labels = torch.zeros(2, dtype=torch.int64)
        x = blank(data, samples=2)
        # Losses may need gradients, or layers used in training only.
        with suppress(Exception), on_trial(module) as trial:
            net: Any = trial.net
            flops = forward_flops(net, x, lambda x: net.losses(x, labels))
    positions = shape if data.task == "masked_lm" else ()
    expected = (2, *positions, data.num_classes)
    if isinstance(module, NetworkClient):
        found = f"its forward returns a {type(output).__name__}"
        require(isinstance(output, Tensor), key, found, "return a tensor of logits")
        found = f"its output for two samples has shape {tuple(output.shape)}"
        of = "target" if data.task == "regression" else "class"
        fits, fix = output.shape == expected, f"it must be {expected}, a number for each {of}"
        require(fits, key, found, fix)
    return flops


def _step_costs(
    module: L.LightningModule, data: DataSpec, position: int, frozen: bool
) -> tuple[float, float]:
    """Of the two longest samples of named columns: forward FLOPs of one, and as of `passes`.

    0 FLOPs if they are unknown. Rejects a model that cannot train on these samples.
    """

    def step(trial: L.LightningModule, batch: Any) -> Any:
        trial.trainer = trial._trainer or data.trainer  # a step may ask it
        vars(trial).update(log=ignore, log_dict=ignore)
        with seeded(0):
            output = trial.training_step(batch, 0)
        return output["loss"] if isinstance(output, dict) else output

    batch = data.longest()
    try:
        with on_trial(module) as trial, torch.no_grad(), evaluating(trial):
            step(trial, batch)
    except NotImplementedError:
        return 0.0, 3.0
    except Exception as error:  # of the user's step
        named = batch.items() if isinstance(batch, dict) else enumerate(batch)
        shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in named)
        found = f"its training_step cannot take a batch of {shapes} ({reason(error)})"
        fix = "use a model, or init_args, that can, or a smaller max_length of the data set"
        raise UserError(f"model.clients.{position}.model", found, fix) from error
    # It takes such a batch, but perhaps not where operations are counted.
    with suppress(Exception), on_trial(module) as trial:
        given = (partial(step, trial), batch_size(batch))
        flops = forward_flops(trial, batch, *given)
        return flops, passes(trial, batch, flops, *given) if frozen else 3.0
    return 0.0, 3.0


def copied(callback: Callback) -> Callback:
    """A callback of another group's sessions; a UserError if it cannot be copied."""
    try:
        return deepcopy(callback)
    except Exception as error:
        found = f"{type(callback).__name__} acts on steps, and cannot be copied for each group"
        fix = "give the groups one class of model, or make what it holds in on_fit_start"
        raise UserError("trainer.callbacks", found, fix) from error


def ignore(*_: Any, **__: Any) -> None:
    """Replaces `self.log`."""


@dataclass(frozen=True)
class Packing:
    """How many clients of a group train side by side.

    Attributes:
        most: clients of the largest pack; 1 for one after the other.
        least: clients of the smallest pack; fewer train one after the other.
        even: the clients of a pack have batches of equally many samples.
        known: all layers are known by their types.
        reason: why the clients train one after the other; empty if they do not.
    """

    most: int = 1
    least: int = 2
    even: bool = False
    known: bool = True
    reason: str = ""


class GroupState:
    """A group on this rank; its module is built on the CPU, for the same values on all ranks.

    Args:
        group: as configured.
        data: number of classes and shape of a sample.
        base: frozen parameters of the groups before it.
        name: in metrics and reports.
        position: among the groups; seeds the initial values.
        seed: of the run.
        device: of the rank.
        host_rows: keep the rows in host memory.
        prepare: the algorithm's change to a fresh module.
        host: what sessions get from the run.
        once: runs on rank 0 what all ranks wait for; by default this process runs it.
        ranks: of the run, which agree about the module; None if this one is not of a run.

    Raises:
        UserError: the network does not fit the data, rows cannot hold it, or ranks have others.

    Attributes:
        table: the hooks that its module and callbacks override.
        trainer: what the module sees as `self.trainer`; None without a Trainer and hooks.
        own: the user's network in the module.
        layout: of its rows.
        live: the one module, bound to one row at a time.
        initial: the module's initial values.
        store: rows of the group's clients on this rank.
        staging: copies rows to the device if they are kept on the host.
        flops: forward FLOPs of a sample.
        passes: FLOPs of a sample's training, as forward passes: 3, or fewer with frozen layers.
        session: trains and evaluates; attached before the first round.
        optimizer: of sessions one after the other; attached with it.
        note: a warning about its layers; empty for none.
        takes_lr: whether its optimiser uses the round's learning rate.
        packing: how its clients train side by side; set before they get their ranks.
        personal: (N,) elements of (P,) parameters that stay with their client; set likewise.
    """

    session: LocalSession
    optimizer: Optimizer
    takes_lr: bool = True
    packing: Packing = Packing()
    table: HookTable = HookTable()
    trainer: SessionTrainer | None = None
    personal: Tensor = torch.empty(0, dtype=torch.int64)

    def __init__(
        self,
        group: ClientGroup,
        data: DataSpec,
        *,
        base: FrozenBase,
        name: str,
        position: int,
        seed: int,
        device: torch.device,
        host_rows: bool,
        prepare: Callable[[L.LightningModule, DataSpec], None],
        host: SessionHost = _NO_HOST,
        once: Callable[[Callable[[], None]], None] | None = None,
        ranks: Gathers | None = None,
    ) -> None:
        build = partial(group.build, data, position=position, seed=seed)
        module = build()
        same = True
        if ranks is not None and ranks.world == 1 and not group.is_ours and is_small(module):
            same = _is_built_again(build, module)
        self.trainer = self._opened(module, host, once, seed=seed, position=position)
        own = OwnNames(module)
        with seeded(derive_seed(seed, "prepare")):
            prepare(module, data)
        call_every_layer(module)
        # A plan has ranks without processes; their number is negative.
        if ranks is not None and ranks.world > 1 and ranks.rank >= 0:
            same = agree(module, ranks, key=f"model.clients.{position}.model")
        if not same and ranks is not None and ranks.rank == 0:
            warn_of_draws(name, ranks=ranks.world > 1)
        self.own = own.found_in(module)
        self.group, self.name = group, name
        with nullcontext() if self.trainer is None else self.trainer.thawed():
            self._lay_out(module, data, base, position=position, device=device)
        self.store = RowStore(self.layout, device=device, host=host_rows)
        self.staging = Staging(self.store) if self.store.host else None
        self._borrowed: Row | None = None

    def _opened(
        self,
        module: L.LightningModule,
        host: SessionHost,
        once: Callable[[Callable[[], None]], None] | None,
        *,
        seed: int,
        position: int,
    ) -> SessionTrainer | None:
        """Call the hooks of a module that come once, before its rows are laid out."""
        hooks = [hook for hook, when in MODULE_HOOKS.items() if when == "module"]
        own = any(is_overridden(hook, module) for hook in hooks)
        self.table = table_of(module, host.callbacks, host.transfers)
        if not (own or self.table.reason or host.run is not None):
            return None
        trainer = SessionTrainer(module, host)
        callbacks = host.callbacks if position == 0 else [copied(c) for c in host.callbacks]
        try:
            with seeded(derive_seed(seed, "setup", client=position)):
                trainer.open(module, callbacks, once)
        except UserError:
            raise
        except Exception as error:  # of the user's hooks
            hook = trainer.hook or "configure_callbacks"
            found = f"{hook} of {type(module).__name__} or a callback: {reason(error)}"
            raise UserError(f"model.clients.{position}.model", found, "correct it") from error
        self.table = table_of(module, trainer.callbacks, host.transfers)
        return trainer

    def _lay_out(
        self,
        module: L.LightningModule,
        data: DataSpec,
        base: FrozenBase,
        *,
        position: int,
        device: torch.device,
    ) -> None:
        """Find the layout of rows, the initial values and the costs of a step."""
        self.layout = ModelLayout.of(module)
        _check_types(module, self.layout, f"model.clients.{position}.model")
        live = LiveModule(module, self.layout)
        self.initial = live.row_of_module()
        calls = AdapterCalls(module)
        if data.task == "columns":
            self.flops, self.passes = _step_costs(module, data, position, bool(live.frozen))
        else:
            transferred = bool(self.table.transfer)
            self.flops = _flops(module, data, position, transferred=transferred)
            self.passes = 3.0
            if live.frozen and self.flops:
                with suppress(Exception), on_trial(module) as trial:
                    self.passes = passes(trial, blank(data, samples=2), self.flops)
        self.note = calls.close(ran=self.flops > 0) or note_of_attention(module)
        live.restore()
        module.to(device)
        module.train()  # a module may override it, to keep a part in evaluation mode
        self.live = LiveModule(module, self.layout)  # after the move, which replaces buffers
        base.add_group(self.live)

    @property
    def row_bytes(self) -> int:
        """Bytes of a client's row."""
        return self.initial.floats.nbytes + self.initial.integers.nbytes

    def open(self, clients: list[int], *, keep: bool) -> None:
        """Open slots for clients of this rank."""
        if self.store.open(clients, keep=keep):
            self.live.forget_views()

    def borrow(self, row: Row) -> Row:
        """A copy of a row on the device, valid until the next call.

        One buffer serves all clients, because a live module keeps the rows it was bound to.
        """
        if self._borrowed is None:
            with torch.inference_mode(False):  # a row that is evaluated first is trained later
                self._borrowed = Row.zeros(self.layout, self.store.device)
        return self._borrowed.copy_(row)

    @property
    def module(self) -> L.LightningModule:
        """The live module."""
        module = self.live.module
        assert isinstance(module, L.LightningModule)
        return module

    def set_flops(self, flops: float) -> None:
        """Set the forward FLOPs of a sample, for a method whose step runs more than the network.

        It is called in `setup`: costs, placement and virtual time read the number in every round.
        """
        self.flops = flops

    def bind(self, row: Row) -> L.LightningModule:
        """The live module, bound to a row."""
        self.live.bind(row)
        return self.module

    def output_layer(self, num_classes: int) -> tuple[str, ...]:
        """Names of the tensors of the last layer with `num_classes` rows, the class labels."""
        found: tuple[str, ...] = ()
        for name, module in self.module.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and len(weight) == num_classes and weight.dim() > 1:
                found = tuple(
                    f"{name}.{part}" for part, _ in module.named_parameters(recurse=False)
                )
        return tuple(name for name in found if name not in self.live.frozen)
