"""The base class of algorithms, and the check of their arguments."""

from abc import abstractmethod
from typing import Any

from lightfed.api.fleet import Fleet
from lightfed.local.hooks import Hooks
from lightfed.utils.bounds import check_arguments
from lightfed.utils.errors import require

KEY = "model.algorithm.init_args"  # of an algorithm's arguments in a configuration


def require_argument(fits: bool, name: str, found: object, fix: str) -> None:
    """Raise a `UserError` that names an argument of the algorithm, unless `fits`."""
    require(fits, f"{KEY}.{name}", found, fix)


class Algorithm(Hooks):
    """A federated algorithm: its `round` reads as the paper's pseudo-code.

    The algorithm registers the server state: `ServerModel`s and buffers. It is the same on every
    rank. A checkpoint holds this state, the counters, and the clients' rows if the algorithm is
    `stateful`. An algorithm never refers to a rank, a device or a collective.

    See `lightfed.local.hooks.Hooks` for its declarations and the hooks it may override.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments by their annotated bounds, before the constructor runs."""
        check_arguments(cls, args, kwargs, KEY)
        return super().__new__(cls, *args, **kwargs)

    @abstractmethod
    def setup(self, fed: Fleet) -> None:
        """Create the server state; reject a federation that the algorithm cannot train."""

    @abstractmethod
    def round(self, fed: Fleet, t: int) -> None:
        """One round, t = 0, 1, ..."""
