"""What a round reads from a device: the numbers of all of its sessions, by one transfer."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """Numbers that may still be on a device."""

    def pending(self) -> list[Tensor]:
        """The tensors whose values are needed."""

    def receive(self, values: Sequence[Tensor]) -> None:
        """Take the values of `pending`, in its order, on the host."""


def read(results: Sequence[Pending]) -> None:
    """Bring the numbers of all results to the host; the host waits for the device once."""
    tensors = [result.pending() for result in results]
    if not any(tensor.is_cuda for part in tensors for tensor in part):
        return
    values = iter(_on_host([tensor for part in tensors for tensor in part]))
    for result, part in zip(results, tensors, strict=True):
        result.receive([next(values) for _ in part])


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Float64 copies of small tensors, which hold all their values exactly."""
    there = [i for i, tensor in enumerate(tensors) if tensor.is_cuda]

    # One operator for all of a type: for a conversion of each there would be hundreds.
    kinds: dict[torch.dtype, list[int]] = {}
    for i in there:
        kinds.setdefault(tensors[i].dtype, []).append(i)
    flat = [torch.cat([tensors[i].reshape(-1) for i in some]).double() for some in kinds.values()]
    values = torch.cat(flat).cpu()

    found = list(tensors)
    order = [i for some in kinds.values() for i in some]
    parts = values.split([tensors[i].numel() for i in order])
    for i, part in zip(order, parts, strict=True):
        found[i] = part.view(tensors[i].shape)
    return found
