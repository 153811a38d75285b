"""Models of K clients at once: their tensors stacked as (K, *shape), one forward pass for all.

`vmap` runs a module for K clients. For some layers its rules launch more kernels than needed, or
copy images between layers. These layers get a forward of their own for the time of a pass.
"""

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

# The dictionary of a module's parameters or buffers.
_Home = dict[str, Any]


def views(layout: ModelLayout, rows: Row) -> Views:
    """Return the tensors of K rows, (K, P) and (K, Q), as views of shape (K, *shape) by name."""
    found: Views = {}
    for matrix, entries in ((rows.floats, layout.floats), (rows.integers, layout.integers)):
        for entry in entries:
            if entry.shape:
                columns = matrix[:, entry.offset : entry.offset + entry.numel]
                found[entry.name] = columns.unflatten(1, entry.shape)
            else:
                found[entry.name] = matrix[:, entry.offset]
    return found


def gather(layout: ModelLayout, rows: Row, module: nn.Module) -> Views:
    """Return the tensors of K rows as contiguous copies of shape (K, *shape), by name.

    They have the types that the module's tensors have. Batch normalization under `vmap` updates
    only statistics that are contiguous, and convolutions would copy weights that are not.
    """
    types = {name: buffer.dtype for name, buffer in module.named_buffers()}
    copies: Views = {}
    for name, view in views(layout, rows).items():
        copy = view.clone(memory_format=torch.contiguous_format)
        copies[name] = copy.to(types.get(name, view.dtype))
    return copies


def scatter(layout: ModelLayout, values: Mapping[str, Tensor], rows: Row) -> None:
    """Write stacked tensors, (K, *shape) by name, back into K rows."""
    for name, view in views(layout, rows).items():
        view.copy_(values[name])


# Activations whose result is the same whether or not it overwrites their input.
_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU)


