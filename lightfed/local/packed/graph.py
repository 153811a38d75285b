"""A network's graph, run on K clients at once without `vmap`.

`vmap` takes a millisecond of Python a step; a traced graph takes about as long as one client does.
Known layers are run here, and a network with any other is left to `forward.PackedForward`.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightfed.local.packed.functions import inexact
from lightfed.local.packed.operators import (
    cross_entropies,
    dropout,
    each_in_whole_vectors,
    linear,
    linear_of_columns,
)
from lightfed.local.packed.tracing import Unknown, traced_network
from lightfed.models.image_format import columns_of
from lightfed.models.networks.one_pixel import OnePixelConv2d
from lightfed.utils.rng import Draws

Values = Mapping[str, Tensor]


class Stack:
    """An activation of K clients: (K, B, ...), or folded (K, C, B, ...), as of convolutions."""

    def __init__(self, tensor: Tensor, *, folded: bool = False) -> None:
        self.tensor, self.folded = tensor, folded

    def fold(self) -> Tensor:
        """(K, C, B, ...)."""
        return self.tensor if self.folded else self.tensor.transpose(1, 2)

    def unfold(self) -> Tensor:
        """(K, B, ...)."""
        return self.tensor.transpose(1, 2) if self.folded else self.tensor

    def map(self, function: Callable[..., Tensor], *others: Any) -> "Stack":
        """An element-wise function, of another activation or number too."""
        if any(isinstance(x, Stack) and x.folded != self.folded for x in others):
            raise Unknown("activations of several kinds are added")
        given = [x.tensor if isinstance(x, Stack) else x for x in others]
        return Stack(function(self.tensor, *given), folded=self.folded)


class NetworkGraph:
    """The graph of a network in training, or in evaluation.

    `prefix` is that of its parameters' names, `names` are those of a row's tensors. Raises Unknown
    if it cannot be traced, or has a layer that is not known here.
    """

    def __init__(
        self, net: nn.Module, prefix: str, names: Collection[str], *, training: bool = True
    ) -> None:
        traced = traced_network(net)
        self._training, self._prefix = training, prefix
        self._modules = dict(traced.named_modules())
        self._nodes = [node for node in traced.graph.nodes if node.op != "output"]
        (self._output,) = next(n for n in traced.graph.nodes if n.op == "output").args
        if sum(node.op == "placeholder" for node in self._nodes) != 1:
            raise Unknown("its forward takes more than the inputs")
        for node in self._nodes:
            self._check(node, names)

    def _check(self, node: fx.Node, names: Collection[str]) -> None:
        layer = self._layer(node)
        known = {
            "placeholder": True,
            "call_module": type(layer) in _LAYERS,
            "call_function": node.target in _FUNCTIONS,
            "call_method": node.target in _METHODS,
        }
        if not known.get(node.op, False):
            raise Unknown(f"its graph has {node.target}")
        if self._overwrites(node):
            raise Unknown(f"{node.target} changes in place what is used again")
        if isinstance(layer, nn.Conv2d) and (layer.groups > 1 or layer.padding_mode != "zeros"):
            raise Unknown("it has grouped convolutions")
        if layer is None:
            return
        if layer.training != self._training:
            raise Unknown(f"{node.target} is in another mode")
        if isinstance(layer, _BatchNorm) and not self._training and layer.running_mean is None:
            raise Unknown(f"{node.target} normalises by the batch")
        tensors = [*layer.named_parameters(), *layer.named_buffers()]
        if any(f"{self._prefix}{node.target}.{name}" not in names for name, _ in tensors):
            raise Unknown(f"{node.target} shares a tensor with another layer")

    def _layer(self, node: fx.Node) -> nn.Module | None:
        return self._modules[str(node.target)] if node.op == "call_module" else None

    def _overwrites(self, node: fx.Node) -> bool:
        """Whether a node changes its input in place, and other nodes may read that."""
        given = node.kwargs.get("inplace") or any(arg is True for arg in node.args[1:])
        if not (given or node.target in _IN_PLACE or getattr(self._layer(node), "inplace", False)):
            return False
        source = node.all_input_nodes[0]
        while len(source.users) == 1 and isinstance(self._layer(source), _VIEWS):
            (source,) = source.all_input_nodes
        return len(source.users) > 1

    def __call__(self, x: Tensor, values: Values, draws: Draws) -> Tensor:
        """The outputs (K, B, ...) of K clients for inputs (K, B, ...).

        `values` are (K, *shape) parameters and buffers by name; buffers are updated in place.
        `draws` are for dropout.
        """
        found: dict[fx.Node, Any] = {}
        for node in self._nodes:
            args = fx.node.map_arg(node.args, found.__getitem__)
            if node.op == "placeholder":
                found[node] = Stack(x)
            elif node.op == "call_module":
                layer = self._modules[str(node.target)]
                mine = _Mine(values, f"{self._prefix}{node.target}.", draws)
                found[node] = _LAYERS[type(layer)](layer, args[0], mine)
            else:
                table = _FUNCTIONS if node.op == "call_function" else _METHODS
                found[node] = table[node.target](*args, **node.kwargs)
        result: Stack = found[self._output]
        return result.unfold()


class _Mine:
    """A layer's values, by the name within the layer."""

    def __init__(self, values: Values, prefix: str, draws: Draws) -> None:
        self._values, self._prefix = values, prefix
        self.draws = draws

    def __call__(self, name: str) -> Tensor | None:
        return self._values.get(self._prefix + name)

    def flat(self, name: str) -> Tensor | None:
        """(K * C, ...) of a value (K, C, ...)."""
        value = self(name)
        return None if value is None else value.flatten(0, 1)


