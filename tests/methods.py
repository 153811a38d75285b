"""The public methods of the package."""

import inspect

import lightfed
from lightfed.api.algorithm import Algorithm


def methods() -> list[str]:
    """The names of all algorithms that a user can import from `lightfed`, in its order."""
    found = []
    for name in lightfed.__all__:
        kind = getattr(lightfed, name)
        if inspect.isclass(kind) and issubclass(kind, Algorithm) and not inspect.isabstract(kind):
            found.append(name)
    return found
