"""A group of clients as a rank holds it: one module, and the rows of the clients on this rank."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer

from lightfed.lightning_fits.hook_table import MODULE_HOOKS, HookTable, table_of
from lightfed.lightning_fits.session_trainer import SessionHost, SessionTrainer
from lightfed.local.client_group import ClientGroup
from lightfed.local.model_costs import costs_of
from lightfed.local.session import LocalSession
from lightfed.models.agreement import Gathers, agree, are_alike, is_small, warn_of_draws
from lightfed.models.build import DataSpec
from lightfed.models.bypassed import AdapterCalls, call_every_layer, note_of_attention
from lightfed.models.compiled import compiled_layers, note_of_lost, unwrapped
from lightfed.models.own_network import OwnNames
from lightfed.models.tensors import check_buffer, check_device, check_trained
from lightfed.state.frozen_base import FrozenBase
from lightfed.state.rows import LiveModule, ModelLayout, Row, RowStore
from lightfed.state.staging import Staging
from lightfed.utils.errors import UserError, reason
from lightfed.utils.lightning_private import is_overridden
from lightfed.utils.rng import derive_seed, seeded

_NO_HOST = SessionHost()


@dataclass(frozen=True)
class Packing:
    """How many clients of a group train side by side.

    Attributes:
        most: Clients of the largest pack; 1 if they train one after the other.
        least: Clients of the smallest pack. Fewer train one after the other.
        even: Whether the clients of a pack must have batches of equally many samples.
        known: Whether all layers are known by their types.
        reason: Why the clients train one after the other; empty if they do not.
    """

    most: int = 1
    least: int = 2
    even: bool = False
    known: bool = True
    reason: str = ""


class GroupState:
    """The module of a group, and the rows of its clients on this rank.

    The module is built on the CPU, so that its initial values are the same on all ranks, and then
    moved to the rank's device. It is bound to one client's row at a time.

    Args:
        group: The group as it is configured.
        data: Number of classes and shape of a sample.
        base: Frozen parameters of all groups. This group adds its own.
        name: Name of the group in metrics and reports.
        position: Position among the groups, which seeds the initial values.
        seed: Seed of the run.
        device: Device of the rank.
        host_rows: Whether rows stay in host memory.
        prepare: Changes a newly built module for the algorithm.
        host: What sessions get from the Trainer of the run.
        once: Runs a function on rank 0 while all ranks wait; by default this process runs it.
        ranks: The ranks of the run, which have to agree about the module; None if this state
            belongs to no run.
        trainer: What a step may ask for as `self.trainer` while its cost is measured; by default
            the Trainer of `host`.

    Raises:
        UserError: The network does not fit the data, its tensors do not fit into rows, or ranks
            have built different networks.

    Attributes:
        table: The hooks that the module and its callbacks override.
        trainer: What the module sees as `self.trainer`; None without a Trainer and without hooks.
        own: Names of the user's network within the module.
        layout: Layout of the rows.
        live: The module and its binding to a row.
        initial: The initial values.
        store: Rows of the group's clients on this rank.
        staging: Copies rows to the device, if they are kept in host memory.
        flops: FLOPs of the forward pass of a sample; 0 if they are unknown.
        passes: Cost of training on a sample in forward passes: 3, or fewer with frozen layers.
        note: A warning about the layers of the module; empty for none.

        packing: How its clients train side by side. `FleetState` sets it before clients are dealt
            to ranks.
        personal: Positions, of shape (N,), of the parameters that stay with their client.
            `FleetState` sets it.
        session: Trains and evaluates one client. `Training.attach` sets it before the first round,
            with the next two.
        optimizer: The optimizer of that session.
        takes_lr: Whether the optimizer uses the learning rate of the round.
    """

    session: LocalSession
    optimizer: Optimizer
    takes_lr: bool = True
    note: str = ""
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
        trainer: L.Trainer | None = None,
    ) -> None:
        self.group = group
        self.name = name
        self._key = f"model.clients.{position}.model"
        build = partial(group.build, data, position=position, seed=seed)
        module = build()

        # A constructor with draws of its own, which no seed of ours governs, gives every rank and
        # every resumed run another network. Building a small one twice shows it.
        is_reproducible = True
        if ranks is not None and ranks.world == 1 and not group.is_ours and is_small(module):
            is_reproducible = _is_built_again(build, module)

        self._open(module, host, once, seed=seed, position=position)
        # `configure_model` may have compiled a part of the module.
        unwrapped(module, self._key)
        compiled = compiled_layers(module)
        user_names = OwnNames(module)
        with seeded(derive_seed(seed, "prepare")):
            prepare(module, data)
        call_every_layer(module)
        lost = note_of_lost(compiled, module)

        # The ranks of a plan have no processes; their number is negative.
        if ranks is not None and ranks.world > 1 and ranks.rank >= 0:
            is_reproducible = agree(module, ranks, key=self._key)
        if not is_reproducible and ranks is not None and ranks.rank == 0:
            warn_of_draws(name, ranks=ranks.world > 1)

        self.own = user_names.found_in(module)
        with nullcontext() if self.trainer is None else self.trainer.thawed():
            self._lay_out(module, data, base, device=device, trainer=trainer or host.run)
        self.store = RowStore(self.layout, device=device, host=host_rows)
        self.note = self.note or lost
        self.staging = Staging(self.store) if self.store.host else None
        self._borrowed: Row | None = None

    def _open(
        self,
        module: L.LightningModule,
        host: SessionHost,
        once: Callable[[Callable[[], None]], None] | None,
        *,
        seed: int,
        position: int,
    ) -> None:
        """Call the hooks of a module that are called once, before its rows are laid out.

        It sets `table` and `trainer`. Hooks such as `configure_model` may still add layers.
        """
        self.table = table_of(module, host.callbacks, host.transfers)
        overrides_a_hook = any(
            is_overridden(hook, module) for hook, when in MODULE_HOOKS.items() if when == "module"
        )
        needs_a_trainer = overrides_a_hook or self.table.reason or host.run is not None
        if not needs_a_trainer:
            return

        # Each group has callbacks of its own, because they may keep something about its module.
        callbacks = list(host.callbacks)
        if position > 0:
            callbacks = [_copy_of(callback) for callback in host.callbacks]
        self.trainer = SessionTrainer(module, host)
        try:
            with seeded(derive_seed(seed, "setup", client=position)):
                self.trainer.open(module, callbacks, once)
        except UserError:
            raise
        except Exception as error:  # of the user's hooks
            hook = self.trainer.hook or "configure_callbacks"
            found = f"{hook} of {type(module).__name__} or a callback: {reason(error)}"
            raise UserError(self._key, found, "correct it") from error
        self.table = table_of(module, self.trainer.callbacks, host.transfers)

    def _lay_out(
        self,
        module: L.LightningModule,
        data: DataSpec,
        base: FrozenBase,
        *,
        device: torch.device,
        trainer: L.Trainer | None,
    ) -> None:
        """Set the layout of rows, the initial values and the costs, and move the module."""
        self.layout = ModelLayout.of(module)
        _check_types(module, self.layout, self._key)
        check_device(module, device, self._key)
        on_the_cpu = LiveModule(module, self.layout)
        self.initial = on_the_cpu.row_of_module()

        calls = AdapterCalls(module)
        costs = costs_of(
            module,
            data,
            key=self._key,
            has_frozen_layers=bool(on_the_cpu.frozen),
            has_transfer_hooks=bool(self.table.transfer),
            trainer=trainer,
        )
        self.flops = costs.flops
        self.passes = costs.passes
        self.note = calls.close(ran=self.flops > 0) or note_of_attention(module)

        on_the_cpu.restore()
        module.to(device)
        module.train()  # a module may override it, to keep a part in evaluation mode
        self.live = LiveModule(module, self.layout)  # after the move, which replaces buffers
        base.add_group(self.live)

    @property
    def module(self) -> L.LightningModule:
        """The live module."""
        module = self.live.module
        assert isinstance(module, L.LightningModule)
        return module

    @property
    def row_bytes(self) -> int:
        """Bytes of a client's row."""
        return self.initial.floats.nbytes + self.initial.integers.nbytes

    def open(self, clients: list[int], *, keep: bool) -> None:
        """Open slots of the row store for clients of this rank.

        Args:
            clients: The clients that need a row.
            keep: Whether the rows that are open keep their values.
        """
        if self.store.open(clients, keep=keep):
            self.live.forget_views()

    def borrow(self, row: Row) -> Row:
        """Return a copy of a row on the device, which is valid until the next call.

        One buffer serves all clients, because a live module keeps the rows it was bound to.
        """
        if self._borrowed is None:
            with torch.inference_mode(False):  # a row that is evaluated first is trained later
                self._borrowed = Row.zeros(self.layout, self.store.device)
        return self._borrowed.copy_(row)

    def bind(self, row: Row) -> L.LightningModule:
        """Bind the live module to a row, and return it."""
        self.live.bind(row)
        return self.module

    def set_flops(self, flops: float) -> None:
        """Set the FLOPs of a sample, for a method whose step runs more than the network.

        Call it in `setup`: costs, placement and virtual time read the number in every round.
        """
        self.flops = flops

    def output_layer(self, num_classes: int) -> tuple[str, ...]:
        """Return the names of the trained tensors of the last layer with a row for every class."""
        names: list[str] = []
        for layer_name, layer in self.module.named_modules():
            weight = getattr(layer, "weight", None)
            if not isinstance(weight, nn.Parameter) or weight.dim() < 2:
                continue
            if len(weight) == num_classes:
                names = [
                    f"{layer_name}.{name}" for name, _ in layer.named_parameters(recurse=False)
                ]
        return tuple(name for name in names if name not in self.live.frozen)


def _is_built_again(build: Callable[[], nn.Module], module: nn.Module) -> bool:
    """Whether a second building gives the same network."""
    try:
        return are_alike(module, build())
    except Exception:
        # The user's constructor cannot run twice, as one that opens a file. Nothing is known then.
        return True


def _check_types(module: nn.Module, layout: ModelLayout, key: str) -> None:
    """Refuse tensors of types that rows cannot hold. Those in no row keep any type."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    for position, entry in enumerate(layout.floats):
        is_parameter = position < layout.parameters
        check = check_trained if is_parameter else check_buffer
        check(entry.name, tensors[entry.name], key)
    for entry in layout.integers:
        check_buffer(entry.name, tensors[entry.name], key)


def _copy_of(callback: Callback) -> Callback:
    """Return a copy of a callback, for the sessions of another group.

    Raises:
        UserError: It cannot be copied.
    """
    try:
        return deepcopy(callback)
    except Exception as error:
        raise UserError(
            "trainer.callbacks",
            f"{type(callback).__name__} acts on steps, and cannot be copied for each group",
            "give the groups one class of model, or make what it holds in on_fit_start",
        ) from error
