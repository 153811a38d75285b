"""What clients keep besides their rows, as an algorithm declares it, and how it is saved."""

from collections import UserDict, defaultdict
from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from typing_extensions import override

# The state of some clients, by name. Tensors of equal shape are saved together: the "clients" (K,)
# and their "values" (K, ...).
Saved = dict[str, list[dict[str, Tensor]]]


class Kept(UserDict[int, Tensor]):
    """A tensor for each client of this rank that has one: `self.c = fed.keep("c")` in `setup`.

    The federation manages it. It is saved in checkpoints and in the journal of an interrupted
    round, and counts towards the client's stored bytes. It is stored on the device of the rows and
    read on the compute device. When a client is reset to its initial values, it is deleted, unless
    it is `with_server`.

    Args:
        name: Its name in checkpoints.
        place: The device of the rows, where it is stored.
        device: The compute device, where it is read.
        durable: Whether it outlives the round. Other state survives a restart within the round, but
            is not counted. It outlives the round, and is in checkpoints, only for clients whose
            late updates are under way.
        with_server: Whether the server holds a sum of it over the clients. A reset then leaves it
            as it is: otherwise the server would keep the client's part for good.
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
        """Return the client's tensor on the compute device; a copy if it is stored elsewhere."""
        return self.data[client].to(self._device)

    @override
    def __setitem__(self, client: int, value: Tensor) -> None:
        """Store a copy of a tensor: a view of the client's row would train on."""
        self.data[client] = value.detach().to(self._place, copy=True)

    def bytes(self, client: int) -> int:
        """Return the bytes that the client stores; 0 for what does not outlive the round."""
        if not self.durable or client not in self.data:
            return 0
        return self.data[client].nbytes

    def open_round(self, under_way: Collection[int]) -> None:
        """Forget what does not outlive the last round.

        Args:
            under_way: Clients whose updates have not arrived, which still need it.
        """
        if self.durable:
            return
        for client in [*self.data]:
            if client not in under_way:
                del self.data[client]

    def lasting(self, under_way: Collection[int]) -> dict[int, Tensor]:
        """Return what goes into a checkpoint between two rounds, by client.

        Args:
            under_way: Clients whose updates have not arrived.
        """
        if self.durable:
            return self.data
        return {client: value for client, value in self.data.items() if client in under_way}

    def restore(self, client: int, value: Tensor | None) -> None:
        """Put a saved tensor back; None if the client had none."""
        if value is None:
            self.data.pop(client, None)
        else:
            self.data[client] = value.to(self._place, copy=True)


class KeptStates(UserDict[str, Kept]):
    """All that an algorithm's clients keep besides their rows, by name.

    Attributes:
        masks: Which of these holds the masks of the rows; None if rows are dense.
    """

    masks: Kept | None = None

    def mask(self, client: int) -> Tensor | None:
        """Return the mask of a client of this rank, on the compute device; None if it has none.

        It is packed into words, (P / 32,).
        """
        if self.masks is None:
            return None
        return self.masks.get(client)

    def bytes(self, client: int) -> int:
        """Return the bytes that a client of this rank stores."""
        return sum(kept.bytes(client) for kept in self.values())


def stacked(tensors: Iterable[tuple[int, Tensor]]) -> list[dict[str, Tensor]]:
    """Return clients' tensors as they are saved: a block for each shape and type.

    Args:
        tensors: Clients and their tensors.
    """
    groups: dict[object, list[tuple[int, Tensor]]] = defaultdict(list)
    for client, tensor in tensors:
        groups[tensor.shape, tensor.dtype].append((client, tensor))

    blocks = []
    for group in groups.values():
        clients = [client for client, _ in group]
        values = torch.stack([tensor for _, tensor in group])
        blocks.append(block(clients, values))
    return blocks


def block(clients: list[int], values: Tensor) -> dict[str, Tensor]:
    """Return what is saved of some clients' tensors (K, ...); it is in host memory."""
    if values.is_cuda:
        # Into pinned memory the copy has the speed of the bus.
        values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values)
    if values.untyped_storage().nbytes() != values.nbytes:
        # torch saves the whole storage of a view, here that of all clients.
        values = values.clone()
    return {"clients": torch.tensor(clients), "values": values}


def by_client(state: Saved) -> dict[int, dict[str, Tensor]]:
    """Return the tensors of each client by name, as views of what was saved. Clients ascend."""
    states: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, blocks in state.items():
        for block in blocks:
            for client, value in zip(block["clients"].tolist(), block["values"], strict=True):
                states[client][name] = value
    return dict(sorted(states.items()))
