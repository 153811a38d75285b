"""The base class of algorithms, and the check of their arguments."""

from abc import abstractmethod
from typing import Any

from lightfed.api.fleet import Fleet
from lightfed.local.hooks import Hooks
from lightfed.utils.bounds import check_arguments
from lightfed.utils.errors import UserError

# Where the arguments of an algorithm are in a configuration.
KEY = "model.algorithm.init_args"

# Declarations that earlier versions read from the class of a method, and what to write instead.
# Without a word about it, such a method would train as if it declared nothing.
_FORMER = {
    "devices": "write timing = Timing(devices), of lightfed.devices.timing",
}


class Algorithm(Hooks):
    """A federated algorithm: its `round` reads as the paper's pseudo-code.

    An algorithm registers the server state, as `ServerModel`s and buffers. Every rank has the same
    server state, and an algorithm never refers to a rank, a device or a collective. A checkpoint
    holds the server state, the counters, and the clients' rows if the algorithm is `stateful`.

    See `lightfed.local.hooks.Hooks` for the declarations and the hooks it can override.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Check what the class declares, and the arguments by their annotated bounds."""
        _check_declarations(cls)
        check_arguments(cls, args, kwargs, KEY)
        return super().__new__(cls, *args, **kwargs)

    @abstractmethod
    def setup(self, fed: Fleet) -> None:
        """Create the server state, and refuse a federation that the algorithm cannot train."""

    @abstractmethod
    def round(self, fed: Fleet, t: int) -> None:
        """Run round t = 0, 1, ..."""


def _check_declarations(cls: type[Algorithm]) -> None:
    """Refuse a class that declares what nothing reads any more.

    A method or a property of such a name is the author's own.

    Raises:
        UserError: It names the class.
    """
    for kind in cls.__mro__[: cls.__mro__.index(Algorithm)]:
        for name, fix in _FORMER.items():
            value = vars(kind).get(name)
            if value is None or callable(value) or hasattr(value, "__get__"):
                continue
            raise UserError(
                "model.algorithm", f"{kind.__name__} declares {name}, which is not read", fix
            )
