"""The few collectives a federation needs, and the bytes they send.

World size 1, with or without a process group, is the same code path without communication.

Rows go over the process group. Flags and objects always go over gloo, also with NCCL, so that they
need not wait for the GPU's stream.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightfed.distributed import watch
from lightfed.utils.errors import UserError
from lightfed.utils.stopwatch import Timings

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)  # torch's own

_PACKAGE = 1 << 13  # bytes of a rank's objects that one collective gathers: a hundred sessions
_LENGTH = 8  # bytes in front of them, which say how many they are

# gloo, by purpose: next to an NCCL group, or for a thread; made once per process group
_groups: dict[str, dist.ProcessGroup] = {}


def leave() -> None:
    """Close the connections to other ranks; no collective may be running.

    Lightning closes NCCL's at exit but not gloo's. gloo's threads may then abort the process.
    """
    watch.leave()
    _groups.clear()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """The ranks of a run, as one object that counts the bytes it moves.

    If ranks are watched, a collective that fails or times out ends the process with a line that
    says why. Otherwise it raises torch's RuntimeError.

    Args:
        device: of this rank.
        timeout: of the process group.

    Attributes:
        wire_bytes: sent by this rank since the last `take_wire_bytes`, counting an all-reduce of b
            bytes over W ranks as 2 (W - 1) / W b (ring or recursive halving), and an all-gather as
            W - 1 times what the rank gives.
        timings: parts of this rank's round. Flags, objects and barriers count as waiting. Rows
            count for the part that sends them.
        messages: sent and heard with every gather, so that they take no collective of their own;
            None, or has `outgoing()`, what to send, and `receive(said)`, what all have sent.
    """

    messages: Any = None

    def __init__(self, device: torch.device, *, timeout: timedelta = TIMEOUT) -> None:
        self.device, self.timeout = device, timeout
        up = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if up else 0
        self.world = dist.get_world_size() if up else 1
        self.wire_bytes = 0.0
        self.timings = Timings()
        nccl = self.world > 1 and dist.get_backend() == "nccl"
        self.side = _group("side", timeout) if nccl else None
        # gloo can only use host memory: rows go through pinned copies.
        self.staged = device.type == "cuda" and not nccl

    @property
    def alone(self) -> bool:
        """Whether this rank has all clients."""
        return self.world == 1

    @contextmanager
    def collective(self, what: str, *, waits: bool = True) -> Iterator[None]:
        """Run a collective; a watched run ends with a line that says `what` has failed.

        Unless `waits`, its time does not count as waiting for others.
        """
        try:
            with self.timings.part("waiting") if waits else nullcontext():
                yield
        except RuntimeError as error:
            watch.lost(what, error)
            raise

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up over the ranks, in place."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """Largest value over the ranks, in place."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def _all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        if self.world > 1 and tensor.numel():
            sent = self._sendable(tensor)
            with self.collective("an all-reduce", waits=False):
                dist.all_reduce(sent, op=op, group=self._group(sent))
            if sent is not tensor:
                tensor.copy_(sent, non_blocking=sent.is_pinned())
            payload = tensor.numel() * tensor.element_size()
            self.wire_bytes += 2 * (self.world - 1) / self.world * payload
        return tensor

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send every rank its part and receive one from each; this rank's own is not copied.

        `parts` are (n,) of one dtype, by receiving rank; `sizes` are numbers of elements by sending
        rank.
        """
        if self.world == 1:
            return list(parts)
        own = parts[self.rank]
        sent = [0 if r == self.rank else len(part) for r, part in enumerate(parts)]
        coming = [0 if r == self.rank else size for r, size in enumerate(sizes)]
        outgoing = self._sendable(
            torch.cat([part for r, part in enumerate(parts) if r != self.rank])
        )
        received = self._like(outgoing, sum(coming))
        with self.collective("an exchange of rows", waits=False):
            dist.all_to_all_single(received, outgoing, coming, sent, group=self._group(outgoing))
        self.wire_bytes += sum(sent) * outgoing.element_size()
        found = list(received.to(own.device, non_blocking=received.is_pinned()).split(coming))
        found[self.rank] = own
        return found

    def _sendable(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or a copy in pinned memory if the process group cannot take it."""
        if not self.staged:
            return tensor
        on_host = self._like(torch.empty(0, dtype=tensor.dtype), tensor.shape)
        return on_host.copy_(tensor)

    def _like(self, sent: Tensor, size: int | torch.Size) -> Tensor:
        """An empty tensor where `sent` is; pinned in host memory, to and from which GPUs copy."""
        shape = (size,) if isinstance(size, int) else size
        pinned = self.device.type == "cuda" and sent.device.type == "cpu"
        return torch.empty(shape, dtype=sent.dtype, device=sent.device, pin_memory=pinned)

    def _group(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self.side if tensor.device.type == "cpu" else None

    def gather(self, objects: list[Any], what: str = "a gather") -> list[Any]:
        """The concatenation of every rank's list, on every rank, in rank order.

        It is one collective, or two if a rank's objects take more than `_PACKAGE` bytes. `what` is
        named where a rank does not come.
        """
        note = None if self.messages is None else self.messages.outgoing()
        lists, said = zip(*self._all((objects, note), what), strict=True)
        if self.messages is not None:
            self.messages.receive([*said])
        return [item for part in lists for item in part]

    def _all(self, obj: T, what: str) -> list[T]:
        """Every rank's object."""
        if self.world == 1:
            return [obj]
        given, longest, room = pickle.dumps(obj), _PACKAGE, 0
        while room < longest:
            room = longest
            every = self._packages(given, room, what)
            longest = max(int.from_bytes(package[:_LENGTH]) for package in every)
        return [pickle.loads(package[_LENGTH:]) for package in every]

    def _packages(self, given: bytes, room: int, what: str) -> list[memoryview]:
        """Every rank's number of bytes, and the first of them, as many as there is room for."""
        package = bytearray(len(given).to_bytes(_LENGTH) + given[:room].ljust(room, b"\0"))
        own = torch.frombuffer(package, dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self.world)]
        with self.collective(what):
            dist.all_gather(every, own, group=self.side)
        return [package.numpy().data for package in every]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.world == 1:
            return flag
        return bool(self.max_(torch.tensor([int(flag)])).item())

    def broadcast(self, obj: Any) -> Any:
        """Rank 0's object, on every rank."""
        found = self._all(obj if self.rank == 0 else None, "a broadcast")[0]
        return obj if self.rank == 0 else found

    def first(self, make: Callable[[], T]) -> T:
        """Rank 0's result, or its UserError, on every rank: no rank waits for a failed rank 0."""
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
            with self.collective("a barrier"):
                dist.barrier(group=self.side)

    def for_thread(self) -> "Ranks":
        """The same ranks for flags and objects of another thread; called by every rank.

        They wait twice as long, so that a rank that hangs is missed by what the run waits for.
        """
        ranks = copy(self)
        ranks.timings, ranks.messages = Timings(), None
        ranks.side = _group("thread", 2 * self.timeout) if self.world > 1 else None
        return ranks

    def take_wire_bytes(self) -> float:
        """Bytes that this rank has sent since the last call."""
        sent, self.wire_bytes = self.wire_bytes, 0.0
        return sent


def _group(purpose: str, timeout: timedelta) -> dist.ProcessGroup:
    if purpose not in _groups:
        # Of all ranks: what torch returns to a rank that is outside a group never comes back.
        group: Any = dist.new_group(backend="gloo", timeout=timeout)
        _groups[purpose] = group
    return _groups[purpose]