def _linear(layer: nn.Module, x: Stack, mine: _Mine) -> Stack:
    weight = mine("weight")
    assert weight is not None
    return Stack(linear(x.unfold(), weight, mine("bias")))


def _conv(layer: nn.Conv2d, x: Stack, mine: _Mine) -> Stack:
    """Convolutions as one product of matrices for each client.

    The bits of torch's grouped convolution depend on the number of groups.
    """
    weight, bias = mine("weight"), mine("bias")
    assert weight is not None
    images, padding = x.unfold(), _pair(layer.padding)  # (K, B, C, H, W)
    sizes = [
        (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        for size, pad, dilation, kernel, stride in zip(
            images.shape[3:], padding, layer.dilation, layer.kernel_size, layer.stride, strict=True
        )
    ]
    columns = columns_of(images, layer.kernel_size, layer.dilation, padding, layer.stride)
    out = linear_of_columns(weight.flatten(2), columns, bias)  # (K, O, B * H * W)
    return Stack(out.unflatten(2, (images.shape[1], *sizes)), folded=True)


def _one_pixel(layer: OnePixelConv2d, x: Stack, mine: _Mine) -> Stack:
    weight, images = mine("weight"), x.unfold()  # (K, B, C, H, W)
    assert weight is not None
    if images.shape[-2:] != (1, 1):
        return _conv(layer, x, mine)
    return Stack(linear(images.flatten(2), layer.centre(weight), mine("bias"))[..., None, None])


def _pair(padding: Any) -> tuple[int, int]:
    if isinstance(padding, str):
        raise Unknown(f"a convolution with padding {padding}")
    return padding[0], padding[1]


def _batch_norm(layer: _BatchNorm, x: Stack, mine: _Mine) -> Stack:
    mean, var, count = mine("running_mean"), mine("running_var"), mine("num_batches_tracked")
    trains, folded = layer.training, x.fold()
    if trains and layer.track_running_stats and (layer.momentum is None or count is None):
        raise Unknown("batch normalisation with a cumulative mean")
    if trains and count is not None:
        count.add_(1)
    if trains and folded.shape[2:].numel() == 1:
        raise ValueError("batch normalisation needs more than one value a channel in training")
    out = F.batch_norm(
        folded.flatten(0, 1).flatten(1).unsqueeze(0),
        None if mean is None else mean.view(-1) if trains else mean.flatten(),
        None if var is None else var.view(-1) if trains else var.flatten(),
        mine.flat("weight"),
        mine.flat("bias"),
        trains,
        layer.momentum or 0.0,
        layer.eps,
    )
    return Stack(out.view(folded.shape), folded=True)


def _group_norm(layer: nn.GroupNorm, x: Stack, mine: _Mine) -> Stack:
    images = x.unfold()  # (K, B, C, ...)
    clients, channels = images.shape[0], images.shape[2]
    together = images.transpose(0, 1).flatten(1, 2)  # (B, K * C, ...)
    groups = clients * layer.num_groups
    out = F.group_norm(together, groups, mine.flat("weight"), mine.flat("bias"), layer.eps)
    return Stack(out.unflatten(1, (clients, channels)).transpose(0, 1))


def _pool(layer: nn.Module, x: Stack, _: _Mine) -> Stack:
    images = layer(x.tensor.flatten(0, 1))
    return Stack(images.unflatten(0, x.tensor.shape[:2]), folded=x.folded)


def _elementwise(layer: nn.Module, x: Stack, _: _Mine) -> Stack:
    return x.map(layer)


def _inexact(layer: nn.Module, x: Stack, _: _Mine) -> Stack:
    return x.map(partial(each_in_whole_vectors, layer))


def _same(layer: nn.Module, x: Stack, _: _Mine) -> Stack:
    return x


def _drop(layer: nn.Dropout, x: Stack, mine: _Mine) -> Stack:
    return Stack(dropout(x.unfold(), layer.p, mine.draws)) if layer.training else x


def _flatten_layer(layer: nn.Flatten, x: Stack, mine: _Mine) -> Stack:
    if (layer.start_dim, layer.end_dim) != (1, -1):
        raise Unknown("it flattens a part of the dimensions")
    return Stack(x.unfold().flatten(2))


def _apply(function: Callable[..., Tensor]) -> Callable[..., Stack]:
    def applied(x: Stack, *others: Any, **options: Any) -> Stack:
        if not isinstance(x, Stack):
            raise Unknown("a number comes before an activation")
        if inexact(function):
            return x.map(lambda own: each_in_whole_vectors(partial(function, **options), own))
        return x.map(lambda *tensors: function(*tensors, **options), *others)

    return applied


_LAYERS: dict[type[nn.Module], Callable[..., Stack]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv,
    OnePixelConv2d: _one_pixel,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.MaxPool2d: _pool,
    nn.AvgPool2d: _pool,
    nn.AdaptiveAvgPool2d: _pool,
    nn.Flatten: _flatten_layer,
    nn.Dropout: _drop,
    nn.Identity: _same,
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.LeakyReLU), _elementwise),
    **dict.fromkeys((nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid), _inexact),
}
_IN_PLACE = (operator.iadd, operator.imul, operator.itruediv)
_VIEWS = (nn.Flatten, nn.Identity, nn.Dropout)  # what they give may be their input's memory
_FUNCTIONS: dict[Any, Callable[..., Stack]] = {
    function: _apply(function)
    for function in (
        operator.add,
        operator.mul,
        operator.truediv,
        torch.add,
        torch.mul,
        torch.relu,
        torch.tanh,
        torch.sigmoid,
        F.relu,
        F.gelu,
        F.silu,
        *_IN_PLACE,
    )
}
_METHODS: dict[Any, Callable[..., Stack]] = {"relu": _apply(torch.relu)}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """(K,) mean cross-entropy of (K, B, C) logits and (K, B) labels."""
    losses = cross_entropies(logits.flatten(0, 1), labels.flatten())
    return losses.view(labels.shape).mean(1)
