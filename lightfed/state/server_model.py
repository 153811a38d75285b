"""The server's model, or the part of the clients' models that the server has."""

from collections.abc import Mapping, Sequence

import torch
from lightfed_kernels import Entry, Layout
from torch import Tensor, nn

from lightfed.state.rows import ModelLayout, Row
from lightfed.utils.errors import UserError

# Stands in a merge for an integer buffer that a client does not have.
NOTHING = torch.iinfo(torch.int64).min


class ServerModel(nn.Module):
    """A model of the server: one row, the same on every rank. Checkpoints save it as buffers.

    Args:
        layout: The layout of the row.
        row: Its values, which are not copied.
        aliases: For a partial model, see below.

    Attributes:
        layout: The layout of the row.
        aliases: For a model that has only some of the clients' tensors, a mapping for each group:
            from the name of a tensor here to its name in the group. Empty for a whole model.
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
        """Whether this model has only some of the clients' tensors, by names of its own."""
        return bool(self.aliases)

    @property
    def parameters_row(self) -> Tensor:
        """The leading part of `floats`, without float buffers, as a view."""
        return self.floats[: self.layout.parameter_size]

    @property
    def row(self) -> Row:
        """The parameters and float buffers (P,), and the integer buffers (Q,), as they are kept."""
        return Row(self.floats, self.integers)


def part_of(layout: ModelLayout, row: Row, names: Sequence[Sequence[str]]) -> ServerModel:
    """Return a server model of some tensors of the first group, with their values.

    Args:
        layout: The layout of the first group.
        row: A row of the first group.
        names: For each group, the names of its tensors. The i-th name of every group is the same
            tensor. The model uses the first group's name for it.

    Raises:
        UserError: If the first group has none of these tensors.
    """
    first_group_names = names[0]
    aliases = tuple(dict(zip(first_group_names, group, strict=True)) for group in names)

    floats = [entry for entry in layout.floats if entry.name in first_group_names]
    integers = [entry for entry in layout.integers if entry.name in first_group_names]
    if not floats:
        raise UserError(
            key="model.algorithm",
            found="a server model without a client's tensor",
            fix=f"names are such as {layout.floats.entries[0].name!r}",
        )

    parameters = {entry.name for entry in layout.floats.entries[: layout.parameters]}
    part_layout = ModelLayout(
        floats=Layout.build((entry.name, entry.shape) for entry in floats),
        integers=Layout.build((entry.name, entry.shape) for entry in integers),
        parameters=sum(entry.name in parameters for entry in floats),
    )
    part = Row.zeros(part_layout)
    _extract(layout.floats, row.floats, part_layout.floats, part.floats)
    _extract(layout.integers, row.integers, part_layout.integers, part.integers)
    return ServerModel(part_layout, part, aliases=aliases)


def shared(model: ServerModel, group: int, layout: Layout) -> Layout:
    """Return the entries of a group's rows that a server model has, by the server's names.

    Args:
        model: The server's model, whole or a part of the clients' models.
        group: The number of the group.
        layout: The layout of the group's float rows, or of its integer rows.

    Returns:
        A layout of the same rows, so that offsets are those of the group.
    """
    if not model.part:
        return layout

    server_names = {group_name: name for name, group_name in model.aliases[group].items()}
    entries = [
        Entry(server_names[entry.name], entry.shape, entry.offset)
        for entry in layout
        if entry.name in server_names
    ]
    return Layout(tuple(entries), layout.size)


def integers_of(model: ServerModel, group: int, layout: ModelLayout, row: Row) -> Tensor:
    """Return a client's integer buffers in a server model's layout, as int64 (Q,).

    Where the client does not have a buffer the result is `NOTHING`. The result may be the row's own
    tensor.
    """
    if not model.part and layout.integers == model.layout.integers:
        return row.integers

    integers = torch.full_like(model.integers, NOTHING, device=row.integers.device)
    server_views = model.layout.integers.views(integers)
    for name, value in shared(model, group, layout.integers).views(row.integers).items():
        server_views[name].copy_(value)
    return integers


def put_integers(model: ServerModel, group: int, layout: ModelLayout, row: Row) -> None:
    """Copy a server model's integer buffers into a client's row, where the client has them."""
    if not model.part and layout.integers == model.layout.integers:
        row.integers.copy_(model.integers)
        return

    server_views = model.layout.integers.views(model.integers)
    for name, value in shared(model, group, layout.integers).views(row.integers).items():
        value.copy_(server_views[name])


def _extract(source: Layout, row: Tensor, target: Layout, out: Tensor) -> None:
    """Copy the tensors of a target layout out of a row that has more of them."""
    source_views = source.views(row)
    for name, view in target.views(out).items():
        view.copy_(source_views[name])
