"""Models of K clients at once: their tensors stacked as (K, *shape), one forward pass for all.

`vmap` runs a module for K clients. For some layers its rules launch more kernels than needed, or
copy images between layers. These layers get a forward of their own for the time of a pass.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.state.rows import ModelLayout, Row
from lightfed.utils.torch_private import (
    _add_batch_dim,
    _BatchNorm,
    _remove_batch_dim,
    get_unwrapped,
    lazy_load_decompositions,
    maybe_get_bdim,
    maybe_get_level,
    temporarily_pop_interpreter_stack,
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


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)

# Layers that act on every element alone: they take the samples of K clients as they are.
_ELEMENTWISE = (
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
)

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
        filled_norms: All batch normalization, with the paths of the layers; for batches of which
            some are filled up.
        pools: Max-pooling of images.
        in_place: Activations that overwrite their input, which `known` modules can do without. To
            `vmap` the input is a view, for which autograd would make four copies in each.
        chain: The layers of a module that is `known`, if they follow each other and can do without
            `vmap`; each with the names of its weight and bias, which are empty for other layers
            than linear ones. None for any other module.
    """

    def __init__(
        self, module: nn.Module, names: Iterable[str], prefix: str = "", *, known: bool = False
    ) -> None:
        self.homes: list[tuple[str, _Home, str]] = []
        self.linear: list[tuple[nn.Linear, str, str]] = []
        self.norms: list[tuple[_BatchNorm, str, str]] = []
        self.filled_norms: list[tuple[_BatchNorm, str]] = []
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
            if type(layer) in _BATCH_NORMS:
                self.filled_norms.append((layer, path))

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

        self.chain = self._find_chain(module, stacked_names) if known else None

    def _find_chain(
        self, module: nn.Module, stacked_names: Collection[str]
    ) -> list[tuple[nn.Module, str, str]] | None:
        """Return what `chain` is.

        Args:
            module: The module.
            stacked_names: Names of the tensors that every client has its own values of.
        """
        layers = layers_in_sequence(module)
        if not layers:
            return None

        names_of = {id(layer): (weight, bias) for layer, weight, bias in self.linear}
        chain: list[tuple[nn.Module, str, str]] = []
        for layer in layers:
            if type(layer) is nn.Linear:
                weight, bias = names_of.get(id(layer), ("", ""))
                if not weight or (layer.bias is not None and bias not in stacked_names):
                    return None  # a part of it is frozen: there is one for all clients
                chain.append((layer, weight, bias))
            elif type(layer) is nn.Flatten:
                if (layer.start_dim, layer.end_dim) != (1, -1):
                    return None
                chain.append((layer, "", ""))
            elif type(layer) in _ELEMENTWISE and not getattr(layer, "inplace", False):
                chain.append((layer, "", ""))
            else:
                return None
        return chain

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
    sizes: Tensor | None = None,
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
        sizes: The number of samples of each client, (K,), if their batches have been filled up to
            one size. Batch normalization in training leaves the samples beyond it out of its
            statistics.

    Returns:
        The outputs, each of shape (K, ...).
    """
    tensors = values if shared is None else {**values, **shared}
    if places is None:
        places = Places(module, tensors)

    if places.chain is not None:
        (samples,) = inputs
        begins_flat = samples.dim() == 3 or type(places.chain[0][0]) is nn.Flatten
        if begins_flat:
            return _run_chain(places.chain, values, samples)

    lazy_load_decompositions()
    clients = len(next(iter(values.values())))
    originals = [home[key] for _, home, key in places.homes]
    replaced_layers: list[nn.Module] = []
    with vmap_increment_nesting(clients, randomness) as level:
        batched = {name: _add_batch_dim(value, 0, level) for name, value in values.items()}
        try:
            for name, home, key in places.homes:
                home[key] = batched[name] if name in batched else tensors[name]
            _replace_forwards(places, values, level, sizes, replaced_layers)
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
    places: Places,
    values: Views,
    level: int,
    sizes: Tensor | None,
    replaced_layers: list[nn.Module],
) -> None:
    """Give layers a forward for K clients, and note each in `replaced_layers`.

    It is noted at once, so that the caller can undo what was done before an error.
    """
    for linear, weight, bias in places.linear:
        if weight in values and (linear.bias is None or bias in values):
            linear.__dict__["forward"] = partial(_linear, linear, level)
            replaced_layers.append(linear)

    if sizes is not None:
        for layer, path in places.filled_norms:
            layer.__dict__["forward"] = partial(
                _batch_norm_of_samples, layer, path, values, sizes, level
            )
            replaced_layers.append(layer)

    for norm, weight, bias in places.norms:
        if sizes is None and weight in values and bias in values:
            norm.__dict__["forward"] = partial(_batch_norm, norm, places.constants, level)
            replaced_layers.append(norm)

    for pool in places.pools:
        pool.__dict__["forward"] = partial(_max_pool, pool, level)
        replaced_layers.append(pool)


def layers_in_sequence(module: nn.Module) -> list[nn.Module] | None:
    """Return the layers that a module calls one after the other; None if it does anything else.

    A network of this package names its only part that is called as `sequence`. Layers with hooks,
    or with another forward, are not looked into: what they do is not known.
    """
    if has_hooks(module) or "forward" in vars(module):
        return None
    if type(module) is nn.Sequential:
        parts = list(module)
    elif "sequence" in vars(type(module)):
        parts = [module.get_submodule(vars(type(module))["sequence"])]
    else:
        return [module]

    layers = []
    for part in parts:
        layers_of_part = layers_in_sequence(part)
        if layers_of_part is None:
            return None
        layers += layers_of_part
    return layers


def has_hooks(layer: nn.Module) -> bool:
    """Return whether anything is called before or after the forward pass of a layer."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _run_chain(
    chain: Sequence[tuple[nn.Module, str, str]], values: Views, samples: Tensor
) -> Tensor:
    """Return what the layers of a chain return for K clients.

    The operators are those that `vmap` would call. Its own Python code takes as long as they do,
    with small layers.

    Args:
        chain: See `Places.chain`.
        values: Parameters by name, (K, *shape).
        samples: (K, B, in), or (K, B, *shape) if the first layer flattens them.
    """
    x = samples
    for layer, weight, bias in chain:
        if weight:
            x = _products(values[weight], values.get(bias), x)
        elif type(layer) is nn.Flatten:
            x = x.flatten(2)
        else:
            x = layer(x)
    return x


