"""The base: frozen parameters, held once on a rank for all clients and groups that have them.

A row holds what sessions train. All other parameters are the base. They are never sent, merged or
saved with a client. A checkpoint has their digests only, unless a method changes them.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence

import torch
from lightfed_kernels import Layout
from torch import Tensor

from lightfed.state.rows import LiveModule, ModelLayout, Row
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import require


def digest(tensor: Tensor) -> str:
    """16 hexadecimal digits of a tensor's shape, type and bytes."""
    state = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=8)
    values = tensor.detach().cpu().contiguous()
    state.update(values.flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Those of several tensors, by name."""
    return {name: digest(tensor) for name, tensor in tensors.items()}


class FrozenBase:
    """The frozen parameters of a rank's groups.

    Attributes:
        digests: of each group's tensors by name, as they were built.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Tensor] = {}  # by name and digest
        self._modules: list[LiveModule] = []
        self.digests: list[dict[str, str]] = []

    def add_group(self, live: LiveModule) -> None:
        """Give the next group's module the tensors that an earlier one has already."""
        self.digests.append(digests(live.frozen))
        self.share(live, len(self.digests) - 1)

    def share(self, live: LiveModule, group: int) -> None:
        """Give a module of a group, such as one for its tests, the group's tensors."""
        self._modules.append(live)
        for name, parameter in live.frozen.items():
            key = name, self.digests[group][name]
            parameter.data = self._held.setdefault(key, parameter.data)

    @property
    def bytes(self) -> int:
        """Of the tensors, each counted once."""
        return sum(tensor.nbytes for tensor in self._held.values())

    @property
    def shared(self) -> list[str]:
        """Names of the tensors that are the same in all groups."""
        every = self.digests[1:]
        return [
            n for n, text in self.digests[0].items() if all(own.get(n) == text for own in every)
        ]

    def unlike(self, names: Sequence[str], *, sliced: bool = False) -> str:
        """What differs in the bases of two groups, which are called `names`; empty if nothing.

        With `sliced` tensors may differ if their shapes do, as in models of other widths.
        """
        first = self._modules[0].frozen
        for group, own in enumerate(self.digests[1:], 1):
            shapes = {name: p.shape for name, p in self._modules[group].frozen.items()}
            differ = [
                name
                for name, text in self.digests[0].items()
                if own.get(name) != text and not (sliced and first[name].shape != shapes.get(name))
            ]
            differ += [name for name in own if name not in self.digests[0]]
            if differ:
                return f"groups {names[0]} and {names[group]} have other values of {differ[0]}"
        return ""

    def server_model(
        self, names: Sequence[str], tensors: Collection[str] | None = None
    ) -> ServerModel:
        """The base as a state of the server: a change of its row changes all clients' models.

        A UserError if there is none, or it differs between the groups, which are called `names`.
        `tensors` are those to change, by default all.
        """
        unlike, fix = self.unlike(names), "freeze the same tensors of the same values in all groups"
        require(not unlike, "model.clients", f"{unlike}, which the method changes", fix)
        every = self._modules[0].frozen
        frozen = {n: p for n, p in every.items() if tensors is None or n in tensors}
        found, fix = "no frozen parameters, which the method changes", "freeze the base"
        require(bool(frozen), "model.clients", found, fix)
        for name, p in frozen.items():
            kind = str(p.dtype).removeprefix("torch.")
            fix = "load the base in float32, or choose a method that leaves it as it is"
            found = f"{name} is {kind}, and the method changes it by float32 steps"
            require(p.dtype == torch.float32, "model.clients", found, fix)
        layout = Layout.build((name, tuple(p.shape)) for name, p in frozen.items())
        whole = ModelLayout(layout, Layout.build([]), parameters=len(frozen))
        row = Row.zeros(whole, next(iter(frozen.values())).device)
        for name, place in layout.views(row.floats).items():
            place.copy_(frozen[name].detach())
            for live in self._modules:
                live.frozen[name].data = place
        self._held |= {(name, self.digests[0][name]): p.data for name, p in frozen.items()}
        return ServerModel(whole, row)
