"""Flat rows, their stores, and the live modules bound to them.

A client's float state is one row: the parameters that sessions train, then float buffers. So the
parameters are the leading part of a row. Integer buffers (BatchNorm's num_batches_tracked) have a
separate int64 row. Frozen parameters are in no row (`lightfed.state.frozen_base`). There is one
live module per group and rank. A session binds it to a client's row, which takes microseconds;
building a module takes a hundred milliseconds.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from lightfed_kernels import Layout
from torch import Tensor, nn

from lightfed.data.batches import sent
from lightfed.utils.errors import UserError, require

# When a client's model is tested: after the last aggregation or after its last session.
Moment = Literal["aggregated", "trained"]
ModelKind = Literal["global", "local"] | Moment

Views = dict[str, Tensor]


@dataclass(frozen=True)
class ModelLayout:
    """Layout of one architecture's state in a float row and an integer row.

    Attributes:
        floats: parameters, then float buffers.
        integers: integer and bool buffers, as int64.
        parameters: how many leading entries of `floats` are parameters.
        groups: number of groups per dimension, for tensors with grouped dimensions (attention
            heads); modules declare them as `slice_groups`.
        label_rows: tensors whose first dimension is a label, as declared by modules; without the
            output layer.
    """

    floats: Layout
    integers: Layout
    parameters: int
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    label_rows: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> "ModelLayout":
        """The layout of a module's trained parameters and persistent buffers.

        A module may declare how narrower models slice it: `slice_groups` (parameter name -> groups
        of every dimension) and `label_rows` (names of parameters). Its `written` names frozen
        parameters, or parts, that its steps write themselves: clients have their own.
        """
        written = tuple(
            f"{path}.{name}.".lstrip(".")
            for path, part in module.named_modules()
            for name in getattr(part, "written", ())
        )
        parameters = [
            (name, p)
            for name, p in module.named_parameters()
            if p.requires_grad or f"{name}.".startswith(written)
        ]
        persistent = set(module.state_dict(keep_vars=True))
        buffers = [(n, b) for n, b in module.named_buffers() if n in persistent]
        floating = [(n, b) for n, b in buffers if b.is_floating_point() or b.is_complex()]
        return cls(
            floats=Layout.build((n, tuple(t.shape)) for n, t in [*parameters, *floating]),
            integers=Layout.build(
                (n, tuple(b.shape))
                for n, b in buffers
                if not (b.is_floating_point() or b.is_complex())
            ),
            parameters=len(parameters),
            groups=tuple(
                (f"{path}.{name}".lstrip("."), tuple(counts))
                for path, part in module.named_modules()
                for name, counts in getattr(part, "slice_groups", {}).items()
            ),
            label_rows=tuple(
                f"{path}.{name}".lstrip(".")
                for path, part in module.named_modules()
                for name in getattr(part, "label_rows", ())
            ),
        )

    @property
    def size(self) -> int:
        """Length of a float row, P."""
        return self.floats.size

    @cached_property
    def parameter_size(self) -> int:
        """Length of the leading part of a float row that holds the parameters."""
        return self.floats.span(self.parameters)

    @property
    def parameter_numel(self) -> int:
        return sum(entry.numel for entry in self.floats.entries[: self.parameters])

    def positions(self, names: Collection[str]) -> Tensor:
        """(N,) where the elements of these tensors lie in (P,) parameters."""
        entries = [e for e in self.floats.entries[: self.parameters] if e.name in names]
        spans = [torch.arange(e.offset, e.offset + e.numel) for e in entries]
        return torch.cat([torch.empty(0, dtype=torch.int64), *spans])

    def signature(self) -> list[list[object]]:
        """Names and shapes, comparable across processes and JSON."""
        return [[e.name, list(e.shape)] for e in [*self.floats, *self.integers]]


@dataclass(frozen=True)
class Row:
    """One client's (or the server's) state: a view of a store, or tensors of its own.

    A block of K rows has a leading dimension K in both.

    Attributes:
        floats: (P,) parameters and float buffers.
        integers: (Q,) int64 integer buffers.
    """

    floats: Tensor
    integers: Tensor

    @classmethod
    def zeros(cls, layout: ModelLayout, device: torch.device | str = "cpu") -> "Row":
        """A new row of a layout."""
        integers = torch.zeros(layout.integers.size, dtype=torch.int64, device=device)
        return cls(layout.floats.new_row(device=device), integers)

    def clone(self) -> "Row":
        return Row(self.floats.clone(), self.integers.clone())

    def repeated(self, count: int) -> "Row":
        """A block of equal rows, all of them views of this one."""
        return Row(self.floats.expand(count, -1), self.integers.expand(count, -1))

    def each(self) -> list["Row"]:
        """The rows of a block of K rows."""
        return [Row(f, i) for f, i in zip(self.floats, self.integers, strict=True)]

    def to(self, device: torch.device) -> "Row":
        """A copy on a device."""
        copies = (part.to(device, copy=True) for part in (self.floats, self.integers))
        return Row(*copies)

    def copy_(self, source: "Row") -> "Row":
        """Copy values; those that come to the host have arrived, for it reads them next."""
        ahead = not self.floats.is_cpu
        self.floats.copy_(source.floats, non_blocking=ahead)
        self.integers.copy_(source.integers, non_blocking=ahead)
        return self


class LiveModule:
    """The one module of a group on this rank; `bind` points it at a row.

    Trained parameters and float buffers become views of the row. Views of recently bound rows are
    cached: a rank has few rows and they live long. `bind` copies integer buffers in, and float
    buffers of 16 bits, and `unbind` copies them out. A step may assign others in their place,
    `self.mean = ...` or `weight.data = ...`: their values are copied into the row, and its views
    take their place again.

    Attributes:
        frozen: parameters that are in no row, by name.
        row: to which the module is bound; None after `unbind`.
        trainable: parameters that sessions train.
    """

    def __init__(self, module: nn.Module, layout: ModelLayout) -> None:
        self.module = module
        self.layout = layout
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        # A view of a row is float32. Buffers of other types are copied, as integers are.
        whole = [e for e in layout.floats if tensors[e.name].dtype == torch.float32]
        self._tensors = [tensors[entry.name] for entry in whole]
        self._halves = [
            (tensors[e.name], e) for e in layout.floats if tensors[e.name].dtype != torch.float32
        ]
        self._integers = [(tensors[entry.name], entry) for entry in layout.integers]
        self._split = [(e.offset, e.numel, e.shape) for e in whole]
        self.row: Row | None = None
        kept = {entry.name: tensors.pop(entry.name) for entry in [*layout.floats, *layout.integers]}
        self._homes = [(name, *self._home(name), tensor) for name, tensor in kept.items()]
        named = dict(module.named_parameters())
        self.frozen = {name: named[name] for name in tensors if name in named}
        self._frozen_homes = [(*self._home(name), p) for name, p in self.frozen.items()]
        buffers = {name: b for name, b in tensors.items() if name not in named}
        self._loose = [(*self._home(name), b, b.clone()) for name, b in buffers.items()]
        self._views: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self.trainable = [p for p in module.parameters() if p.requires_grad]

    def _home(self, path: str) -> tuple[dict[str, Any], str]:
        """The dict of its module that a parameter or buffer is in, and its name there."""
        owner, _, name = path.rpartition(".")
        part = self.module.get_submodule(owner)
        return part._buffers if name in part._buffers else part._parameters, name

    def row_of_module(self) -> Row:
        """A copy of the module's current values as a new row."""
        row = Row.zeros(self.layout)
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        for entry in self.layout.floats:
            self.layout.floats.view(row.floats, entry).copy_(tensors[entry.name].detach())
        for tensor, entry in self._integers:
            self.layout.integers.view(row.integers, entry).copy_(tensor)
        return row

    def views(self, floats: Tensor) -> list[Tensor]:
        """The tensors of a float row in layout order, without those of other types.

        Cached, because making views is most of the cost of binding.
        """
        key = floats.data_ptr()
        kept = self._views.get(key)
        if kept is None or kept[0].shape != floats.shape or kept[0].dtype != floats.dtype:
            if len(self._views) >= 256:
                self._views.clear()
            views = [floats[o : o + n].view(shape) for o, n, shape in self._split]
            # The row itself is held too: while the entry lives, its address cannot be reused.
            kept = self._views[key] = (floats, views)
        return kept[1]

    def forget_views(self) -> None:
        """Release rows that are no longer used."""
        self._views.clear()

    def bind(self, row: Row) -> nn.Module:
        """Point the module at `row`: training writes into it.

        A UserError if a frozen parameter, which is in no row, is to be trained now.
        """
        for path, parameter in self.frozen.items():
            if parameter.requires_grad:
                found, fix = (
                    f"{path} was frozen when the run began",
                    "freeze it later, by a callback",
                )
                raise UserError("model.clients", f"{found}, and is to be trained now", fix)
        for _, home, name, tensor in self._homes:
            if home[name] is not tensor:
                home[name] = tensor
        # A layer may put another tensor in the place of a frozen one: peft's attention adds its
        # update to the weight and subtracts it again, which leaves other bits each time.
        for home, name, frozen in self._frozen_homes:
            if home.get(name) is not frozen:
                home[name] = frozen
        for tensor, view in zip(self._tensors, self.views(row.floats), strict=True):
            tensor.data = view
        for tensor, entry in self._halves:
            tensor.copy_(self.layout.floats.view(row.floats, entry))
        for tensor, entry in self._integers:
            tensor.copy_(self.layout.integers.view(row.integers, entry))
        self.row = row
        return self.module

    def unbind(self) -> None:
        """Write integers and what a step has assigned back; other state is in the row already."""
        assert self.row is not None, "unbind without bind"
        row, self.row = self.row, None
        for path, home, name, tensor in self._homes:
            placed = home[name]
            if placed is not tensor:
                home[name] = tensor
                tensor.data.copy_(_fitting(path, placed, tensor))
        put_back(self._tensors, self.views(row.floats))
        for tensor, entry in self._halves:
            self.layout.floats.view(row.floats, entry).copy_(tensor)
        for tensor, entry in self._integers:
            self.layout.integers.view(row.integers, entry).copy_(tensor)

    def restore(self) -> None:
        """Give the buffers that belong to no row, `persistent=False`, their initial values."""
        for home, name, tensor, initial in self._loose:
            home[name] = tensor.copy_(initial)


