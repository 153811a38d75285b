"""Which units of a wide model clients train: by levels, or other slices than the leading ones."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from lightfed.api.fleet import Fleet
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import UserError


def assign(fed: Fleet, groups: Mapping[int, int]) -> None:
    """Put stateless clients into other groups for this round (HeteroFL's dynamic levels).

    Args:
        fed: The clients.
        groups: Client -> its group in this round.

    Raises:
        UserError: Clients keep rows, whose shape cannot change.
    """
    if fed.stateful:
        raise UserError(
            key="model.algorithm",
            found="a client that keeps tensors of its own cannot change its shape",
            fix="keep none, or keep the groups fixed",
        )
    if fed.keeps:
        raise UserError(
            key="model.policy.late",
            found="keep, but clients change their groups",
            fix="drop late updates",
        )
    fed.places.assign(groups)


@contextmanager
def reordered(fed: Fleet, model: ServerModel, order: Callable[[int], Tensor]) -> Iterator[None]:
    """Send and merge slices of a server model other than the leading ones.

    Within the context the units of every layer are in another order, so that the leading part of it
    is a rolling window (FedRolex) or a random choice, the same for all clients. Axes that no group
    narrows stay as they are: inputs, classes. Layers are connected unit by unit; a flattened
    feature map is not, so it cannot be reordered.

    Args:
        fed: The clients.
        model: The server's model. Afterwards it is in its own order again.
        order: The width of a layer -> (width,) the position of each unit in the model. Layers of
            one width have one order, because residual connections add them.
    """
    fed.coverages.reorder_(model, order)
    try:
        yield
    finally:
        fed.coverages.reorder_(model, lambda width: order(width).argsort())
