"""Signatures of a network's layers, read from its modules: equal signatures are equal layers.

FlexiFed compares architectures layer by layer, from the input on. A layer is a module with weights
together with the norms and activations right after it. Modules without weights in between, such as
pooling and dropout, belong to the next layer. The signature has the kinds, settings and tensor
shapes of all of them. So the third convolution of CharCNN-3, which has no norm, differs from that
of CharCNN-4. The second one of VGG-11, after a pooling, differs from that of VGG-13, while their
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
from lightfed.utils.errors import require

# Torch modules that join the layer in front of them.
_JOINING = {
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "instancenorm", "normalization")
}
# Attributes that do not change what a module computes in evaluation, nor what it learns.
_NO_SETTING = {"training", "inplace"}


@dataclass(frozen=True)
class Layer:
    """A layer of a network.

    Attributes:
        path: of its module with weights.
        kind: class of that module.
        signature: two layers are alike if and only if their signatures are equal.
        tensors: names of its parameters and persistent buffers, in the order of the modules.
        shapes: of the tensors.
        parameters: number of elements of its parameters.
        text: description for display.
    """

    path: str
    kind: str
    signature: tuple[str, ...]
    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parameters: int
    text: str


def layers_of(module: nn.Module, batch: Tensor, *, key: str) -> tuple[Layer, ...]:
    """The layers of a network, from the input on.

    The batch may be zeros, on the network's device. A UserError if the order of the layers is
    ambiguous: a module is called twice or never, or has its own weights next to its parts (names
    it). Or if there are no layers.
    """
    leaves = dict(_leaves(module, "", key))
    pending: list[str] = []  # signatures of modules without weights since the last layer
    parts: list[list[nn.Module]] = []
    before: list[list[str]] = []
    joinable = False
    for part in _calls(module, batch, leaves, key):
        if joinable and _joins(part):
            parts[-1].append(part)
        elif _has_tensors(part):
            parts.append([part])
            before.append(pending)
            pending, joinable = [], True
        elif not isinstance(part, nn.Identity | nn.Sequential):  # an empty one is an identity, too
            pending.append(_signature(part))
            joinable = False
    require(bool(parts), key, "a network without layers that have weights", "use another model")
    layers = [_layer(own, leaves, first) for own, first in zip(parts, before, strict=True)]
    layers[-1] = replace(layers[-1], signature=(*layers[-1].signature, *pending))
    return tuple(layers)


def _layer(parts: list[nn.Module], paths: dict[nn.Module, str], before: list[str]) -> Layer:
    """The layer of a module with weights and the modules that join it."""
    named = [
        (f"{paths[part]}.{name}".lstrip("."), tensor)
        for part in parts
        for name, tensor in part.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    ]
    sizes = "x".join(str(size) for size in named[0][1].shape) if named else ""
    kinds = [type(part).__name__ for part in parts]
    return Layer(
        path=paths[parts[0]],
        kind=kinds[0],
        signature=(*before, *(_signature(part) for part in parts)),
        tensors=tuple(name for name, _ in named),
        shapes=tuple(tuple(tensor.shape) for _, tensor in named),
        parameters=sum(t.numel() for _, t in named if isinstance(t, nn.Parameter)),
        text=" + ".join([f"{kinds[0]} {sizes}".rstrip(), *kinds[1:]]),
    )


def _leaves(module: nn.Module, path: str, key: str) -> Iterator[tuple[nn.Module, str]]:
    """The modules that compute something when called, and their paths.

    A torch module with both weights and parts, such as attention, counts as one.
    """
    children = list(module.named_children())
    own = next((name for name, _ in module.named_parameters(recurse=False)), "")
    if not children or (own and type(module).__module__.startswith("torch.nn.modules.")):
        yield module, path
        return
    found = f"{path or type(module).__name__} has its own {own} next to its parts"
    fix = "the order of its layers is ambiguous: put it into a module that forward calls"
    require(not own, key, found, fix)
    for name, child in children:
        yield from _leaves(child, f"{path}.{name}".lstrip("."), key)


def _calls(
    module: nn.Module, batch: Tensor, leaves: dict[nn.Module, str], key: str
) -> list[nn.Module]:
    """The leaves in the order in which a forward pass calls them, those with weights once each."""
    calls: list[nn.Module] = []
    handles = [leaf.register_forward_pre_hook(lambda m, _: calls.append(m)) for leaf in leaves]
    try:
        with evaluating(module), torch.no_grad(), torch.random.fork_rng(devices=[]):
            module(batch)
    finally:
        for handle in handles:
            handle.remove()
    for leaf, path in leaves.items():
        times = calls.count(leaf)
        how = f"called {times} times" if times else "never called"
        found = f"{path or type(leaf).__name__} is {how} in a forward pass"
        fix = "the order of its layers is ambiguous: call every module with weights once"
        require(times == 1 or not _has_tensors(leaf), key, found, fix)
    return calls


def _joins(part: nn.Module) -> bool:
    """Whether a module joins the layer right in front of it."""
    return type(part).__module__ in _JOINING and not isinstance(part, nn.MultiheadAttention)


def _has_tensors(part: nn.Module) -> bool:
    return any(True for _ in part.parameters()) or any(True for _ in part.buffers())


def _signature(module: nn.Module) -> str:
    """Kind, settings and tensors (names, shapes, types) of a module with all its parts."""
    parts = [
        f"{path} {type(part).__module__}.{type(part).__qualname__}{_settings(part)}".lstrip()
        for path, part in module.named_modules()
    ]
    tensors = [
        f"{name} {list(tensor.shape)} {tensor.dtype}"
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    ]
    return "; ".join([*parts, *tensors])


def _settings(part: nn.Module) -> dict[str, Any]:
    """The public attributes that are numbers, strings or tuples: arguments of constructors."""
    return {
        name: value
        for name, value in sorted(vars(part).items())
        if not name.startswith("_") and name not in _NO_SETTING and _plain(value)
    }


def _plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
