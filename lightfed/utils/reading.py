"""What a round reads from a device: the numbers of all of its sessions, by one transfer."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """Numbers that may still be on a device."""

    def pending(self) -> list[Tensor]:
        """Return the tensors whose values are needed."""

    def receive(self, values: Sequence[Tensor]) -> None:
        """Take the values of `pending`, in its order, on the host."""


def read(results: Sequence[Pending]) -> None:
    """Bring the numbers of all results to the host, which waits for the device once."""
    tensors_of_results = [result.pending() for result in results]
    tensors = [tensor for of_result in tensors_of_results for tensor in of_result]
    if not any(tensor.is_cuda for tensor in tensors):
        return

    values = iter(_on_host(tensors))
    for result, of_result in zip(results, tensors_of_results, strict=True):
        result.receive([next(values) for _ in of_result])


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return small tensors on the host; those of the device as float64, which holds all values."""
    # By type, because there is one conversion for all of a type. With one for each tensor there
    # would be hundreds.
    positions_of: dict[torch.dtype, list[int]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.is_cuda:
            positions_of.setdefault(tensor.dtype, []).append(position)

    flat = []
    order = []
    for positions in positions_of.values():
        flat.append(torch.cat([tensors[position].reshape(-1) for position in positions]).double())
        order += positions
    values = torch.cat(flat).cpu()

    on_host = list(tensors)
    sizes = [tensors[position].numel() for position in order]
    for position, value in zip(order, values.split(sizes), strict=True):
        on_host[position] = value.view(tensors[position].shape)
    return on_host
