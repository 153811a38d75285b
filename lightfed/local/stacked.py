"""Models of K clients at once: their tensors stacked as (K, *shape), one forward pass for all."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Those of torch.func.vmap, whose calls take twice as long as the steps of a small network.
from torch._C._functorch import (
    _add_batch_dim,
    _remove_batch_dim,
    get_unwrapped,
    maybe_get_bdim,
    maybe_get_level,
)
from torch._functorch.vmap import lazy_load_decompositions, vmap_increment_nesting
from torch.utils._pytree import tree_map_only

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
    lazy_load_decompositions()
    tensors = {prefix + name: value for name, value in values.items()}
    tensors |= {prefix + name: value for name, value in (shared or {}).items()}
    clients = len(next(iter(values.values())))
    with vmap_increment_nesting(clients, randomness) as level:
        placed, layers = [], _linear_layers(module, tensors, level)
        try:
            for name, value in tensors.items():
                path, _, last = name.rpartition(".")
                part = module.get_submodule(path)
                home: dict[str, Any] = part._buffers if last in part._buffers else part._parameters
                own = name.removeprefix(prefix) in values
                placed.append((home, last, home[last], name.removeprefix(prefix)))
                home[last] = _add_batch_dim(value, 0, level) if own else value
            mine = {name: home[last] for home, last, _, name in placed if name in values}
            for layer, run in layers:
                layer.__dict__["forward"] = run
            given = tree_map_only(Tensor, lambda x: _add_batch_dim(x, 0, level), inputs)
            found = module(*given)
            for home, last, _, name in placed:
                if name in mine and home[last] is not mine[name]:  # the module has put it there
                    values[name] = _remove_batch_dim(home[last], level, clients, 0).detach()
        finally:
            for home, last, before, _ in placed:
                home[last] = before
            for layer, _ in layers:
                layer.__dict__.pop("forward", None)
        return tree_map_only(Tensor, lambda x: _remove_batch_dim(x, level, clients, 0), found)


def _linear_layers(
    module: nn.Module, tensors: Mapping[str, Tensor], level: int
) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Linear layers, and their forward passes for all clients by one product.

    The rule of `vmap` takes twice the time for small layers; the bits are the same.
    """
    found: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
    for path, part in module.named_modules():
        weight, bias = (tensors.get(f"{path}.{name}".lstrip(".")) for name in ("weight", "bias"))
        if type(part) is nn.Linear and weight is not None and "forward" not in vars(part):
            found.append((part, partial(_linear, weight, bias, level)))
    return found


def _linear(weight: Tensor, bias: Tensor | None, level: int, x: Tensor) -> Tensor:
    """What a linear layer returns for every client, of a batched input."""
    if maybe_get_level(x) != level or x.dim() != 2:
        mine = (None if t is None else _add_batch_dim(t, 0, level) for t in (weight, bias))
        return F.linear(x, *mine)
    inner = get_unwrapped(x).movedim(maybe_get_bdim(x), 0)
    transposed = weight.transpose(1, 2)
    if bias is None:
        found = torch.bmm(inner, transposed)
    else:
        found = torch.baddbmm(bias[:, None], inner, transposed)
    return _add_batch_dim(found, 0, level)
