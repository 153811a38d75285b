"""Flat rows, the stores that hold them, and the live modules that are bound to them.

A client's float state is one row: first the parameters that sessions train, then float buffers. So
the parameters are the leading part of a row. Integer buffers, such as BatchNorm's
`num_batches_tracked`, have a separate int64 row. Frozen parameters are in no row: see
`lightfed.state.frozen_base`.

There is one live module for each group on a rank. A session binds it to a client's row, which takes
microseconds; to build a module takes a hundred milliseconds.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch
from lightfed_kernels import Entry, Layout
from torch import Tensor, nn

from lightfed.data.batches import sent
from lightfed.utils.errors import UserError

# When a client's model is tested: after the last aggregation or after its last session.
Moment = Literal["aggregated", "trained"]
ModelKind = Literal["global", "local"] | Moment

Views = dict[str, Tensor]

# Views of this many rows are kept at most. All are dropped when there is one more.
_MOST_CACHED_ROWS = 256


@dataclass(frozen=True)
class ModelLayout:
    """The layout of one architecture's state in a float row and an integer row.

    Attributes:
        floats: The parameters, then the float buffers.
        integers: The integer and bool buffers, all as int64.
        parameters: How many leading entries of `floats` are parameters.
        groups: For tensors with grouped dimensions, such as attention heads, the number of groups
            of each dimension. Modules declare them as `slice_groups`.
        label_rows: The tensors whose first dimension is a label, as modules declare them. The
            output layer is not among them.
    """

    floats: Layout
    integers: Layout
    parameters: int
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    label_rows: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> "ModelLayout":
        """Return the layout of a module's trained parameters and persistent buffers.

        Any submodule may declare how narrower models slice it: `slice_groups` maps the name of a
        parameter to the number of groups of each of its dimensions, and `label_rows` names
        parameters whose rows are labels. `written` names frozen parameters, or submodules, that
        its training steps write themselves. Each client has its own values of these, so they are
        in the row like trained ones.
        """
        parameters = []
        written = _declared_names(module, "written")
        for name, parameter in module.named_parameters():
            if parameter.requires_grad or _is_named(name, written):
                parameters.append((name, tuple(parameter.shape)))

        float_buffers = []
        integer_buffers = []
        persistent = set(module.state_dict(keep_vars=True))
        for name, buffer in module.named_buffers():
            if name not in persistent:
                continue
            if buffer.is_floating_point() or buffer.is_complex():
                float_buffers.append((name, tuple(buffer.shape)))
            else:
                integer_buffers.append((name, tuple(buffer.shape)))

        groups = []
        for path, submodule in module.named_modules():
            for name, counts in getattr(submodule, "slice_groups", {}).items():
                groups.append((_joined(path, name), tuple(counts)))

        return cls(
            floats=Layout.build([*parameters, *float_buffers]),
            integers=Layout.build(integer_buffers),
            parameters=len(parameters),
            groups=tuple(groups),
            label_rows=tuple(_declared_names(module, "label_rows")),
        )

    @property
    def size(self) -> int:
        """The length P of a float row, with padding."""
        return self.floats.size

    @cached_property
    def parameter_size(self) -> int:
        """The length of the leading part of a float row that holds the parameters."""
        return self.floats.span(self.parameters)

    @property
    def parameter_numel(self) -> int:
        """The number of parameters, without padding."""
        return sum(entry.numel for entry in self._parameter_entries())

    def positions(self, names: Collection[str]) -> Tensor:
        """Return where in a float row the elements of some parameters lie, as an int64 (N,)."""
        spans = [torch.empty(0, dtype=torch.int64)]
        for entry in self._parameter_entries():
            if entry.name in names:
                spans.append(torch.arange(entry.offset, entry.offset + entry.numel))
        return torch.cat(spans)

    def signature(self) -> list[list[object]]:
        """Return the names and shapes of all tensors, comparable across processes and in JSON."""
        return [[entry.name, list(entry.shape)] for entry in [*self.floats, *self.integers]]

    def _parameter_entries(self) -> tuple[Entry, ...]:
        return self.floats.entries[: self.parameters]


def _declared_names(module: nn.Module, attribute: str) -> list[str]:
    """Return the names that submodules list in an attribute, as names within the module."""
    names = []
    for path, submodule in module.named_modules():
        for name in getattr(submodule, attribute, ()):
            names.append(_joined(path, name))
    return names


def _joined(path: str, name: str) -> str:
    """Return the name within a module of what its submodule at `path` calls `name`."""
    return f"{path}.{name}".lstrip(".")


def _is_named(parameter: str, names: Collection[str]) -> bool:
    """Whether a parameter, or a submodule that it belongs to, is among some names."""
    return any(f"{parameter}.".startswith(f"{name}.") for name in names)


@dataclass(frozen=True)
class Row:
    """The state of one client, or of the server: views of a store, or tensors of its own.

    The rows of K clients may form a block, which is a Row whose tensors have a leading dimension K.

    Attributes:
        floats: The parameters and float buffers, (P,).
        integers: The integer buffers as int64, (Q,).
    """

    floats: Tensor
    integers: Tensor

    @classmethod
    def zeros(cls, layout: ModelLayout, device: torch.device | str = "cpu") -> "Row":
        """Return a new row of a layout."""
        return cls(
            floats=layout.floats.new_row(device=device),
            integers=torch.zeros(layout.integers.size, dtype=torch.int64, device=device),
        )

    def clone(self) -> "Row":
        """Return a copy on the same device."""
        return Row(self.floats.clone(), self.integers.clone())

    def repeated(self, count: int) -> "Row":
        """Return a block of `count` equal rows, all of them views of this one."""
        return Row(self.floats.expand(count, -1), self.integers.expand(count, -1))

    def each(self) -> list["Row"]:
        """Return the K rows of a block, as views."""
        pairs = zip(self.floats, self.integers, strict=True)
        return [Row(floats, integers) for floats, integers in pairs]

    def to(self, device: torch.device) -> "Row":
        """Return a copy on a device, even if the row is on that device already."""
        return Row(self.floats.to(device, copy=True), self.integers.to(device, copy=True))

    def copy_(self, source: "Row") -> "Row":
        """Copy the values of another row into this one, and return this one.

        Values that go to a device may still be on their way when this returns. Values that come to
        the host have arrived, because the host reads them next.
        """
        need_not_wait = not self.floats.is_cpu
        self.floats.copy_(source.floats, non_blocking=need_not_wait)
        self.integers.copy_(source.integers, non_blocking=need_not_wait)
        return self


class _Home(NamedTuple):
    """Where in a module a parameter or buffer is registered.

    Attributes:
        path: The tensor's name in the whole module.
        register: `_parameters` or `_buffers` of the submodule that owns it.
        name: The tensor's name in `register`.
        tensor: The tensor that was there when the module was made live.
    """

    path: str
    register: dict[str, Any]
    name: str
    tensor: Tensor


class LiveModule:
    """The one module of a group on this rank. `bind` points it at a client's row.

    While it is bound, trained parameters and float32 buffers are views of the row. A view of a row
    is float32, so integer buffers, and float buffers of 16 bits, are copied: `bind` copies them in
    and `unbind` copies them out.

    A training step may assign another tensor, as `self.mean = ...` or `weight.data = ...` do,
    instead of writing into the one that is there. The values of that tensor are then copied into
    the row, and the view of the row takes its place again.

    Attributes:
        module: The module.
        layout: The layout of the rows.
        frozen: The parameters that are in no row, by name.
        row: The row to which the module is bound; None after `unbind`.
        trainable: The parameters that sessions train.
    """

    def __init__(self, module: nn.Module, layout: ModelLayout) -> None:
        self.module = module
        self.layout = layout
        self.row: Row | None = None
        self.trainable = [p for p in module.parameters() if p.requires_grad]

        parameters = dict(module.named_parameters())
        buffers = dict(module.named_buffers())
        tensors = parameters | buffers

        # The tensors that become views of a row, where their views lie, and those that are copied.
        self._viewed: list[Tensor] = []
        self._spans: list[tuple[int, int, tuple[int, ...]]] = []
        self._copied_floats: list[tuple[Tensor, Entry]] = []
        for entry in layout.floats:
            tensor = tensors[entry.name]
            if tensor.dtype == torch.float32:
                self._viewed.append(tensor)
                self._spans.append((entry.offset, entry.offset + entry.numel, entry.shape))
            else:
                self._copied_floats.append((tensor, entry))
        self._copied_integers = [(tensors[entry.name], entry) for entry in layout.integers]

        # Where each tensor belongs. A step may put another one there, which `unbind` finds.
        in_row = [entry.name for entry in [*layout.floats, *layout.integers]]
        self._homes = [self._home(name, tensors[name]) for name in in_row]

        in_no_row = tensors.keys() - set(in_row)
        self.frozen = {name: p for name, p in parameters.items() if name in in_no_row}
        self._frozen_homes = [self._home(name, p) for name, p in self.frozen.items()]

        # Buffers with `persistent=False`, and copies of their initial values. No row holds them, so
        # they would carry what one client leaves there to the next.
        self._loose = [
            (self._home(name, buffer), buffer.clone())
            for name, buffer in buffers.items()
            if name in in_no_row
        ]

        # The views of recently bound rows, by the row's address. A rank has few rows, and they
        # live long.
        self._views: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def _home(self, path: str, tensor: Tensor) -> _Home:
        owner, _, name = path.rpartition(".")
        submodule = self.module.get_submodule(owner)
        is_buffer = name in submodule._buffers
        register = submodule._buffers if is_buffer else submodule._parameters
        return _Home(path, register, name, tensor)

    def replace_frozen(self, path: str, parameter: Tensor) -> None:
        """Put an equal parameter, such as another group's, in the place of a frozen one.

        A tied parameter is replaced under all of its names.
        """
        former = self.frozen[path]
        for submodule in self.module.modules():
            for name, registered in submodule._parameters.items():
                if registered is former:
                    submodule._parameters[name] = cast(nn.Parameter, parameter)
        self.frozen[path] = cast(nn.Parameter, parameter)
        self._frozen_homes = [self._home(name, frozen) for name, frozen in self.frozen.items()]

    def row_of_module(self) -> Row:
        """Return a copy of the module's current values as a new row."""
        row = Row.zeros(self.layout)
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        for entry in self.layout.floats:
            self.layout.floats.view(row.floats, entry).copy_(tensors[entry.name].detach())
        for tensor, entry in self._copied_integers:
            self.layout.integers.view(row.integers, entry).copy_(tensor)
        return row

    def views(self, floats: Tensor) -> list[Tensor]:
        """Return the float32 tensors of a float row (P,) as views, in the order of the layout.

        They are cached, because making views is most of the cost of binding.
        """
        address = floats.data_ptr()
        cached = self._views.get(address)
        if cached is not None:
            row, views = cached
            if row.shape == floats.shape and row.dtype == floats.dtype:
                return views

        if len(self._views) >= _MOST_CACHED_ROWS:
            self._views.clear()
        views = [floats[start:end].view(shape) for start, end, shape in self._spans]
        # The row itself is held too: while the entry lives, its address cannot be reused.
        self._views[address] = (floats, views)
        return views

    def forget_views(self) -> None:
        """Release rows that are no longer used."""
        self._views.clear()

    def bind(self, row: Row) -> nn.Module:
        """Point the module at a row, so that training writes into it, and return the module.

        Raises:
            UserError: If a frozen parameter, which is in no row, is now to be trained.
        """
        self._check_frozen()

        for _, register, name, tensor in self._homes:
            if register[name] is not tensor:
                register[name] = tensor
        # A layer may put another tensor in the place of a frozen one: peft's attention adds its
        # update to the weight and subtracts it again, which leaves other bits each time.
        for _, register, name, frozen in self._frozen_homes:
            if register.get(name) is not frozen:
                register[name] = frozen

        for tensor, view in zip(self._viewed, self.views(row.floats), strict=True):
            tensor.data = view
        for tensor, entry in self._copied_floats:
            tensor.copy_(self.layout.floats.view(row.floats, entry))
        for tensor, entry in self._copied_integers:
            tensor.copy_(self.layout.integers.view(row.integers, entry))

        self.row = row
        return self.module

    def _check_frozen(self) -> None:
        """Refuse to train a parameter that was frozen when the rows were laid out."""
        for path, parameter in self.frozen.items():
            if parameter.requires_grad:
                raise UserError(
                    key="model.clients",
                    found=f"{path} was frozen when the run began, but is trainable now",
                    fix="freeze it later, by a callback",
                )

    def unbind(self) -> None:
        """Write to the row what is not in it yet: copied buffers, and what a step has assigned.

        Raises:
            UserError: If a step has assigned a tensor that the row cannot hold.
        """
        assert self.row is not None, "unbind without bind"
        row = self.row
        self.row = None

        for path, register, name, tensor in self._homes:
            present = register[name]
            if present is not tensor:
                register[name] = tensor
                tensor.data.copy_(_values_for(path, tensor, present))
        put_back(self._viewed, self.views(row.floats))

        for tensor, entry in self._copied_floats:
            self.layout.floats.view(row.floats, entry).copy_(tensor)
        for tensor, entry in self._copied_integers:
            self.layout.integers.view(row.integers, entry).copy_(tensor)

    def restore(self) -> None:
        """Give the buffers that belong to no row (`persistent=False`) their initial values."""
        for home, initial in self._loose:
            home.register[home.name] = home.tensor.copy_(initial)


