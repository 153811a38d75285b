"""Per-client state that an algorithm declares in addition to rows."""

from collections.abc import Iterator, MutableMapping

import torch
from torch import Tensor
from typing_extensions import override


class Kept(MutableMapping[int, Tensor]):
    """A tensor for each client of this rank that has one: `self.c = fed.keep("c")` in `setup`.

    The federation manages it. It is saved in checkpoints and in the journal of an interrupted
    round, and counts towards the client's stored bytes. It is stored on the device of the rows and
    read on the compute device. Resetting a client to its initial values deletes it.

    Args:
        name: in checkpoints.
        place: device of the rows.
        device: on which it is read.
        durable: it outlives the round. Other state survives a restart within the round, but is
            neither checkpointed nor counted.
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
        """The client's tensor on the device; a copy if it is kept on the host."""
        return self._values[client].to(self._device)

    @override
    def __setitem__(self, client: int, value: Tensor) -> None:
        """Keep a tensor; do not change it afterwards."""
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
        """Bytes that the client stores."""
        value = self._values.get(client)
        return 0 if value is None or not self.durable else value.nbytes

    def saved(self, client: int) -> Tensor | None:
        """The client's tensor on the device of the rows; None if it has none."""
        return self._values.get(client)

    def restore(self, client: int, value: Tensor | None) -> None:
        """Restore a saved tensor."""
        if value is None:
            self._values.pop(client, None)
        else:
            self._values[client] = value.to(self._place, copy=True)
