"""Models of K clients at once: their tensors stacked as (K, *shape), one forward pass for all."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightfed.state.rows import ModelLayout, Row
from lightfed.utils.torch_private import (
    _add_batch_dim,
    _BatchNorm,
    _remove_batch_dim,
    get_unwrapped,
    lazy_load_decompositions,
    maybe_get_bdim,
    maybe_get_level,
    tree_map_only,
    vmap_increment_nesting,
)

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


# Activations whose result does not depend on whether it takes the place of their input.
_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU)


class Places:
    """Where a module has some tensors, and the layers that need not go through the rules of `vmap`.

    Args:
        module: the module.
        names: of parameters and buffers, without `prefix`.
        prefix: of their names in the module.
        known: nothing but its next layer reads what a layer of the module returns, or what is read
            is not changed afterwards.

    Attributes:
        linear: linear layers, with the names of their tensors.
        norms: static batch normalisation, with the names of its tensors.
        pools: max-pooling of images.
        in_place: activations that take the place of their input, which `known` modules can do
            without. Autograd would copy the input four times for each: to `vmap` it is a view.
    """

    def __init__(
        self, module: nn.Module, names: Iterable[str], prefix: str = "", *, known: bool = False
    ) -> None:
        self.homes: list[tuple[str, dict[str, Any], str]] = []
        for name in names:
            path, _, last = (prefix + name).rpartition(".")
            part = module.get_submodule(path)
            self.homes.append(
                (name, part._buffers if last in part._buffers else part._parameters, last)
            )
        given = {*names}
        self.linear: list[tuple[nn.Linear, str, str]] = []
        self.norms: list[tuple[_BatchNorm, str, str]] = []
        self.pools: list[nn.MaxPool2d] = []
        self.in_place: list[Any] = []
        self._constants: dict[Any, tuple[Tensor, Tensor]] = {}
        for full, part in module.named_modules():
            if "forward" in vars(part):
                continue
            path = full.removeprefix(prefix)
            weight, bias = f"{path}.weight".lstrip("."), f"{path}.bias".lstrip(".")
            if isinstance(part, nn.Linear) and type(part) is nn.Linear and weight in given:
                self.linear.append((part, weight, bias))
            elif isinstance(part, _BatchNorm) and _is_static(part) and {weight, bias} <= given:
                self.norms.append((part, weight, bias))
            elif type(part) is nn.MaxPool2d and not part.return_indices:
                self.pools.append(part)
            elif known and type(part) in _ACTIVATIONS and part.inplace:
                self.in_place.append(part)

    def constants(self, channels: Tensor) -> tuple[Tensor, Tensor]:
        """Ones and zeros of the channels, (C,) each, which batch normalisation takes as weights."""
        key = channels.shape[1], channels.dtype, channels.device
        if key not in self._constants:
            ones = torch.ones(key[0], dtype=channels.dtype, device=channels.device)
            self._constants[key] = ones, torch.zeros_like(ones)
        return self._constants[key]


def _is_static(part: _BatchNorm) -> bool:
    """Whether a layer normalises by its batch alone, of images."""
    return type(part) is nn.BatchNorm2d and part.running_mean is None and part.running_var is None


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
    replaced: list[nn.Module] = []
    with vmap_increment_nesting(clients, randomness) as level:
        mine = {name: _add_batch_dim(value, 0, level) for name, value in values.items()}
        try:
            for name, home, last in places.homes:
                home[last] = mine[name] if name in mine else tensors[name]
            for layer, weight, bias in places.linear:
                if weight in values and (layer.bias is None or bias in values):
                    run = partial(_linear, values[weight], values.get(bias), level)
                    layer.__dict__["forward"] = run
                    replaced.append(layer)
            for norm, weight, bias in places.norms:
                if weight in values and bias in values:
                    normalise = partial(_batch_norm, norm, values[weight], values[bias])
                    norm.__dict__["forward"] = partial(normalise, places.constants, level)
                    replaced.append(norm)
            for pool in places.pools:
                pool.__dict__["forward"] = partial(_max_pool, pool, level)
                replaced.append(pool)
            for activation in places.in_place:
                activation.inplace = False
            given = tree_map_only(Tensor, lambda x: _add_batch_dim(x, 0, level), inputs)
            found = module(*given)
            for name, home, last in places.homes:
                if name in mine and home[last] is not mine[name]:  # the module has put it there
                    values[name] = _remove_batch_dim(home[last], level, clients, 0).detach()
        finally:
            for (_, home, last), tensor in zip(places.homes, before, strict=True):
                home[last] = tensor
            for part in replaced:
                del part.__dict__["forward"]
            for activation in places.in_place:
                activation.inplace = True
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


def _channels(level: int, x: Tensor) -> Tensor | None:
    """(B, K C, H, W) images of K clients as a view, such as convolutions give; None without one."""
    if maybe_get_level(x) != level or x.dim() != 4:
        return None
    inner = get_unwrapped(x).movedim(maybe_get_bdim(x), 1)
    clients, channels = inner.shape[1:3]
    adjacent = inner.stride(1) == channels * inner.stride(2)
    return inner.flatten(1, 2) if adjacent or 1 in (clients, channels) else None


def _max_pool(layer: nn.MaxPool2d, level: int, x: Tensor) -> Tensor:
    """What max-pooling returns for every client; `vmap` would copy the images into another order.

    The next convolution would copy them back. Maxima are the same in any order.
    """
    images = _channels(level, x)
    if images is None:
        return nn.MaxPool2d.forward(layer, x)
    found = nn.MaxPool2d.forward(layer, images)
    return _add_batch_dim(found.unflatten(1, (-1, x.shape[1])), 1, level)


def _batch_norm(
    layer: _BatchNorm,
    weight: Tensor,
    bias: Tensor,
    constants: Callable[[Tensor], tuple[Tensor, Tensor]],
    level: int,
    x: Tensor,
) -> Tensor:
    """What batch normalisation by the batch alone returns for every client.

    The operators are those of the rule of `vmap`, which would make ones and zeros for every batch.
    """
    images = _channels(level, x)
    if images is None:
        return type(layer).forward(layer, x)
    ones, zeros = constants(images)
    momentum = 0.0 if layer.momentum is None else layer.momentum
    found = F.batch_norm(images, None, None, ones, zeros, True, momentum, layer.eps)
    each = found.transpose(0, 1).unflatten(0, weight.shape)  # (K, C, B, H, W)
    factor, offset = (part.view(*part.shape, 1, 1, 1) for part in (weight, bias))
    each = each * factor + offset
    return _add_batch_dim(each.transpose(1, 2), 0, level)
