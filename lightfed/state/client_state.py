"""What clients keep besides their rows, as an algorithm declares it."""

from collections.abc import Iterator, MutableMapping

import torch
from torch import Tensor
from typing_extensions import override


class Kept(MutableMapping[int, Tensor]):
    """A tensor for each client of this rank that has one: `self.c = fed.keep("c")` in `setup`.

    The federation takes care of it. It is in the checkpoint, and in the journal of a round that is
    interrupted; it counts in the client's stored bytes; it lies where rows lie, and is read on the
    device; it is gone when a client starts again from its initial values.

    Args:
        name: in checkpoints.
        place: device of the rows.
        device: on which it is read.
        durable: it outlives the round. What does not is still there after a restart within the
            round, and is neither stored nor counted.
    """

    def __init__(
        self, name: str, *, place: torch.device, device: torch.device, durable: bool = True
    ) -> None:
        self.name = name
        self.durable = durable
        self._place = place
        self._device = device
        self._values: dict[int, Tensor] = {}

    @override
    def __getitem__(self, client: int) -> Tensor:
        """The client's tensor, on the device; of one that is kept on the host a copy."""
        return self._values[client].to(self._device)

    @override
    def __setitem__(self, client: int, value: Tensor) -> None:
        """Keep a tensor, which is not to change afterwards."""
        self._values[client] = value.detach().to(self._place)

    @override
    def __delitem__(self, client: int) -> None:
        del self._values[client]

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    @override
    def __len__(self) -> int:
        return len(self._values)

    @override
    def __contains__(self, client: object) -> bool:
        return client in self._values

    def bytes(self, client: int) -> int:
        """That the client stores."""
        value = self._values.get(client)
        return 0 if value is None or not self.durable else value.nbytes

    def saved(self, client: int) -> Tensor | None:
        """The client's tensor where it lies; None if it has none."""
        return self._values.get(client)

    def restore(self, client: int, value: Tensor | None) -> None:
        """Put back what was saved."""
        if value is None:
            self._values.pop(client, None)
        else:
            self._values[client] = value.to(self._place, copy=True)
