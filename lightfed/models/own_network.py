"""The network as a user wrote it, whatever a method has put around it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightfed.models.client_module import NetworkClient

_COMPILED = "_orig_mod."  # in the names of a compiled network


@dataclass(frozen=True)
class OwnNetwork:
    """Where the tensors of a user's network are in the client's module.

    Attributes:
        class_path: of the network.
        names: the name of each tensor in the client's module -> its name in the network.
        expected: the names that `load_state_dict` of the network takes.
    """

    class_path: str
    names: Mapping[str, str]
    expected: frozenset[str]

    def rename(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of the client's tensors that belong to the network, by its own names."""
        own = {self.name_of(name): tensor for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in own.items() if name is not None}

    def name_of(self, name: str) -> str | None:
        """The network's name of a tensor of the client's module; None if it is not the network's.

        A tensor that the method has replaced, such as a statistic, is where it was before.
        """
        if name in self.names:
            return self.names[name]
        left = self.expected - set(self.names.values())
        return next((own for own in (name, plain(name)) if own in left), None)


def own_network(module: nn.Module) -> nn.Module:
    """The user's network in a client's module, without torch.compile's wrapper."""
    network: Any = module.net if isinstance(module, NetworkClient) else module
    return getattr(network, "_orig_mod", network)


def plain(name: str) -> str:
    """A tensor's name without what torch.compile and a `NetworkClient` put before it."""
    return name.replace(_COMPILED, "").removeprefix("net.")


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """All tensors that a state dict of the module has, themselves and not copies."""
    return dict(module.state_dict(keep_vars=True))


class OwnNames:
    """Remembers a user's network before a method changes the client's module.

    Tensors are recognised by themselves, because a method may move them: to a network of an
    extractor and a head, for example.
    """

    def __init__(self, module: nn.Module) -> None:
        network = own_network(module)
        self._kind = f"{type(network).__module__}.{type(network).__qualname__}"
        self._tensors = tensors_of(network)

    def found_in(self, module: nn.Module) -> OwnNetwork:
        """Where the tensors are now."""
        # A tied tensor has several names; they are paired in the order of the modules.
        left: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            left.setdefault(id(tensor), []).append(name)

        names = {}
        for name, tensor in tensors_of(module).items():
            if left.get(id(tensor)):
                names[name] = left[id(tensor)].pop(0)
        return OwnNetwork(self._kind, names, frozenset(self._tensors))
