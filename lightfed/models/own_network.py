"""The network as a user wrote it, whatever a method has put around it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightfed.models.client_module import NetworkClient


@dataclass(frozen=True)
class OwnNetwork:
    """Where the tensors of a user's network are in the client's module.

    Attributes:
        class_path: The class of the network, as a dotted path.
        names: The name of each tensor in the network, by its name in the client's module.
        expected: The names that `load_state_dict` of the network takes.
        shapes: The shapes of these tensors, by name.
    """

    class_path: str
    names: Mapping[str, str]
    expected: frozenset[str]
    shapes: Mapping[str, torch.Size]

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether tensors, by the network's own names, have the network's shapes."""
        return all(self.shapes.get(name) == tensor.shape for name, tensor in tensors.items())

    def rename(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of the client's tensors that belong to the network, by its own names."""
        renamed = {}
        for name, tensor in tensors.items():
            own_name = self.name_of(name)
            if own_name is not None:
                renamed[own_name] = tensor
        return renamed

    def name_of(self, name: str) -> str | None:
        """Return the network's name of a tensor of the client's module; None if it has none.

        A tensor that the method has replaced, such as a statistic, is where it was before.
        """
        if name in self.names:
            return self.names[name]

        not_found_yet = self.expected - set(self.names.values())
        for candidate in (name, plain(name)):
            if candidate in not_found_yet:
                return candidate
        return None


def own_network(module: nn.Module) -> nn.Module:
    """Return the user's network in a client's module."""
    network: Any = module.net if isinstance(module, NetworkClient) else module
    return network


def plain(name: str) -> str:
    """Return a tensor's name without what a `NetworkClient` puts before it."""
    return name.removeprefix("net.")


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return all tensors that a state dict of the module has, themselves and not copies."""
    return dict(module.state_dict(keep_vars=True))


def tested_tensors(module: nn.Module, own: OwnNetwork) -> dict[str, Tensor]:
    """Return the tensors of a client's module as its layers read them.

    A method may compute a tensor of the user's network from others, with `parametrize` of torch.
    The result then stands for the tensor, and what it is computed from is left out. What the
    network computes by itself, as with `weight_norm`, is left as it is.

    Args:
        module: The client's module.
        own: Where the tensors of the user's network are in the module.
    """
    tensors = tensors_of(module)
    for prefix, value in computed_tensors(module).items():
        own_name = own.names.get(f"{prefix}original", "original")
        if own_name.endswith("original"):
            continue
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]
        tensors[f"{prefix}original"] = value
    return tensors


def computed_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that `parametrize` computes, by the prefix of what they are made of.

    For the weight of `layer` the prefix is "layer.parametrizations.weight.".
    """
    computed = {}
    for path, layer in module.named_modules():
        if is_parametrized(layer):
            parametrizations: Any = layer.parametrizations
            for name in parametrizations:
                prefix = f"{path}.parametrizations.{name}.".lstrip(".")
                computed[prefix] = getattr(layer, name)
    return computed


class OwnNames:
    """Remembers a user's network before a method changes the client's module.

    Tensors are recognized by their identity, because a method may move them: to a network of an
    extractor and a head, for example.

    Args:
        module: The client's module, as it was built.
    """

    def __init__(self, module: nn.Module) -> None:
        network = own_network(module)
        self._class_path = f"{type(network).__module__}.{type(network).__qualname__}"
        self._tensors = tensors_of(network)

    def found_in(self, module: nn.Module) -> OwnNetwork:
        """Return where the tensors are in the module as the method has changed it."""
        # A tied tensor has several names. They are paired in the order of the modules.
        own_names: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            own_names.setdefault(id(tensor), []).append(name)

        names = {}
        for name, tensor in tensors_of(module).items():
            left = own_names.get(id(tensor))
            if left:
                names[name] = left.pop(0)
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        return OwnNetwork(self._class_path, names, frozenset(self._tensors), shapes)
