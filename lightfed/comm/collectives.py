"""The few collectives a federation needs, and what they put on the wire.

World size 1, with or without a process group, is the same code path without communication.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightfed.utils.errors import UserError

T = TypeVar("T")


def leave() -> None:
    """Close the connections to other ranks, with no collective under way.

    Lightning closes NCCL's at exit, but not gloo's, whose threads may then abort the process.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """The ranks of a run, as one object that counts the bytes it moves.

    Attributes:
        wire_bytes: sent by this rank since the last `take_wire_bytes`, counting an all-reduce of b
            bytes over W ranks as 2 (W - 1) / W b (ring or recursive halving).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        up = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if up else 0
        self.world = dist.get_world_size() if up else 1
        self.wire_bytes = 0.0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up over the ranks, in place."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """Largest value over the ranks, in place."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def _all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        if self.world > 1 and tensor.numel():
            dist.all_reduce(tensor, op=op)
            payload = tensor.numel() * tensor.element_size()
            self.wire_bytes += 2 * (self.world - 1) / self.world * payload
        return tensor

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Give every rank its part, and get one from each; one's own comes back as it is.

        Args:
            parts: (n,) of one dtype, by receiving rank.
            sizes: elements that come, by sending rank; every rank knows what the others send.
        """
        if self.world == 1:
            return list(parts)
        sent = [0 if r == self.rank else len(part) for r, part in enumerate(parts)]
        coming = [0 if r == self.rank else size for r, size in enumerate(sizes)]
        outgoing = torch.cat([part for r, part in enumerate(parts) if r != self.rank])
        received = outgoing.new_empty(sum(coming))
        dist.all_to_all_single(received, outgoing, coming, sent)
        self.wire_bytes += sum(sent) * outgoing.element_size()
        found = list(received.split(coming))
        found[self.rank] = parts[self.rank]
        return found

    def gather(self, objects: list[Any]) -> list[Any]:
        """The concatenation of every rank's list, on every rank, in rank order."""
        if self.world == 1:
            return objects
        lists: list[list[Any]] = [[] for _ in range(self.world)]
        dist.all_gather_object(lists, objects)
        return [item for part in lists for item in part]

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank."""
        if self.world == 1:
            return flag
        return bool(self.max_(torch.tensor([int(flag)], device=self.device)).item())

    def broadcast(self, obj: Any) -> Any:
        """Rank 0's object, on every rank."""
        if self.world == 1:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, or its UserError, on every rank: no rank waits for one that failed."""
        made: T | None = None
        refused: UserError | None = None
        if self.rank == 0:
            try:
                made = make()
            except UserError as error:
                refused = error
        made, refused = self.broadcast((made, refused))
        if refused is not None:
            raise refused
        return cast(T, made)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def take_wire_bytes(self) -> float:
        """This rank's bytes since the last call."""
        sent, self.wire_bytes = self.wire_bytes, 0.0
        return sent