def put_back(tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Undo `weight.data = ...` of a training step: its values go into the row's view instead.

    Args:
        tensors: The parameters.
        views: The view of a row that the data of each of them should be.

    Raises:
        UserError: If two parameters share memory now, or one has another type.
    """
    view_addresses = [view.data_ptr() for view in views]
    addresses = [tensor.data_ptr() for tensor in tensors]
    # This is called after every step, which rarely assigns anything.
    if addresses == view_addresses:
        return

    for tensor, view, address, view_address in zip(
        tensors, views, addresses, view_addresses, strict=True
    ):
        if address == view_address:
            continue

        if address in view_addresses:
            raise UserError(
                key="model.clients",
                found="a step's p.data = q.data, by which two tensors share memory",
                fix="assign q.data.clone()",
            )
        if tensor.dtype != view.dtype:
            raise UserError(
                key="model.clients",
                found=f"a step assigns {tensor.dtype} to the data of a parameter, {view.dtype}",
                fix="keep its type",
            )
        tensor.data = view.copy_(tensor.data)


def _values_for(path: str, tensor: Tensor, assigned: Tensor | None) -> Tensor:
    """Return the values that a step has assigned in the place of a tensor.

    Raises:
        UserError: If they do not have the tensor's shape and type, which the row has room for.
    """
    if assigned is None or assigned.shape != tensor.shape or assigned.dtype != tensor.dtype:
        raise UserError(
            key="model.clients",
            found=f"a step assigns {_kind(assigned)} to {path}, {_kind(tensor)}",
            fix="keep its kind, or use persistent=False",
        )
    return assigned.detach()


def _kind(tensor: Tensor | None) -> str:
    """Return a tensor's type and shape, in words."""
    if tensor is None:
        return "None"
    return f"{tensor.dtype} {tuple(tensor.shape)}"


@dataclass(frozen=True, eq=False)
class Rows:
    """Models of one group that are to be tested. They are read when they are used, a few at a time.

    Attributes:
        live: The module that takes their values.
        clients: The clients whose models they are. For global models, the numbers of the models.
        read: Given some of `clients` that are on this rank, returns their rows on the device as a
            block, (K, P) and (K, Q).
        shared: Whether all clients have the same row. `read` then returns it as (1, P) and (1, Q).
        buffers: Given some of `clients`, returns what the module gets in the place of buffers, by
            name and as (K, *shape): for example statistics, or the labels that a client holds. What
            a test writes into them stays. None for nothing.
    """

    live: LiveModule
    clients: Sequence[int]
    read: Callable[[Sequence[int]], Row]
    shared: bool = False
    buffers: Callable[[Sequence[int]], Views] | None = None

    def row(self, client: int) -> Row:
        """Return the row of a client on this rank, on the device; valid until the next call."""
        return self.read([client]).each()[0]

    @contextmanager
    def bound(self, client: int) -> Iterator[Any]:
        """Give the module a client's row and buffers, in evaluation mode, within a context."""
        yield from self.each([client])

    def each(self, clients: Sequence[int]) -> Iterator[Any]:
        """Yield the module once for each client, with its row and buffers, in evaluation mode."""
        buffers = {} if self.buffers is None else self.buffers(clients)
        rows = self.read(clients)

        for index in range(len(clients)):
            row_index = 0 if self.shared else index
            module = self.live.bind(Row(rows.floats[row_index], rows.integers[row_index]))
            if module.training:
                module.eval()

            client_buffers = {name: values[index] for name, values in buffers.items()}
            before = _exchange_buffers(module, client_buffers)
            try:
                yield module
            finally:
                _exchange_buffers(module, before)


def _exchange_buffers(
    module: nn.Module, values: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Put values in the place of a module's buffers, and return those that were there."""
    before = {}
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        buffers = module.get_submodule(owner)._buffers
        before[path] = buffers[name]
        buffers[name] = value
    return before


class RowStore:
    """The rows of one group's clients on this rank, as one matrix of a row per slot.

    A stateless algorithm opens a slot for each participant of a round, and uses all slots again in
    the next one. A stateful algorithm (`keep`) gives a client a slot until the client leaves this
    rank. So memory is proportional to the clients of this rank, not to the registered ones.

    Args:
        layout: The layout of the group's rows.
        device: The device of training.
        host: Whether the rows are kept in (pinned) host memory, and staged through rows on the
            device.

    Attributes:
        slots: The slot of each client.
    """

    def __init__(self, layout: ModelLayout, *, device: torch.device, host: bool) -> None:
        self.layout = layout
        self.device = device
        self.host = host
        self.slots: dict[int, int] = {}
        self._place = torch.device("cpu") if host else device
        self._pin = host and device.type == "cuda"
        self._floats = self._allocate(0)
        self._integers = torch.zeros(0, layout.integers.size, dtype=torch.int64, device=self._place)

    def _allocate(self, slots: int) -> Tensor:
        return self.layout.floats.new_row(slots, device=self._place, pin_memory=self._pin)

    def open(self, clients: list[int], *, keep: bool) -> bool:
        """Give every client a slot.

        The contents of a slot are undefined until they are written, unless the client had the slot
        before and `keep` is set.

        Args:
            clients: The clients that need a slot.
            keep: Whether clients that have a slot keep it, with its contents.

        Returns:
            Whether views of the store that were made before are no longer valid, because its matrix
            is a new, larger one.
        """
        if not keep:
            # Slots are used again, from the first one on.
            self.slots.clear()
        for client in clients:
            self.slots.setdefault(client, len(self.slots))

        num_slots = len(self.slots)
        if num_slots <= len(self._floats):
            return False

        floats = self._allocate(num_slots)
        integers = self._integers.new_zeros(num_slots, self.layout.integers.size)
        if keep:
            floats[: len(self._floats)] = self._floats
            integers[: len(self._integers)] = self._integers
        self._floats = floats
        self._integers = integers
        return True

    def fill(self, row: Row) -> None:
        """Give every slot the values of one row."""
        self._floats[:] = row.floats
        self._integers[:] = row.integers

    @property
    def row_bytes(self) -> int:
        """The bytes of a row, with padding."""
        return max(1, 4 * self.layout.size + 8 * self.layout.integers.size)

    def row(self, client: int) -> Row:
        """Return the client's row as views of the store."""
        slot = self.slots[client]
        return Row(self._floats[slot], self._integers[slot])

    def view(self, clients: Sequence[int]) -> Row | None:
        """Return the clients' rows as a block of views, (K, P) and (K, Q).

        None if they do not lie one after the other, in this order.
        """
        slots = self._slots_of(clients)
        start = slots[0]
        end = start + len(slots)
        if slots != list(range(start, end)):
            return None
        return Row(self._floats[start:end], self._integers[start:end])

    def block(self, clients: Sequence[int]) -> Row:
        """Return the clients' rows as a block: views where possible, otherwise copies."""
        view = self.view(clients)
        if view is not None:
            return view
        return self.copy(clients)

    def copy(self, clients: Sequence[int]) -> Row:
        """Return copies of the clients' rows as a block, on the store's device."""
        index = self._slot_index(clients)
        return Row(self._floats.index_select(0, index), self._integers.index_select(0, index))

    def put_block(self, clients: Sequence[int], block: Row) -> None:
        """Write the clients' rows from a block that is not a view of the store."""
        index = self._slot_index(clients)
        self._floats.index_copy_(0, index, block.floats.to(self._place))
        self._integers.index_copy_(0, index, block.integers.to(self._place))

    def __contains__(self, client: int) -> bool:
        return client in self.slots

    def _slots_of(self, clients: Sequence[int]) -> list[int]:
        return [self.slots[client] for client in clients]

    def _slot_index(self, clients: Sequence[int]) -> Tensor:
        """Return the clients' slots as a tensor (K,) on the store's device, without waiting."""
        return sent(torch.tensor(self._slots_of(clients)), self._place)
