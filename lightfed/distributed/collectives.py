"""The few collectives that a federation needs, and the bytes they send.

A single rank, with or without a process group, takes the same path without communication.

Rows go over the process group. Flags and objects always go over gloo, also with NCCL, so that they
do not wait for the GPU's stream.
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

# Bytes of a rank's objects that one collective gathers: the reports of a hundred sessions.
PACKAGE_BYTES = 1 << 13

# Bytes in front of the objects, which say how many bytes they are.
_LENGTH = 8

# Groups with gloo by their purpose: beside an NCCL group, or for a thread. Each is made once.
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
        device: The device of this rank.
        timeout: The timeout of the process group.

    Attributes:
        rank: The number of this rank.
        world: The number of ranks.
        wire_bytes: The bytes that this rank has sent since the last `take_wire_bytes`. An
            all-reduce of b bytes over W ranks counts as 2 (W - 1) / W b, as by a ring or by
            recursive halving, and an all-gather as W - 1 times what the rank gives.
        timings: The parts of this rank's round. Flags, objects and barriers count as waiting. Rows
            count for the part that sends them.
        messages: What travels with every gather, so that it needs no collective of its own. None,
            or an object with `outgoing()`, which returns what to send, and `receive(messages)`,
            which is given what all ranks have sent.
        side: The group for flags and objects; None for the default group.
        staged: Whether rows go through host memory.
    """

    messages: Any = None

    def __init__(self, device: torch.device, *, timeout: timedelta = TIMEOUT) -> None:
        self.device = device
        self.timeout = timeout

        has_process_group = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if has_process_group else 0
        self.world = dist.get_world_size() if has_process_group else 1

        self.wire_bytes = 0.0
        self.timings = Timings()

        uses_nccl = self.world > 1 and dist.get_backend() == "nccl"
        self.side = _group("side", timeout) if uses_nccl else None

        # gloo can only use host memory: rows of a GPU go through pinned copies.
        self.staged = device.type == "cuda" and not uses_nccl

    @property
    def alone(self) -> bool:
        """Whether this rank has all clients."""
        return self.world == 1

    @contextmanager
    def collective(self, what: str, *, waits: bool = True) -> Iterator[None]:
        """Run a collective in a block; a watched run ends with a line if it fails.

        Args:
            what: The name of the collective, for that line.
            waits: Whether its time counts as waiting for others.
        """
        timed = self.timings.part("waiting") if waits else nullcontext()
        try:
            with timed:
                yield
        except RuntimeError as error:
            watch.lost(what, error)
            raise

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over the ranks, and return it."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its largest values over the ranks, and return it."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def _all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        if self.world == 1 or tensor.numel() == 0:
            return tensor

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

        Args:
            parts: For each receiving rank a tensor of shape (n,), all of one type.
            sizes: For each sending rank the number of elements that come from it.

        Returns:
            For each sending rank the tensor that it has sent, of shape (n,).
        """
        if self.world == 1:
            return list(parts)

        own_part = parts[self.rank]
        sent_sizes = [len(part) for part in parts]
        sent_sizes[self.rank] = 0
        received_sizes = list(sizes)
        received_sizes[self.rank] = 0

        parts_of_others = [part for rank, part in enumerate(parts) if rank != self.rank]
        outgoing = self._sendable(torch.cat(parts_of_others))
        received = self._like(outgoing, sum(received_sizes))
        with self.collective("an exchange of rows", waits=False):
            dist.all_to_all_single(
                received, outgoing, received_sizes, sent_sizes, group=self._group(outgoing)
            )
        self.wire_bytes += sum(sent_sizes) * outgoing.element_size()

        on_device = received.to(own_part.device, non_blocking=received.is_pinned())
        received_parts = list(on_device.split(received_sizes))
        received_parts[self.rank] = own_part
        return received_parts

    def _sendable(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy in pinned memory if the process group cannot take it."""
        if not self.staged:
            return tensor
        on_host = self._like(torch.empty(0, dtype=tensor.dtype), tensor.shape)
        return on_host.copy_(tensor)

    def _like(self, sent: Tensor, size: int | torch.Size) -> Tensor:
        """Return an empty tensor of a size, with the type and the device of another one.

        In host memory it is pinned if this rank has a GPU, which copies faster from and to there.
        """
        shape = (size,) if isinstance(size, int) else size
        is_pinned = self.device.type == "cuda" and sent.device.type == "cpu"
        return torch.empty(shape, dtype=sent.dtype, device=sent.device, pin_memory=is_pinned)

    def _group(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self.side if tensor.device.type == "cpu" else None

    def gather(self, objects: list[Any], what: str = "a gather") -> list[Any]:
        """Return the objects of all ranks, on every rank, in the order of the ranks.

        It takes one collective, or two if a rank's objects take more than `PACKAGE_BYTES` bytes.

        Args:
            objects: The objects of this rank.
            what: The name of the collective, for the line about a rank that does not come.
        """
        message = None if self.messages is None else self.messages.outgoing()

        all_objects = []
        all_messages = []
        for objects_of_rank, message_of_rank in self._all((objects, message), what):
            all_objects += objects_of_rank
            all_messages.append(message_of_rank)

        if self.messages is not None:
            self.messages.receive(all_messages)
        return all_objects

    def _all(self, obj: T, what: str) -> list[T]:
        """Return every rank's object, in the order of the ranks."""
        if self.world == 1:
            return [obj]

        content = pickle.dumps(obj)
        packages = self._packages(content, PACKAGE_BYTES, what)

        # If the content of a rank was too long, all ranks see it, and repeat with enough room.
        longest = max(int.from_bytes(package[:_LENGTH]) for package in packages)
        if longest > PACKAGE_BYTES:
            packages = self._packages(content, longest, what)

        return [pickle.loads(package[_LENGTH:]) for package in packages]

    def _packages(self, content: bytes, room: int, what: str) -> list[memoryview]:
        """Return every rank's package: the length of its content, and the beginning of it.

        Args:
            content: The content of this rank.
            room: The number of bytes of content that a package has room for.
            what: The name of the collective.
        """
        length = len(content).to_bytes(_LENGTH)
        package = bytearray(length + content[:room].ljust(room, b"\0"))
        outgoing = torch.frombuffer(package, dtype=torch.uint8)
        received = [torch.empty_like(outgoing) for _ in range(self.world)]
        with self.collective(what):
            dist.all_gather(received, outgoing, group=self.side)
        return [tensor.numpy().data for tensor in received]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        if self.world == 1:
            return flag
        return bool(self.max_(torch.tensor([int(flag)])).item())

    def broadcast(self, obj: Any) -> Any:
        """Return rank 0's object, on every rank."""
        if self.rank == 0:
            self._all(obj, "a broadcast")
            return obj
        return self._all(None, "a broadcast")[0]

    def first(self, make: Callable[[], T]) -> T:
        """Return the result of a function on rank 0, on every rank.

        Args:
            make: The function, which only rank 0 calls.

        Raises:
            UserError: The function has raised it; raised on every rank, so that no rank waits for
                a rank 0 that has failed.
        """
        result: T | None = None
        refused: UserError | None = None
        if self.rank == 0:
            try:
                result = make()
            except UserError as error:
                refused = error

        result, refused = self.broadcast((result, refused))
        if refused is not None:
            raise refused
        return cast(T, result)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            with self.collective("a barrier"):
                dist.barrier(group=self.side)

    def for_thread(self) -> "Ranks":
        """Return the same ranks for flags and objects of another thread; every rank calls it.

        They wait twice as long. So if a rank hangs, it is a collective of the run that reports it.
        """
        ranks = copy(self)
        ranks.timings = Timings()
        ranks.messages = None
        ranks.side = _group("thread", 2 * self.timeout) if self.world > 1 else None
        return ranks

    def take_wire_bytes(self) -> float:
        """Return the bytes that this rank has sent since the last call."""
        sent = self.wire_bytes
        self.wire_bytes = 0.0
        return sent


def _group(purpose: str, timeout: timedelta) -> dist.ProcessGroup:
    if purpose not in _groups:
        # torch returns no group to a rank that is outside of it. This one has all ranks.
        group: Any = dist.new_group(backend="gloo", timeout=timeout)
        _groups[purpose] = group
    return _groups[purpose]
