"""The server's model, whole or a part: clients may have more tensors than it, or fewer."""

from collections.abc import Mapping, Sequence

import torch
from lightfed_kernels import Layout
from torch import Tensor, nn

from lightfed.state.rows import ModelLayout, Row
from lightfed.utils.errors import require

NOTHING = torch.iinfo(torch.int64).min  # in place of an integer buffer that a client lacks


class ServerModel(nn.Module):
    """A model of the server: a row, replicated on every rank, checkpointed as buffers.

    Attributes:
        layout: of the row.
        aliases: for a partial model, by group: the name of a tensor here -> its name in the
            group. Empty for a whole model.
    """

    floats: Tensor
    integers: Tensor

    def __init__(
        self, layout: ModelLayout, row: Row, *, aliases: Sequence[Mapping[str, str]] = ()
    ) -> None:
        super().__init__()
        self.layout = layout
        self.aliases = tuple(aliases)
        self.register_buffer("floats", row.floats)
        self.register_buffer("integers", row.integers)

    @property
    def part(self) -> bool:
        """Whether clients have more tensors than this model."""
        return bool(self.aliases)

    @property
    def parameters_row(self) -> Tensor:
        """The leading part of `floats`, without buffers; a view."""
        return self.floats[: self.layout.parameter_size]

    @property
    def row(self) -> Row:
        """(P,) parameters and float buffers, (Q,) integer buffers."""
        return Row(self.floats, self.integers)


def part_of(layout: ModelLayout, row: Row, names: Sequence[Sequence[str]]) -> ServerModel:
    """A server model of some tensors of the first group, with their values.

    Args:
        layout: of the first group.
        row: of the first group.
        names: per group, the names of its tensors. The i-th name of each group is the same tensor
            and the model uses the first group's name for it.
    """
    aliases = tuple(dict(zip(names[0], own, strict=True)) for own in names)
    floats = [entry for entry in layout.floats if entry.name in aliases[0]]
    integers = [entry for entry in layout.integers if entry.name in aliases[0]]
    fix = f"names are such as {layout.floats.entries[0].name!r}"
    require(bool(floats), "model.algorithm", "a server model without a client's tensor", fix)
    parameters = {entry.name for entry in layout.floats.entries[: layout.parameters]}
    own = ModelLayout(
        floats=Layout.build((entry.name, entry.shape) for entry in floats),
        integers=Layout.build((entry.name, entry.shape) for entry in integers),
        parameters=sum(entry.name in parameters for entry in floats),
    )
    part = Row.zeros(own)
    _take(layout.floats, row.floats, own.floats, part.floats)
    _take(layout.integers, row.integers, own.integers, part.integers)
    return ServerModel(own, part, aliases=aliases)


def shared(model: ServerModel, group: int, layout: Layout) -> Layout:
    """The entries of a group's rows that belong to a server model, by the server's names.

    Args:
        model: whole, or a part of the clients' models.
        group: number of the group.
        layout: of its float rows or its integer rows.
    """
    if not model.part:
        return layout
    here = {theirs: name for name, theirs in model.aliases[group].items()}
    entries = [e for e in layout if e.name in here]
    return Layout(tuple(type(e)(here[e.name], e.shape, e.offset) for e in entries), layout.size)


def integers_of(model: ServerModel, group: int, layout: ModelLayout, row: Row) -> Tensor:
    """(Q,) the integer buffers of a client in a server model's layout; NOTHING where it has none.

    The result may be the row's own.
    """
    if not model.part and layout.integers == model.layout.integers:
        return row.integers
    found = torch.full_like(model.integers, NOTHING, device=row.integers.device)
    places = model.layout.integers.views(found)
    for name, value in shared(model, group, layout.integers).views(row.integers).items():
        places[name].copy_(value)
    return found


def put_integers(model: ServerModel, group: int, layout: ModelLayout, row: Row) -> None:
    """Copy a server model's integer buffers into a client's row."""
    if not model.part and layout.integers == model.layout.integers:
        row.integers.copy_(model.integers)
        return
    values = model.layout.integers.views(model.integers)
    for name, place in shared(model, group, layout.integers).views(row.integers).items():
        place.copy_(values[name])


def _take(source: Layout, row: Tensor, target: Layout, out: Tensor) -> None:
    """Extract the target's tensors from a row with more tensors."""
    views = source.views(row)
    for name, view in target.views(out).items():
        view.copy_(views[name])