class Places:
    """Where a module has some tensors, and which of its layers get a forward of their own.

    Looking this up walks through the whole module, so a session does it once.

    Args:
        module: The module.
        names: Names of parameters and buffers, without the prefix.
        prefix: What their names in the module begin with.
        known: Whether only the next layer reads what a layer of the module returns, or what is read
            is not changed afterwards.

    Attributes:
        homes: For each tensor its name, the dictionary that holds it, and its key there.
        linear: Linear layers, with the names of their weights and biases.
        norms: Batch normalization without running statistics, with the same names.
        pools: Max-pooling of images.
        in_place: Activations that overwrite their input, which `known` modules can do without. To
            `vmap` the input is a view, for which autograd would make four copies in each.
    """

    def __init__(
        self, module: nn.Module, names: Iterable[str], prefix: str = "", *, known: bool = False
    ) -> None:
        self.homes: list[tuple[str, _Home, str]] = []
        self.linear: list[tuple[nn.Linear, str, str]] = []
        self.norms: list[tuple[_BatchNorm, str, str]] = []
        self.pools: list[nn.MaxPool2d] = []
        self.in_place: list[Any] = []
        self._constants: dict[Any, tuple[Tensor, Tensor]] = {}

        stacked_names = set()
        for name in names:
            path, _, key = (prefix + name).rpartition(".")
            owner = module.get_submodule(path)
            home: _Home = owner._buffers if key in owner._buffers else owner._parameters
            self.homes.append((name, home, key))
            stacked_names.add(name)

        for full_path, layer in module.named_modules():
            if "forward" in vars(layer):
                continue  # someone else has replaced it

            path = full_path.removeprefix(prefix)
            weight = f"{path}.weight".lstrip(".")
            bias = f"{path}.bias".lstrip(".")
            if type(layer) is nn.Linear:
                if weight in stacked_names:
                    self.linear.append((layer, weight, bias))
            elif isinstance(layer, _BatchNorm) and _has_no_statistics(layer):
                if weight in stacked_names and bias in stacked_names:
                    self.norms.append((layer, weight, bias))
            elif type(layer) is nn.MaxPool2d and not layer.return_indices:
                self.pools.append(layer)
            elif known and type(layer) in _ACTIVATIONS and layer.inplace:
                self.in_place.append(layer)

    def constants(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return ones and zeros, (C,) each, as weights of batch normalization; made once.

        Args:
            images: (B, C, H, W), which have the number of channels, type and device.
        """
        key = images.shape[1], images.dtype, images.device
        if key not in self._constants:
            ones = torch.ones(images.shape[1], dtype=images.dtype, device=images.device)
            self._constants[key] = ones, torch.zeros_like(ones)
        return self._constants[key]


def _has_no_statistics(layer: _BatchNorm) -> bool:
    """Return whether a layer normalizes images by their batch alone, also in evaluation."""
    if type(layer) is not nn.BatchNorm2d:
        return False
    return layer.running_mean is None and layer.running_var is None


def forward(
    module: nn.Module,
    values: Views,
    *inputs: Any,
    shared: Mapping[str, Tensor] | None = None,
    places: Places | None = None,
    randomness: str = "different",
) -> Any:
    """Return what `module(*inputs)` returns for each of K clients, in the module's mode.

    This is `torch.func.functional_call` under `torch.func.vmap`, without what these two look up in
    every call.

    Args:
        module: Left as it is. Buffers that it writes are written in `values`.
        values: Parameters and buffers by name, each of shape (K, *shape). A buffer that the module
            replaces is replaced here.
        inputs: Each of shape (K, ...).
        shared: Buffers that are the same for all clients, and are only read.
        places: Where these tensors lie in the module; looked up if not given.
        randomness: As in `torch.func.vmap`. Draws come from the default generator.

    Returns:
        The outputs, each of shape (K, ...).
    """
    lazy_load_decompositions()
    tensors = values if shared is None else {**values, **shared}
    if places is None:
        places = Places(module, tensors)

    clients = len(next(iter(values.values())))
    originals = [home[key] for _, home, key in places.homes]
    replaced_layers: list[nn.Module] = []
    with vmap_increment_nesting(clients, randomness) as level:
        batched = {name: _add_batch_dim(value, 0, level) for name, value in values.items()}
        try:
            for name, home, key in places.homes:
                home[key] = batched[name] if name in batched else tensors[name]
            _replace_forwards(places, values, level, replaced_layers)
            for activation in places.in_place:
                activation.inplace = False

            batched_inputs = tree_map_only(Tensor, lambda x: _add_batch_dim(x, 0, level), inputs)
            outputs = module(*batched_inputs)

            for name, home, key in places.homes:
                # The module has put another tensor in the place of its buffer.
                if name in batched and home[key] is not batched[name]:
                    values[name] = _remove_batch_dim(home[key], level, clients, 0).detach()
        finally:
            for (_, home, key), original in zip(places.homes, originals, strict=True):
                home[key] = original
            for layer in replaced_layers:
                del layer.__dict__["forward"]
            for activation in places.in_place:
                activation.inplace = True

        return tree_map_only(Tensor, lambda x: _remove_batch_dim(x, level, clients, 0), outputs)


def _replace_forwards(
    places: Places, values: Views, level: int, replaced_layers: list[nn.Module]
) -> None:
    """Give layers a forward for K clients, and note each in `replaced_layers`.

    It is noted at once, so that the caller can undo what was done before an error.
    """
    for linear, weight, bias in places.linear:
        if weight in values and (linear.bias is None or bias in values):
            run_linear = partial(_linear, values[weight], values.get(bias), level)
            linear.__dict__["forward"] = run_linear
            replaced_layers.append(linear)

    for norm, weight, bias in places.norms:
        if weight in values and bias in values:
            run_norm = partial(
                _batch_norm, norm, values[weight], values[bias], places.constants, level
            )
            norm.__dict__["forward"] = run_norm
            replaced_layers.append(norm)

    for pool in places.pools:
        pool.__dict__["forward"] = partial(_max_pool, pool, level)
        replaced_layers.append(pool)


def _linear(weight: Tensor, bias: Tensor | None, level: int, x: Tensor) -> Tensor:
    """Return what a linear layer returns for every client, by one product.

    The rule of `vmap` takes twice the time for small layers; the bits are the same.

    Args:
        weight: (K, out, in).
        bias: (K, out), or None.
        level: Of `vmap`.
        x: The layer's input, which `vmap` shows without its axis of clients.
    """
    if maybe_get_level(x) != level or x.dim() != 2:
        batched_bias = None if bias is None else _add_batch_dim(bias, 0, level)
        return F.linear(x, _add_batch_dim(weight, 0, level), batched_bias)

    stacked_x = get_unwrapped(x).movedim(maybe_get_bdim(x), 0)  # (K, B, in)
    transposed = weight.transpose(1, 2)
    if bias is None:
        y = torch.bmm(stacked_x, transposed)
    else:
        y = torch.baddbmm(bias[:, None], stacked_x, transposed)
    return _add_batch_dim(y, 0, level)


def _merged_channels(level: int, x: Tensor) -> Tensor | None:
    """Return the images of K clients as a view of shape (B, K C, H, W), as convolutions give them.

    None if there is no such view.
    """
    if maybe_get_level(x) != level or x.dim() != 4:
        return None

    stacked_x = get_unwrapped(x).movedim(maybe_get_bdim(x), 1)  # (B, K, C, H, W)
    clients, channels = stacked_x.shape[1:3]
    is_adjacent = stacked_x.stride(1) == channels * stacked_x.stride(2)
    if is_adjacent or clients == 1 or channels == 1:
        return stacked_x.flatten(1, 2)
    return None


def _max_pool(layer: nn.MaxPool2d, level: int, x: Tensor) -> Tensor:
    """Return what max-pooling returns for every client; arguments as for `_linear`.

    `vmap` would copy the images into another order, and the next convolution would copy them back.
    Maxima are the same in any order.
    """
    images = _merged_channels(level, x)
    if images is None:
        return nn.MaxPool2d.forward(layer, x)

    pooled = nn.MaxPool2d.forward(layer, images)
    return _add_batch_dim(pooled.unflatten(1, (-1, x.shape[1])), 1, level)


def _batch_norm(
    layer: _BatchNorm,
    weight: Tensor,
    bias: Tensor,
    constants: Callable[[Tensor], tuple[Tensor, Tensor]],
    level: int,
    x: Tensor,
) -> Tensor:
    """Return what batch normalization by the batch alone returns for every client.

    The operators are those of the rule of `vmap`, which would make ones and zeros for every batch.

    Args:
        layer: The layer.
        weight: (K, C).
        bias: (K, C).
        constants: See `Places.constants`.
        level: Of `vmap`.
        x: The layer's input, which `vmap` shows without its axis of clients.
    """
    images = _merged_channels(level, x)
    if images is None:
        return type(layer).forward(layer, x)

    ones, zeros = constants(images)
    momentum = 0.0 if layer.momentum is None else layer.momentum
    normalized = F.batch_norm(images, None, None, ones, zeros, True, momentum, layer.eps)

    by_client = normalized.transpose(0, 1).unflatten(0, weight.shape)  # (K, C, B, H, W)
    factor = weight.view(*weight.shape, 1, 1, 1)
    offset = bias.view(*bias.shape, 1, 1, 1)
    by_client = by_client * factor + offset
    return _add_batch_dim(by_client.transpose(1, 2), 0, level)
