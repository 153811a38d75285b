"""Models of K clients at once: their tensors stacked as (K, *shape), one forward pass for all."""

from collections.abc import Iterable, Mapping
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


class Places:
    """Where a module has some tensors, and its linear layers.

    Args:
        module: the module.
        names: of parameters and buffers, without `prefix`.
        prefix: of their names in the module.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], prefix: str = "") -> None:
        self.homes: list[tuple[str, dict[str, Any], str]] = []
        for name in names:
            path, _, last = (prefix + name).rpartition(".")
            part = module.get_submodule(path)
            self.homes.append(
                (name, part._buffers if last in part._buffers else part._parameters, last)
            )
        known = {*names}
        self.linear = [
            (part, f"{path}.weight".lstrip("."), f"{path}.bias".lstrip("."))
            for full, part in module.named_modules()
            for path in [full.removeprefix(prefix)]
            if type(part) is nn.Linear and "forward" not in vars(part)
            if f"{path}.weight".lstrip(".") in known
        ]


def forward(
    module: nn.Module,
    values: Views,
    *inputs: Any,
    shared: Mapping[str, Tensor] | None = None,
    places: Places | None = None,
    randomness: str = "different",
) -> Any:
    """What `module(*inputs)` returns for each of K clients, in the module's mode.

    Args:
        module: left as it is; buffers that it writes are written in `values`.
        values: (K, *shape) parameters and buffers by name. A buffer that the module replaces is
            replaced here.
        inputs: (K, ...) each.
        shared: buffers that are the same for all clients, and are only read.
        places: of all these tensors; by default they are looked up.
        randomness: as of `torch.func.vmap`; draws are those of the default generator.

    Returns:
        its outputs, (K, ...) each.
    """
    lazy_load_decompositions()
    tensors = values if shared is None else {**values, **shared}
    places = places or Places(module, tensors)
    clients = len(next(iter(values.values())))
    before = [home[last] for _, home, last in places.homes]
    with vmap_increment_nesting(clients, randomness) as level:
        mine = {name: _add_batch_dim(value, 0, level) for name, value in values.items()}
        try:
            for name, home, last in places.homes:
                home[last] = mine[name] if name in mine else tensors[name]
            for layer, weight, bias in places.linear:
                if weight in values and (layer.bias is None or bias in values):
                    run = partial(_linear, values[weight], values.get(bias), level)
                    layer.__dict__["forward"] = run
            given = tree_map_only(Tensor, lambda x: _add_batch_dim(x, 0, level), inputs)
            found = module(*given)
            for name, home, last in places.homes:
                if name in mine and home[last] is not mine[name]:  # the module has put it there
                    values[name] = _remove_batch_dim(home[last], level, clients, 0).detach()
        finally:
            for (_, home, last), tensor in zip(places.homes, before, strict=True):
                home[last] = tensor
            for layer, *_ in places.linear:
                layer.__dict__.pop("forward", None)
        return tree_map_only(Tensor, lambda x: _remove_batch_dim(x, level, clients, 0), found)


def _linear(weight: Tensor, bias: Tensor | None, level: int, x: Tensor) -> Tensor:
    """What a linear layer returns for every client, of a batched input, by one product.

    The rule of `vmap` takes twice the time for small layers; the bits are the same.
    """
    if maybe_get_level(x) != level or x.dim() != 2:
        own = None if bias is None else _add_batch_dim(bias, 0, level)
        return F.linear(x, _add_batch_dim(weight, 0, level), own)
    inner = get_unwrapped(x).movedim(maybe_get_bdim(x), 0)
    transposed = weight.transpose(1, 2)
    if bias is None:
        found = torch.bmm(inner, transposed)
    else:
        found = torch.baddbmm(bias[:, None], inner, transposed)
    return _add_batch_dim(found, 0, level)
