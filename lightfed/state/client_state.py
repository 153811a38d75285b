"""Per-client state that an algorithm declares in addition to rows; the saved form of all of it."""

from collections import UserDict, defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from typing_extensions import override

# State of some clients, by name: matrices (K, ...) as "values", with the numbers (K,) of their
# "clients".
Saved = dict[str, list[dict[str, Tensor]]]


class Kept(UserDict[int, Tensor]):
    """A tensor for each client of this rank that has one: `self.c = fed.keep("c")` in `setup`.

    The federation manages it. It is saved in checkpoints and in the journal of an interrupted
    round, and counts towards the client's stored bytes. It is stored on the device of the rows and
    read on the compute device. Resetting a client to its initial values deletes it, unless it is
    `with_server`.

    Args:
        name: in checkpoints.
        place: device of the rows.
        device: on which it is read.
        durable: it outlives the round. Other state survives a restart within the round, but is
            neither checkpointed nor counted.
        with_server: the server holds a sum of it over the clients. A reset leaves it as it is:
            otherwise the server would keep the client's part for good.
    """

    def __init__(
        self,
        name: str,
        *,
        place: torch.device,
        device: torch.device,
        durable: bool = True,
        with_server: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.durable = durable
        self.with_server = with_server
        self._place = place
        self._device = device

    @override
    def __getitem__(self, client: int) -> Tensor:
        """The client's tensor on the device; a copy if it is kept on the host."""
        return self.data[client].to(self._device)

    @override
    def __setitem__(self, client: int, value: Tensor) -> None:
        """Keep a copy of a tensor: a view of the client's row would train on."""
        self.data[client] = value.detach().to(self._place, copy=True)

    def bytes(self, client: int) -> int:
        """Bytes that the client stores."""
        value = self.data.get(client)
        return 0 if value is None or not self.durable else value.nbytes

    def restore(self, client: int, value: Tensor | None) -> None:
        """Restore a saved tensor."""
        if value is None:
            self.data.pop(client, None)
        else:
            self.data[client] = value.to(self._place, copy=True)


class KeptStates(UserDict[str, Kept]):
    """All that an algorithm's clients keep besides their rows, by name.

    Attributes:
        masks: of the rows, one of these; None if rows are dense.
    """

    masks: Kept | None = None

    def mask(self, client: int) -> Tensor | None:
        """(P / 32,) packed, on the device: the mask of a client of this rank; None for none."""
        return self.masks.get(client) if self.masks is not None else None

    def bytes(self, client: int) -> int:
        """Bytes that a client of this rank stores."""
        return sum(kept.bytes(client) for kept in self.values())


def stacked(tensors: Iterable[tuple[int, Tensor]]) -> list[dict[str, Tensor]]:
    """A matrix of the tensors of each shape."""
    alike: dict[object, list[tuple[int, Tensor]]] = defaultdict(list)
    for client, tensor in tensors:
        alike[tensor.shape, tensor.dtype].append((client, tensor))
    return [
        block([k for k, _ in those], torch.stack([tensor for _, tensor in those]))
        for those in alike.values()
    ]


def block(clients: list[int], values: Tensor) -> dict[str, Tensor]:
    """The entry of some clients' tensors (K, ...), in host memory, in what is saved."""
    if values.is_cuda:  # into pinned memory at the speed of the bus
        values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values)
    if values.untyped_storage().nbytes() != values.nbytes:  # else all of the store would be saved
        values = values.clone()
    return {"clients": torch.tensor(clients), "values": values}


def by_client(state: Saved) -> dict[int, dict[str, Tensor]]:
    """The tensors of each client, by name, as views; clients ascend."""
    found: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, blocks in state.items():
        for block in blocks:
            for client, value in zip(block["clients"].tolist(), block["values"], strict=True):
                found[client][name] = value
    return dict(sorted(found.items()))
