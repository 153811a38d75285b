"""The saved state of stateful clients: row, integers and what an algorithm keeps."""

from collections.abc import Mapping

from lightfed_kernels import apply_mask_, compress, expand, popcount
from torch import Tensor

from lightfed.api.clients import Clients


def saved(fleet: Clients, client: int) -> dict[str, Tensor]:
    """Copies in host memory of a client's state; of a masked row only the covered values.

    Args:
        fleet: of the client.
        client: on this rank.
    """
    row, mask = fleet.row(client), fleet.mask(client)
    kept = {name: k.saved(client) for name, k in fleet.kept.items() if k.durable}
    state = {"integers": row.integers} | {k: v for k, v in kept.items() if v is not None}
    if mask is None:
        state = {"floats": row.floats} | state
    else:
        mask = mask.to(row.floats.device)
        state = {"values": compress(row.floats, mask, nnz=int(popcount(mask)))} | state
    # Cloned: a view would be saved with the whole matrix behind it.
    return {name: tensor.cpu().clone() for name, tensor in state.items()}


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