def _products(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Return what a linear layer returns for K clients.

    Args:
        weight: (K, out, in).
        bias: (K, out), or None.
        x: (K, B, in).
    """
    transposed = weight.transpose(1, 2)
    if bias is None:
        return torch.bmm(x, transposed)
    return torch.baddbmm(bias[:, None], x, transposed)


def _linear(layer: nn.Linear, level: int, x: Tensor) -> Tensor:
    """Return what a linear layer returns for every client, by one product.

    The rule of `vmap` takes twice the time for small layers; the bits are the same.

    Args:
        layer: The layer. Its weight and bias are read here: a network may run its layers with other
            tensors in their place (`lightfed.models.substitution`).
        level: Of `vmap`.
        x: The layer's input, which `vmap` shows without its axis of clients.
    """
    weight = _of_each_client(layer.weight, level)  # (K, out, in)
    bias = None if layer.bias is None else _of_each_client(layer.bias, level)  # (K, out)
    is_known = weight is not None and (bias is not None or layer.bias is None)
    if not is_known or maybe_get_level(x) != level or x.dim() != 2:
        return F.linear(x, layer.weight, layer.bias)

    assert weight is not None
    stacked_x = get_unwrapped(x).movedim(maybe_get_bdim(x), 0)  # (K, B, in)
    return _add_batch_dim(_products(weight, bias, stacked_x), 0, level)


def _of_each_client(tensor: Tensor, level: int) -> Tensor | None:
    """Return a layer's tensor of all clients, (K, *shape); None if `vmap` has not stacked it so."""
    if maybe_get_level(tensor) != level or maybe_get_bdim(tensor) != 0:
        return None
    return get_unwrapped(tensor)


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

    if images.is_cpu and images.is_contiguous():
        # `vmap` has no part in a function of all clients: its way of calling one costs more than
        # the function does on small images.
        with temporarily_pop_interpreter_stack():
            pooled = _PoolByChannels.apply(images, layer)
    else:
        pooled = nn.MaxPool2d.forward(layer, images)
    return _add_batch_dim(pooled.unflatten(1, (-1, x.shape[1])), 1, level)


class _PoolByChannels(torch.autograd.Function):
    """Max-pooling on a CPU, whose kernel is fast in the memory format channels_last alone.

    The copies into that format and back take less than it saves. Outside of it nothing sees the
    format, so maxima and gradients have the same bits as without the copies.
    """

    @staticmethod
    @override
    def forward(ctx: Any, images: Tensor, layer: nn.MaxPool2d) -> Tensor:
        """Return the maxima of contiguous images (N, C, H, W), which are contiguous, too."""
        by_channels = images.contiguous(memory_format=torch.channels_last)
        maxima, positions = F.max_pool2d_with_indices(by_channels, *_window(layer))
        ctx.layer = layer
        ctx.save_for_backward(by_channels, positions)
        return maxima.contiguous()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        by_channels, positions = ctx.saved_tensors
        by_maxima = gradients[0].contiguous(memory_format=torch.channels_last)
        by_images = torch.ops.aten.max_pool2d_with_indices_backward(
            by_maxima, by_channels, *_window(ctx.layer), positions
        )
        return by_images.contiguous(), None


def _window(layer: nn.MaxPool2d) -> list[Any]:
    """Return a layer's window, as both operators take it."""
    window = [layer.kernel_size, layer.stride, layer.padding, layer.dilation]
    pairs: list[Any] = []
    for size in window:
        pairs.append([size, size] if isinstance(size, int) else list(size))
    return [*pairs, layer.ceil_mode]


def _batch_norm(
    layer: _BatchNorm,
    constants: Callable[[Tensor], tuple[Tensor, Tensor]],
    level: int,
    x: Tensor,
) -> Tensor:
    """Return what batch normalization by the batch alone returns for every client.

    The operators are those of the rule of `vmap`, which would make ones and zeros for every batch.

    Args:
        layer: The layer. Its weight and bias are read here, as in `_linear`.
        constants: See `Places.constants`.
        level: Of `vmap`.
        x: The layer's input, which `vmap` shows without its axis of clients.
    """
    images = _merged_channels(level, x)
    weight = _of_each_client(layer.weight, level)  # (K, C)
    bias = _of_each_client(layer.bias, level)
    if images is None or weight is None or bias is None:
        return type(layer).forward(layer, x)

    ones, zeros = constants(images)
    momentum = 0.0 if layer.momentum is None else layer.momentum
    normalized = F.batch_norm(images, None, None, ones, zeros, True, momentum, layer.eps)

    by_client = normalized.transpose(0, 1).unflatten(0, weight.shape)  # (K, C, B, H, W)
    factor = weight.view(*weight.shape, 1, 1, 1)
    offset = bias.view(*bias.shape, 1, 1, 1)
    by_client = by_client * factor + offset
    return _add_batch_dim(by_client.transpose(1, 2), 0, level)


def _batch_norm_of_samples(
    layer: _BatchNorm, path: str, values: Views, sizes: Tensor | None, level: int, x: Tensor
) -> Tensor:
    """Return what batch normalization returns for clients whose batches may have been filled up.

    Means and variances are those of the first `sizes[k]` samples of client k. What the samples
    beyond them are normalized to has no weight in the loss.

    Args:
        layer: The layer.
        path: Its name among `values`.
        values: Parameters and buffers, (K, *shape) by name. Running statistics are updated here.
        sizes: (K,); None if no batch has been filled up.
        level: Of `vmap`.
        x: The layer's input, which `vmap` shows without its axis of clients.

    Raises:
        ValueError: A client has one value in each channel, which has no variance.
    """
    has_statistics = layer.running_mean is not None
    if maybe_get_level(x) != level or (has_statistics and not layer.training):
        return type(layer).forward(layer, x)

    stacked_x = get_unwrapped(x).movedim(maybe_get_bdim(x), 1)  # (B, K, C, *size)
    num_samples, clients, channels = stacked_x.shape[:3]
    values_of_sample = prod(stacked_x.shape[3:])
    # Only here does the host wait for a device: images have more than one value.
    if values_of_sample == 1:
        fewest = num_samples if sizes is None else int(sizes.min())
        if fewest == 1:
            raise ValueError("batch normalization of a single value in each channel")

    # Autocast computes statistics in full precision.
    precise_x = stacked_x.float()
    if sizes is None:
        real = None
        counts = precise_x.new_full((1, 1), num_samples * values_of_sample)
    else:
        is_real = torch.arange(num_samples, device=sizes.device)[:, None] < sizes
        real = is_real.to(precise_x.dtype)[..., None]  # (B, K, 1)
        counts = (sizes * values_of_sample)[:, None]  # (K, 1)

    weight = None
    bias = None
    if layer.weight is not None:
        # They are those of all clients, (C,), if they are frozen.
        weight = _of_each_client(layer.weight, level)
        weight = (layer.weight if weight is None else weight).expand(clients, channels)
        bias = _of_each_client(layer.bias, level)
        bias = (layer.bias if bias is None else bias).expand(clients, channels)

    with temporarily_pop_interpreter_stack():  # see `_max_pool`
        normalized, mean, variance = _NormOfClients.apply(
            precise_x, weight, bias, real, counts, layer.eps
        )
    if has_statistics and layer.track_running_stats:
        _update_statistics(layer, path, values, mean, variance, counts)
    return _add_batch_dim(normalized.to(x.dtype), 1, level)


class _NormOfClients(torch.autograd.Function):
    """Batch normalization of K clients by the statistics of their real samples.

    Written out, it would be a dozen operators in each direction, most of which read or write all
    images. Here only four of them do.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        real: Tensor | None,
        counts: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalized samples, their means (K, C), and their variances (K, C).

        Args:
            ctx: Keeps what `backward` needs.
            x: (B, K, C, *size).
            weight: (K, C); None for no affine transform.
            bias: (K, C), or None.
            real: (B, K, 1), 1 for real samples and 0 for others; None if all are real.
            counts: The number of real values in a channel, (K, 1) or (1, 1).
            eps: Added to the variances.
        """
        mean = _sum_of_real(x, real) / counts
        centered = x - mean.view(*mean.shape, *_ones(x))
        variance = _sum_of_real(centered.square_(), real) / counts

        # In evaluation mode the operator takes statistics as they are given.
        normalized = torch.batch_norm(
            x.flatten(1, 2), _flat(weight), _flat(bias), mean.flatten(), variance.flatten(),
            False, 0.0, eps, False,
        )  # fmt: skip

        ctx.save_for_backward(x, weight, real, counts, mean, variance)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return normalized.unflatten(1, x.shape[1:3]), mean, variance

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias.

        With y = w (x - m) / s + b, and sums over the n real samples of a channel,

            dx = w / s (dy - sum(dy) / n - (x - m) / s * sum(dy (x - m) / s) / n)

        The gradient dy of samples that are not real is 0, and so must be their dx.
        """
        x, weight, real, counts, mean, variance = ctx.saved_tensors
        merged_x = x.flatten(1, 2)
        by_output = gradients[0].flatten(1, 2)
        if merged_x.is_contiguous():
            by_output = by_output.contiguous()

        # In evaluation mode the operator returns w / s * dy, and the two sums.
        by_x, product_sums, sums = torch.ops.aten.native_batch_norm_backward(
            by_output, merged_x, _flat(weight), mean.flatten(), variance.flatten(), None, None,
            False, ctx.eps, [True, True, True],
        )  # fmt: skip
        product_sums = product_sums.view(mean.shape)
        sums = sums.view(mean.shape)

        inverse_deviation = torch.rsqrt(variance + ctx.eps)
        factor = inverse_deviation if weight is None else weight * inverse_deviation
        slope = factor * inverse_deviation * product_sums / counts
        offset = factor * sums / counts - slope * mean
        if real is not None:
            slope = slope * real  # (B, K, C)
            offset = offset * real

        by_x = by_x.unflatten(1, x.shape[1:3])
        by_x.addcmul_(x, slope.view(*slope.shape, *_ones(x)), value=-1)
        by_x.sub_(offset.view(*offset.shape, *_ones(x)))
        if weight is None:
            return by_x, None, None, None, None, None
        return by_x, product_sums, sums, None, None, None


def _sum_of_real(x: Tensor, real: Tensor | None) -> Tensor:
    """Return the sums of the real samples in every channel, (K, C), of x (B, K, C, *size)."""
    # The innermost axes first: a sum over them is fast, and what is left is small.
    sums = x.flatten(3).sum(3) if x.dim() > 3 else x
    if real is not None:
        sums = sums * real
    return sums.sum(0)


def _ones(x: Tensor) -> list[int]:
    """Return the shape by which a tensor of channels is broadcast over x, (B, K, C, *size)."""
    return [1] * (x.dim() - 3)


def _flat(parameter: Tensor | None) -> Tensor | None:
    """Return a parameter of all channels of all clients, (K C,), from (K, C)."""
    return None if parameter is None else parameter.flatten()


@torch.no_grad()
def _update_statistics(
    layer: _BatchNorm, path: str, values: Views, mean: Tensor, variance: Tensor, counts: Tensor
) -> None:
    """Update the running statistics of K clients, as batch normalization does.

    Args:
        layer: The layer; its momentum is a number.
        path: Its name among `values`.
        values: Buffers, (K, *shape) by name.
        mean: (K, C), of a batch.
        variance: (K, C), without the correction for the number of values.
        counts: The number of values in a channel of a batch, (K, 1).
    """
    assert layer.momentum is not None
    unbiased = variance * (counts / (counts - 1))
    values[f"{path}.running_mean".lstrip(".")].lerp_(mean, layer.momentum)
    values[f"{path}.running_var".lstrip(".")].lerp_(unbiased, layer.momentum)
    values[f"{path}.num_batches_tracked".lstrip(".")].add_(1)
