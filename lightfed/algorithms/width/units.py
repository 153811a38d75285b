"""Which units of a wide model clients train: levels, and other slices than the leading ones."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from lightfed.api.fleet import Fleet
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import UserError


def assign(fed: Fleet, groups: Mapping[int, int]) -> None:
    """Put stateless clients into other groups for this round (HeteroFL's dynamic levels).

    Args:
        fed: Of the clients.
        groups: The group of each of these clients.

    Raises:
        UserError: Clients keep rows, whose shape cannot change.
    """
    if fed.stateful:
        found = "a client that keeps tensors of its own cannot change its shape"
        raise UserError("model.algorithm", found, "keep none, or keep the groups fixed")
    if fed.keeps:
        found = "keep, and clients change their groups"
        raise UserError("model.policy.late", found, "drop late updates")
    fed.places.assign(groups)


@contextmanager
def reordered(fed: Fleet, model: ServerModel, order: Callable[[int], Tensor]) -> Iterator[None]:
    """Send and merge other slices of a server model than the leading ones.

    Within the context the units of every layer are in another order, so that the leading part of it
    is a rolling window (FedRolex) or a random choice, the same for all clients. Axes that no group
    narrows stay: inputs, classes. Layers are connected unit by unit, which a flattened feature map
    is not.

    Args:
        fed: Of the clients.
        model: Of the server; in its own order again afterwards.
        order: Width of a layer -> (width,) the position of each unit in the model. Layers of one
            width have one order, because residual connections add them.
    """
    fed.coverages.reorder_(model, order)
    try:
        yield
    finally:
        fed.coverages.reorder_(model, lambda width: order(width).argsort())
