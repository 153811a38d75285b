"""The base class of algorithms, and the check of their arguments."""

from abc import abstractmethod
from typing import Any

from lightfed.api.fleet import Fleet
from lightfed.local.hooks import Hooks
from lightfed.utils.bounds import check_arguments

# Where the arguments of an algorithm are in a configuration.
KEY = "model.algorithm.init_args"


class Algorithm(Hooks):
    """A federated algorithm: its `round` reads as the paper's pseudo-code.

    An algorithm registers the server state, as `ServerModel`s and buffers. Every rank has the same
    server state, and an algorithm never refers to a rank, a device or a collective. A checkpoint
    holds the server state, the counters, and the clients' rows if the algorithm is `stateful`.

    See `lightfed.local.hooks.Hooks` for the declarations and the hooks it can override.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments by their annotated bounds, before the constructor runs."""
        check_arguments(cls, args, kwargs, KEY)
        return super().__new__(cls, *args, **kwargs)

    @abstractmethod
    def setup(self, fed: Fleet) -> None:
        """Create the server state, and refuse a federation that the algorithm cannot train."""

    @abstractmethod
    def round(self, fed: Fleet, t: int) -> None:
        """Run round t = 0, 1, ..."""
