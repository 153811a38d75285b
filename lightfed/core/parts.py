"""Server models of a part of the clients' tensors, which these have beside others of their own."""

import torch
from lightfed_kernels import Layout
from torch import Tensor

from lightfed.core.algorithm import ServerModel
from lightfed.core.store import ModelLayout, Row


def part_of(layout: ModelLayout, row: Row, prefix: str) -> ServerModel:
    """The tensors of a row whose names begin so, with their values there."""
    floats = [entry for entry in layout.floats if entry.name.startswith(prefix)]
    integers = [entry for entry in layout.integers if entry.name.startswith(prefix)]
    assert floats, f"no tensor of a client is called {prefix}..."
    parameters = {entry.name for entry in layout.floats.entries[: layout.parameters]}
    own = ModelLayout(
        floats=Layout.build((entry.name, entry.shape) for entry in floats),
        integers=Layout.build((entry.name, entry.shape) for entry in integers),
        parameters=sum(entry.name in parameters for entry in floats),
    )
    part = Row(own.floats.new_row(), own.integers.new_row(dtype=torch.int64))
    _copy(layout.floats, row.floats, own.floats, part.floats)
    _copy(layout.integers, row.integers, own.integers, part.integers)
    return ServerModel(own, part, part=True)


def integers_of(model: ServerModel, layout: ModelLayout, row: Row) -> Tensor:
    """(Q,) the integer buffers of a client's row that a server model has too, in its layout."""
    if not model.part:
        return row.integers
    shared = torch.zeros_like(model.integers, device=row.integers.device)
    _copy(layout.integers, row.integers, model.layout.integers, shared)
    return shared


def put_integers(model: ServerModel, layout: ModelLayout, row: Row) -> None:
    """A server model's integer buffers into a client's row."""
    if not model.part:
        row.integers.copy_(model.integers)
        return
    own = layout.integers.views(row.integers)
    for name, value in model.layout.integers.views(model.integers).items():
        own[name].copy_(value)


def _copy(source: Layout, row: Tensor, target: Layout, out: Tensor) -> None:
    """The tensors of the target, from a row that has them among others."""
    views = source.views(row)
    for name, view in target.views(out).items():
        view.copy_(views[name])