def put_back(tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Copy what a step has assigned, by `weight.data = ...`, into the views it has replaced."""
    places = [view.data_ptr() for view in views]
    found = [tensor.data_ptr() for tensor in tensors]
    if found == places:
        return
    for tensor, view, old, new in zip(tensors, views, places, found, strict=True):
        if new != old:
            shares = "a step's p.data = q.data, by which two tensors share memory"
            require(new not in places, "model.clients", shares, "assign q.data.clone()")
            other = f"a step assigns {tensor.dtype} to the data of a parameter, {view.dtype}"
            require(tensor.dtype == view.dtype, "model.clients", other, "keep its type")
            tensor.data = view.copy_(tensor.data)


def _fitting(path: str, placed: Tensor | None, tensor: Tensor) -> Tensor:
    """The values of what a step has assigned to `tensor`; a UserError if a row has no place."""
    kind, given = ("None" if t is None else f"{t.dtype} {tuple(t.shape)}" for t in (tensor, placed))
    if placed is None or placed.shape != tensor.shape or placed.dtype != tensor.dtype:
        found = f"a step assigns {given} to {path}, {kind}"
        raise UserError("model.clients", found, "keep its kind, or use persistent=False")
    return placed.detach()


@dataclass(frozen=True, eq=False)
class Rows:
    """Models of clients of one group. They are read when they are used, a few at a time.

    Attributes:
        live: the module of all of them.
        clients: whose they are; the numbers of the models, if they are global ones.
        read: some of `clients`, on this rank -> their rows on the device, (K, P) and (K, Q).
        shared: all clients have the same row; `read` gives it as (1, P) and (1, Q).
        buffers: some of `clients` -> what the module gets besides, (K, *shape) by name, such as
            statistics or the labels that a client holds. What a test writes into them stays.
    """

    live: LiveModule
    clients: Sequence[int]
    read: Callable[[Sequence[int]], Row]
    shared: bool = False
    buffers: Callable[[Sequence[int]], Views] | None = None

    def row(self, client: int) -> Row:
        """(P,) and (Q,) of a client on this rank, on the device; valid until the next call."""
        return self.read([client]).each()[0]

    @contextmanager
    def bound(self, client: int) -> Iterator[Any]:
        """The module with a client's row and buffers, in evaluation mode."""
        yield from self.each([client])

    def each(self, clients: Sequence[int]) -> Iterator[Any]:
        """The module with the row and buffers of each of some clients in turn, as `bound`."""
        own = {} if self.buffers is None else self.buffers(clients)
        rows = self.read(clients)
        for place in range(len(clients)):
            row = 0 if self.shared else place
            module = self.live.bind(Row(rows.floats[row], rows.integers[row]))
            if module.training:
                module.eval()
            before = _place(module, {name: values[place] for name, values in own.items()})
            try:
                yield module
            finally:
                _place(module, before)


def _place(module: nn.Module, values: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Put values in the place of buffers; returns those that were there."""
    before = {}
    for name, value in values.items():
        path, _, last = name.rpartition(".")
        buffers = module.get_submodule(path)._buffers
        before[name], buffers[last] = buffers[last], value
    return before


class RowStore:
    """Rows of one group's clients on this rank, as one (slots, P) matrix.

    Stateless algorithms open a slot for each participant of a round and reuse all slots in the next
    one. Stateful ones (`keep`) assign a client's slot until it leaves this rank. Memory is
    proportional to the clients of this rank, not to the registered ones.

    Args:
        layout: of the group.
        device: of training.
        host: keep the rows in (pinned) host memory and stage them through device rows.
    """

    def __init__(self, layout: ModelLayout, *, device: torch.device, host: bool) -> None:
        self.layout = layout
        self.device = device
        self.host = host
        self._place = torch.device("cpu") if host else device
        self._pin = host and device.type == "cuda"
        self.slots: dict[int, int] = {}
        self._floats = self._allocate(0)
        self._integers = torch.zeros(0, layout.integers.size, dtype=torch.int64, device=self._place)

    def _allocate(self, slots: int) -> Tensor:
        return self.layout.floats.new_row(slots, device=self._place, pin_memory=self._pin)

    def open(self, clients: list[int], *, keep: bool) -> bool:
        """Assign every client a slot; True if old views are invalid, as the matrix is a new one.

        A slot's contents are undefined until written, unless the client held it before and `keep`
        is set.
        """
        if not keep:
            self.slots.clear()
        for client in clients:
            self.slots.setdefault(client, len(self.slots))
        if len(self.slots) <= len(self._floats):
            return False
        floats = self._allocate(len(self.slots))
        integers = self._integers.new_zeros(len(self.slots), self.layout.integers.size)
        if keep:
            floats[: len(self._floats)] = self._floats
            integers[: len(self._integers)] = self._integers
        self._floats, self._integers = floats, integers
        return True

    def fill(self, row: Row) -> None:
        """Give every slot these values."""
        self._floats[:] = row.floats
        self._integers[:] = row.integers

    def row(self, client: int) -> Row:
        """The client's row as views of the store."""
        slot = self.slots[client]
        return Row(self._floats[slot], self._integers[slot])

    def view(self, clients: Sequence[int]) -> Row | None:
        """The clients' rows as (K, P) and (K, Q) views; None if others lie between them."""
        slots = self._slots(clients)
        span = slice(slots[0], slots[0] + len(slots))
        if slots != list(range(span.start, span.stop)):
            return None
        return Row(self._floats[span], self._integers[span])

    def block(self, clients: Sequence[int]) -> Row:
        """The clients' rows as (K, P) and (K, Q); copies unless `view` has them."""
        view = self.view(clients)
        if view is not None:
            return view
        return self.copy(clients)

    def copy(self, clients: Sequence[int]) -> Row:
        """Copies of the clients' rows as (K, P) and (K, Q), where the store is."""
        index = self._places(clients)
        return Row(self._floats.index_select(0, index), self._integers.index_select(0, index))

    def put_block(self, clients: Sequence[int], block: Row) -> None:
        """Write a block of rows that is not a view of the store."""
        index = self._places(clients)
        self._floats.index_copy_(0, index, block.floats.to(self._place))
        self._integers.index_copy_(0, index, block.integers.to(self._place))

    def _places(self, clients: Sequence[int]) -> Tensor:
        """(K,) the clients' slots, where the store is; the host does not wait for a device."""
        return sent(torch.tensor(self._slots(clients)), self._place)

    def __contains__(self, client: int) -> bool:
        return client in self.slots

    def _slots(self, clients: Sequence[int]) -> list[int]:
        return [self.slots[client] for client in clients]
