"""Signatures of a network's layers, read from its modules: equal signatures are equal layers.

FlexiFed compares architectures layer by layer, from the input on. A layer is a module with weights
together with the norms and activations right behind it. Modules without weights in between, such as
pooling and dropout, belong to the next layer. The signature has the kinds, settings and tensor
shapes of all of them. So the third convolution of CharCNN-3, which has no norm, differs from that
of CharCNN-4. The second one of VGG-11, behind a pooling, differs from that of VGG-13, while their
first ones are equal.

Layers are in the order in which a forward pass calls them. If a network registers its modules in
that order, as it should, this is the order of its state, in which the released code compares names.
Operations between modules (functions, additions, nesting) are not considered.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightfed.models.split import evaluating
from lightfed.utils.errors import UserError

# Torch modules that join the layer in front of them are in these Python modules.
_JOINING = {
    "torch.nn.modules.activation",
    "torch.nn.modules.batchnorm",
    "torch.nn.modules.instancenorm",
    "torch.nn.modules.normalization",
}
# Attributes that change neither what a module computes in evaluation nor what it learns.
_NO_SETTING = {"training", "inplace"}


@dataclass(frozen=True)
class Layer:
    """A layer of a network.

    Attributes:
        path: Path of its module with weights, within the network.
        kind: Class of that module.
        signature: Two layers are alike if and only if their signatures are equal.
        tensors: Names of its parameters and persistent buffers, in the order of the modules.
        shapes: Shapes of the tensors.
        parameters: Number of elements of its parameters.
        text: A description to display, such as "Conv2d 3x3x3x3 + BatchNorm2d + ReLU".
    """

    path: str
    kind: str
    signature: tuple[str, ...]
    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parameters: int
    text: str


def layers_of(module: nn.Module, batch: Tensor, *, key: str) -> tuple[Layer, ...]:
    """Return the layers of a network, from the input on.

    Args:
        module: The network.
        batch: A batch of samples, which may be zeros, on the network's device.
        key: The configuration key of the network, for errors.

    Raises:
        UserError: The order of the layers is ambiguous, because a module is called twice or never,
            or has its own weights next to its parts. Or there are no layers.
    """
    paths = dict(_leaves(module, "", key))

    # Of each layer: the module with weights and those that join it, and the signatures of what is
    # between it and the layer before.
    modules_of_layers: list[list[nn.Module]] = []
    before_layers: list[list[str]] = []
    pending: list[str] = []  # signatures of modules without weights since the last layer
    may_join = False  # whether the last module belongs to a layer, so that a norm joins it
    for leaf in _calls(module, batch, paths, key):
        if may_join and _joins(leaf):
            modules_of_layers[-1].append(leaf)
        elif _has_tensors(leaf):
            modules_of_layers.append([leaf])
            before_layers.append(pending)
            pending = []
            may_join = True
        elif not isinstance(leaf, nn.Identity | nn.Sequential):  # an empty one is an identity, too
            pending.append(_signature(leaf))
            may_join = False

    if not modules_of_layers:
        raise UserError(key, "a network without layers that have weights", "use another model")

    layers = []
    for modules, before in zip(modules_of_layers, before_layers, strict=True):
        layers.append(_layer(modules, paths, before))
    # What follows the last layer has no next layer to belong to.
    last = layers[-1]
    layers[-1] = replace(last, signature=(*last.signature, *pending))
    return tuple(layers)


def _layer(modules: list[nn.Module], paths: dict[nn.Module, str], before: list[str]) -> Layer:
    """Return the layer of a module with weights and the modules that join it.

    Args:
        modules: The module with weights, then those that join it.
        paths: The path of each module.
        before: Signatures of the modules between this layer and the one before.
    """
    tensors: dict[str, Tensor] = {}
    for module in modules:
        for name, tensor in module.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor):  # a module may save something else
                tensors[f"{paths[module]}.{name}".lstrip(".")] = tensor

    kinds = [type(module).__name__ for module in modules]
    text = kinds[0]
    if tensors:
        first_shape = next(iter(tensors.values())).shape
        sizes = "x".join(str(size) for size in first_shape)
        text = f"{text} {sizes}".rstrip()

    parameters = [tensor for tensor in tensors.values() if isinstance(tensor, nn.Parameter)]
    return Layer(
        path=paths[modules[0]],
        kind=kinds[0],
        signature=(*before, *(_signature(module) for module in modules)),
        tensors=tuple(tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
        parameters=sum(parameter.numel() for parameter in parameters),
        text=" + ".join([text, *kinds[1:]]),
    )


def _leaves(module: nn.Module, path: str, key: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that compute something when they are called, and their paths.

    A torch module with both weights and parts, such as attention, counts as one.

    Raises:
        UserError: Another module has both.
    """
    children = list(module.named_children())
    own_parameters = [name for name, _ in module.named_parameters(recurse=False)]
    is_torchs = type(module).__module__.startswith("torch.nn.modules.")
    if not children or (own_parameters and is_torchs):
        yield module, path
        return

    if own_parameters:
        name = path or type(module).__name__
        raise UserError(
            key=key,
            found=f"{name} has its own {own_parameters[0]} next to its parts",
            fix="the order of its layers is ambiguous: put it into a module that forward calls",
        )
    for name, child in children:
        yield from _leaves(child, f"{path}.{name}".lstrip("."), key)


def _calls(
    module: nn.Module, batch: Tensor, paths: dict[nn.Module, str], key: str
) -> list[nn.Module]:
    """Return the leaves of a network in the order in which a forward pass calls them.

    Args:
        module: The network.
        batch: A batch of samples.
        paths: The leaves, with their paths.
        key: The configuration key of the network, for errors.

    Raises:
        UserError: A leaf with weights is not called exactly once.
    """
    calls: list[nn.Module] = []
    handles = [leaf.register_forward_pre_hook(lambda m, _: calls.append(m)) for leaf in paths]
    try:
        # Neither statistics nor torch's random numbers may change by reading a network.
        with evaluating(module), torch.no_grad(), torch.random.fork_rng(devices=[]):
            module(batch)
    finally:
        for handle in handles:
            handle.remove()

    for leaf, path in paths.items():
        times = calls.count(leaf)
        if times == 1 or not _has_tensors(leaf):
            continue
        name = path or type(leaf).__name__
        how = f"called {times} times" if times else "never called"
        raise UserError(
            key=key,
            found=f"{name} is {how} in a forward pass",
            fix="the order of its layers is ambiguous: call every module with weights once",
        )
    return calls


def _joins(module: nn.Module) -> bool:
    """Return whether a module joins the layer right in front of it."""
    # Attention is in torch's file of activations.
    return type(module).__module__ in _JOINING and not isinstance(module, nn.MultiheadAttention)


def _has_tensors(module: nn.Module) -> bool:
    has_parameter = any(True for _ in module.parameters())
    has_buffer = any(True for _ in module.buffers())
    return has_parameter or has_buffer


def _signature(module: nn.Module) -> str:
    """Return the kinds and settings of a module and its parts, and their tensors, as text."""
    lines = []
    for path, part in module.named_modules():
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        lines.append(f"{path} {kind}{_settings(part)}".lstrip())
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        lines.append(f"{name} {list(tensor.shape)} {tensor.dtype}")
    return "; ".join(lines)


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the public attributes that are plain values: the arguments of constructors."""
    settings = {}
    for name, value in sorted(vars(module).items()):
        if not name.startswith("_") and name not in _NO_SETTING and _is_plain(value):
            settings[name] = value
    return settings


def _is_plain(value: object) -> bool:
    """Return whether a value is a number, a string or None, or a list or tuple of such values."""
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
