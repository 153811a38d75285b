"""Server models that hold only some of the clients' tensors."""

from collections.abc import Mapping, Sequence

import torch
from lightfed_kernels import Layout
from torch import Tensor

from lightfed.state.rows import ModelLayout, Row
from lightfed.state.server_model import ServerModel


def with_prefix(layout: ModelLayout, prefix: str) -> list[str]:
    """Names of the tensors with this prefix."""
    entries = [*layout.floats, *layout.integers]
    return [entry.name for entry in entries if entry.name.startswith(prefix)]


def part_of(layout: ModelLayout, row: Row, names: Sequence[Sequence[str]]) -> ServerModel:
    """A server model of some tensors of the first cohort, with their values.

    Args:
        layout: of the first cohort.
        row: of the first cohort.
        names: per cohort, the names of its tensors. The i-th name of each cohort is the same tensor
            and the model uses the first cohort's name for it.
    """
    aliases = tuple(dict(zip(names[0], own, strict=True)) for own in names)
    floats = [entry for entry in layout.floats if entry.name in aliases[0]]
    integers = [entry for entry in layout.integers if entry.name in aliases[0]]
    assert floats, "no tensor of a client is in it"
    parameters = {entry.name for entry in layout.floats.entries[: layout.parameters]}
    own = ModelLayout(
        floats=Layout.build((entry.name, entry.shape) for entry in floats),
        integers=Layout.build((entry.name, entry.shape) for entry in integers),
        parameters=sum(entry.name in parameters for entry in floats),
    )
    part = Row(own.floats.new_row(), own.integers.new_row(dtype=torch.int64))
    _take(layout.floats, row.floats, own.floats, part.floats, aliases[0])
    _take(layout.integers, row.integers, own.integers, part.integers, aliases[0])
    return ServerModel(own, part, aliases=aliases)


def shared_floats(model: ServerModel, cohort: int, layout: ModelLayout) -> Layout:
    """The layout of the server model's tensors in a cohort's rows, by the server's names."""
    if not model.part:
        return layout.floats
    here = {theirs: name for name, theirs in model.aliases[cohort].items()}
    entries = [e for e in layout.floats if e.name in here]
    renamed = tuple(type(e)(here[e.name], e.shape, e.offset) for e in entries)
    return Layout(renamed, layout.floats.size)


def integers_of(model: ServerModel, cohort: int, layout: ModelLayout, row: Row) -> Tensor:
    """(Q,) the integer buffers that a client shares with a server model, in the model's layout."""
    if not model.part:
        return row.integers
    shared = torch.zeros_like(model.integers, device=row.integers.device)
    aliases = model.aliases[cohort]
    _take(layout.integers, row.integers, model.layout.integers, shared, aliases)
    return shared


def put_integers(model: ServerModel, cohort: int, layout: ModelLayout, row: Row) -> None:
    """Copy a server model's integer buffers into a client's row."""
    if not model.part:
        row.integers.copy_(model.integers)
        return
    own = layout.integers.views(row.integers)
    for name, value in model.layout.integers.views(model.integers).items():
        own[model.aliases[cohort][name]].copy_(value)


def _take(
    source: Layout, row: Tensor, target: Layout, out: Tensor, aliases: Mapping[str, str]
) -> None:
    """Extract the target's tensors from a row with other names and more tensors."""
    views = source.views(row)
    for name, view in target.views(out).items():
        view.copy_(views[aliases[name]])
