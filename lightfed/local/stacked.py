"""Models of K clients at once: their tensors stacked as (K, *shape), one forward pass for all."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from lightfed.state.rows import ModelLayout, Row

Views = dict[str, Tensor]


def views(layout: ModelLayout, rows: Row) -> Views:
    """The tensors of K rows, (K, P) and (K, Q), as (K, *shape) views by name."""
    return {
        e.name: row[:, e.offset : e.offset + e.numel].unflatten(1, e.shape)
        if e.shape
        else row[:, e.offset]
        for row, entries in ((rows.floats, layout.floats), (rows.integers, layout.integers))
        for e in entries
    }


def gather(layout: ModelLayout, rows: Row, module: nn.Module) -> Views:
    """The tensors of K rows as contiguous (K, *shape) copies by name, in the module's types.

    Batch normalisation under `vmap` updates only statistics that are contiguous, and convolutions
    would copy weights that are not.
    """
    types = {name: b.dtype for name, b in module.named_buffers()}
    return {
        name: view.clone(memory_format=torch.contiguous_format).to(types.get(name, view.dtype))
        for name, view in views(layout, rows).items()
    }


def scatter(layout: ModelLayout, values: Mapping[str, Tensor], rows: Row) -> None:
    """Write stacked tensors back into K rows."""
    for name, view in views(layout, rows).items():
        view.copy_(values[name])


def forward(
    module: nn.Module,
    values: Views,
    *inputs: Any,
    shared: Mapping[str, Tensor] | None = None,
    prefix: str = "",
    randomness: str = "different",
) -> Any:
    """What `module(*inputs)` returns for each of K clients, in the module's mode.

    Args:
        module: left as it is; buffers that it writes are written in `values`.
        values: (K, *shape) parameters and buffers by name. A buffer that the module replaces is
            replaced here.
        inputs: (K, ...) each.
        shared: buffers that are the same for all clients, and are only read.
        prefix: of the names in the module.
        randomness: as of `torch.func.vmap`; draws are those of the default generator.

    Returns:
        its outputs, (K, ...) each.
    """
    same = {prefix + name: value for name, value in (shared or {}).items()}

    def one(mine: Views, given: tuple[Any, ...]) -> tuple[Any, Views]:
        before = {prefix + name: value for name, value in mine.items()}
        after = before | same  # gets what the module puts in the place of a buffer
        found = functional_call(module, after, given)
        return found, {n: after[prefix + n] for n, x in mine.items() if after[prefix + n] is not x}

    found, replaced = vmap(one, randomness=randomness)(values, inputs)
    for name, value in replaced.items():
        values[name] = value.detach()
    return found
