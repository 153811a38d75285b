"""The methods that are judged: classes that a command names.

A class is imported in a child process only. So this process stays free of the user's code, and what
it imports says which files a method consists of.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from lightfed.api.algorithm import Algorithm
from lightfed.cli.dependencies import digest_of_code
from lightfed.utils.errors import UserError, reason

_FORK = get_context("fork")

# The beginning of the names of modules whose methods need no path.
_OURS = "lightfed."

_FIX = "give MODULE.Class of a file in this folder or of an installed package, or a method's name"


class Contender(NamedTuple):
    """A method that can be judged.

    Attributes:
        name: The name of its class.
        path: The dotted path of its class.
        digest: A digest of the code that its runs depend on. With other code they are other runs.
    """

    name: str
    path: str
    digest: str


def contender(word: str, key: str) -> Contender:
    """Return the method that a word names.

    Args:
        word: The name of a method of lightfed, or the dotted path of a class.
        key: What the word was given for.

    Raises:
        UserError: There is no such class, it is no method, or it needs arguments.
    """
    receiver, sender = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_look, args=(word, key, sender))
    child.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        found = f"the import of {word!r} ended the process"
        raise UserError(key, found, "import it without side effects") from None
    finally:
        child.join()

    if isinstance(answer, UserError):
        raise answer
    assert isinstance(answer, Contender)
    return answer


def _look(word: str, key: str, sender: Connection) -> None:
    """Find a class in a child process, and send what was found."""
    try:
        kind = class_of(word, key)
        _check_arguments(kind, word, key)
        # A method of lightfed depends on nothing that others have imported.
        digest = digest_of_code(of_users=not kind.__module__.startswith(_OURS))
        sender.send(Contender(kind.__name__, path_of(kind, word), digest))
    except UserError as error:
        sender.send(error)


def path_of(kind: type, word: str) -> str:
    """Return the dotted path under which a class is found again: as it was named, if it was."""
    return word if "." in word else f"{kind.__module__}.{kind.__qualname__}"


def class_of(word: str, key: str) -> type[Algorithm]:
    """Return the class that a word names; it imports the class's module.

    The arguments and errors are those of `contender`.
    """
    kind = _imported(word, key) if "." in word else _shipped(word, key)
    is_method = isinstance(kind, type) and issubclass(kind, Algorithm)
    if not is_method:
        raise UserError(
            key, f"{word} is no lightfed.Algorithm", "name a class that derives from it"
        )
    if inspect.isabstract(kind):
        missing = " and ".join(sorted(kind.__abstractmethods__))
        raise UserError(key, f"{word} has no {missing}", f"write {missing}")
    found: type[Algorithm] = kind
    return found


def _shipped(name: str, key: str) -> Any:
    """Return the method of lightfed with this name."""
    from lightfed.cli.catalog import subclasses

    kinds = {}
    for kind in subclasses(Algorithm):
        if kind.__module__.startswith(_OURS):
            kinds[kind.__name__] = kind
    if name in kinds:
        return kinds[name]

    near = get_close_matches(name, kinds, n=1)
    fix = f"did you mean {near[0]}?" if near else _FIX
    raise UserError(key, f"lightfed has no method {name!r}", fix)


def _imported(path: str, key: str) -> Any:
    """Return the object that a dotted path names."""
    module_name, _, name = path.rpartition(".")
    if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path) is None:
        raise UserError(key, f"{path!r} is no path of a class", _FIX)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        # An import within the module may be what is missing.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(key, reason(error), "correct it, or install what is missing") from error
        raise UserError(key, f"there is no module {error.name!r}", _FIX) from error
    except (Exception, SystemExit) as error:
        raise UserError(key, reason(error), f"correct {module_name}") from error

    if not hasattr(module, name):
        raise UserError(key, f"{module_name} has no {name!r}", _named_in(module))
    return getattr(module, name)


def _named_in(module: Any) -> str:
    """Return a hint at the methods that a module defines."""
    names = []
    for name, value in vars(module).items():
        is_method = isinstance(value, type) and issubclass(value, Algorithm)
        if is_method and value.__module__ == module.__name__:
            names.append(name)
    return f"name {' or '.join(names[:4])}" if names else "define a class of this name in it"


def _check_arguments(kind: type, word: str, key: str) -> None:
    """Refuse a class that cannot be made without arguments."""
    needed = []
    for name, parameter in inspect.signature(kind).parameters.items():
        is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_one and parameter.default is parameter.empty:
            needed.append(name)
    if needed:
        fix = "give each a default, or name a class derived from it that does"
        raise UserError(key, f"{word} needs {' and '.join(needed)}", fix)


def names_of(contenders: Sequence[Contender]) -> list[str]:
    """Return names for readers: those of the classes, or their paths if these are the same."""
    names = [one.name for one in contenders]
    return names if len(set(names)) == len(names) else [one.path for one in contenders]
