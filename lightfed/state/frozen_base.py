"""The base: frozen parameters, which a rank holds once for all clients and groups that have them.

A row holds what sessions train. All other parameters are the base. They are never sent, merged or
saved with a client. A checkpoint has only their digests, unless a method changes them.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence

import torch
from lightfed_kernels import Layout
from torch import Tensor

from lightfed.state.rows import LiveModule, ModelLayout, Row
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import UserError
from lightfed.utils.tensor_parts import bytes_of, held_bytes, is_wrapped, kind, parts


def digest(tensor: Tensor) -> str:
    """Return 16 hexadecimal digits that stand for a tensor's shape, type and bytes.

    Those of a quantized tensor stand for its class, and for all tensors within it.
    """
    state = hashlib.blake2b(digest_size=8)
    if is_wrapped(tensor):
        state.update(f"{type(tensor).__name__} ".encode())

    for name, part in parts(tensor.detach()).items():
        state.update(f"{name}{tuple(part.shape)} {part.dtype}".encode())
        state.update(bytes_of(part))
    return state.hexdigest()


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digests of several tensors, by name."""
    return {name: digest(tensor) for name, tensor in tensors.items()}


def check_changeable(name: str, tensor: Tensor, method: str) -> None:
    """Refuse a frozen tensor that is no plain float32, for a method that adds to it.

    A number of bfloat16 has 8 bits: the sums of a round would vanish in it.

    Args:
        name: The name of the tensor.
        tensor: The tensor.
        method: The name of the method, for the error.

    Raises:
        UserError: It says what the tensor holds.
    """
    if tensor.dtype == torch.float32 and not is_wrapped(tensor):
        return
    raise UserError(
        key="model.clients",
        found=f"{name} is {kind(tensor)}, and {method} adds float32 steps to it",
        fix="give the base dtype: float32 without quantization, or choose a method that leaves "
        "it as it is, such as RankMean",
    )


class FrozenBase:
    """The frozen parameters of a rank's groups. Equal tensors of several groups are held once.

    Attributes:
        digests: For each group, the digests of its frozen parameters by name, as they were built.
    """

    def __init__(self) -> None:
        self.digests: list[dict[str, str]] = []
        self._modules: list[LiveModule] = []
        self._held: dict[tuple[str, str], Tensor] = {}  # by name and digest

    def add_group(self, live: LiveModule) -> None:
        """Add the module of the next group, and give it the tensors that an earlier group has."""
        self.digests.append(digests(live.frozen))
        self.share(live, len(self.digests) - 1)

    def share(self, live: LiveModule, group: int) -> None:
        """Give another module of a group, such as one for its tests, the group's tensors."""
        self._modules.append(live)
        for name, parameter in list(live.frozen.items()):
            key = (name, self.digests[group][name])
            if is_wrapped(parameter):
                # The tensors within do not follow when `data` is assigned.
                live.replace_frozen(name, self._held.setdefault(key, parameter))
            else:
                parameter.data = self._held.setdefault(key, parameter.data)

    @property
    def bytes(self) -> int:
        """The bytes of all tensors that are held, each counted once."""
        return sum(held_bytes(tensor) for tensor in self._held.values())

    @property
    def shared(self) -> list[str]:
        """The names of the tensors that are the same in all groups."""
        first, *others = self.digests
        return [
            name for name, text in first.items() if all(other.get(name) == text for other in others)
        ]

    def unlike(self, names: Sequence[str], *, sliced: bool = False) -> str:
        """Return what differs between the bases of two groups, in words; empty if nothing does.

        Args:
            names: The names of the groups.
            sliced: Whether tensors may differ if their shapes do, as in models of other widths.
        """
        for group in range(1, len(self.digests)):
            differing = self._first_difference(group, sliced=sliced)
            if differing is not None:
                return f"groups {names[0]} and {names[group]} have different values of {differing}"
        return ""

    def _first_difference(self, group: int, *, sliced: bool) -> str | None:
        """Return the name of a tensor that differs between the first group and another one."""
        first_digests = self.digests[0]
        group_digests = self.digests[group]
        first_tensors = self._modules[0].frozen
        group_tensors = self._modules[group].frozen

        for name, text in first_digests.items():
            if group_digests.get(name) == text:
                continue
            if sliced:
                group_shape = group_tensors[name].shape if name in group_tensors else None
                if first_tensors[name].shape != group_shape:
                    continue
            return name

        for name in group_digests:
            if name not in first_digests:
                return name
        return None

    def server_model(
        self, names: Sequence[str], tensors: Collection[str] | None = None
    ) -> ServerModel:
        """Return the base as a server model: a change of its row changes all clients' models.

        Args:
            names: The names of the groups.
            tensors: The names of the tensors that the method changes; None for all.

        Raises:
            UserError: If there is no base, if it differs between the groups, or if it is not
                float32.
        """
        unlike = self.unlike(names)
        if unlike:
            raise UserError(
                key="model.clients",
                found=f"{unlike}, which the method changes",
                fix="freeze the same tensors of the same values in all groups",
            )

        frozen = self._modules[0].frozen
        if tensors is not None:
            frozen = {name: tensor for name, tensor in frozen.items() if name in tensors}
        if not frozen:
            raise UserError(
                key="model.clients",
                found="no frozen parameters, which the method changes",
                fix="freeze the base",
            )
        for name, tensor in frozen.items():
            check_changeable(name, tensor, "the method")

        layout = ModelLayout(
            floats=Layout.build((name, tuple(tensor.shape)) for name, tensor in frozen.items()),
            integers=Layout.build([]),
            parameters=len(frozen),
        )
        device = next(iter(frozen.values())).device
        row = Row.zeros(layout, device)

        # From here on the tensors of all modules are views of the server's row.
        for name, view in layout.floats.views(row.floats).items():
            view.copy_(frozen[name].detach())
            for live in self._modules:
                live.frozen[name].data = view
            self._held[name, self.digests[0][name]] = view

        return ServerModel(layout, row)
