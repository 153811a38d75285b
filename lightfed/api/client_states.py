"""The saved state of stateful clients: rows, integers and what an algorithm keeps.

A rank saves one matrix per client group, with the numbers of its clients, instead of 10,000 rows.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import torch
from lightfed_kernels import apply_mask_, compress, expand, popcount
from torch import Tensor

from lightfed.api.clients import Clients
from lightfed.state.chain import Saved


def saved(fleet: Clients, chosen: Collection[int] | None = None) -> Saved:
    """The state in host memory of this rank's clients, or of the chosen ones.

    Of masked rows only the covered values. Matrices on the host are views of the rows: write them
    before the next round.
    """
    state: Saved = defaultdict(list)
    for group in fleet.groups:
        clients = [k for k in group.store.slots if chosen is None or k in chosen]
        masked = {k for k in clients if fleet.mask(k) is not None} if fleet.masks else set()
        state["values"] += _stacked((k, _covered(fleet, k)) for k in clients if k in masked)
        dense = [k for k in clients if k not in masked]
        if dense:
            state["floats"].append(_block(dense, fleet.block(dense).floats))
        if clients:
            state["integers"].append(_block(clients, fleet.block(clients).integers))
    for name, kept in fleet.kept.items():
        if kept.durable:
            items = kept.data.items()
            state[name] = _stacked((k, x) for k, x in items if chosen is None or k in chosen)
    return dict(state)


def _covered(fleet: Clients, client: int) -> Tensor:
    """The values of a client's row that its mask covers."""
    row, mask = fleet.row(client).floats, fleet.mask(client)
    assert mask is not None
    mask = mask.to(row.device)
    return compress(row, mask, nnz=int(popcount(mask)))


def _stacked(tensors: Iterable[tuple[int, Tensor]]) -> list[dict[str, Tensor]]:
    """A matrix of the tensors of each shape."""
    alike: dict[object, list[tuple[int, Tensor]]] = defaultdict(list)
    for client, tensor in tensors:
        alike[tensor.shape, tensor.dtype].append((client, tensor))
    return [
        _block([k for k, _ in those], torch.stack([tensor for _, tensor in those]))
        for those in alike.values()
    ]


def _block(clients: list[int], values: Tensor) -> dict[str, Tensor]:
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


def restore(fleet: Clients, client: int, state: Mapping[str, Tensor]) -> None:
    """Restore a client of this rank from its saved state."""
    for name, kept in fleet.kept.items():
        if kept.durable:
            kept.restore(client, state.get(name))
    row, mask = fleet.row(client), fleet.mask(client)
    if mask is None:
        row.floats.copy_(state["floats"])
    else:
        place = row.floats.device
        expand(state["values"].to(place), mask.to(place), out=row.floats)
    row.integers.copy_(state["integers"])


def reset(fleet: Clients, client: int) -> None:
    """Reset a client of this rank to its initial values; of its kept state only a mask remains."""
    for kept in fleet.kept.values():
        if kept is not fleet.masks and kept.durable:
            kept.pop(client, None)
    fleet.algorithm.reset_client(fleet, client)
    mask = fleet.mask(client)
    if mask is not None:
        row = fleet.row(client).floats
        apply_mask_(row, mask.to(row.device))
