"""Parser messages of many lines, told in one: key, what was found, what to do.

jsonargparse descends into a configuration and nests its messages, each level one of a few sentences
(read in 4.53). They are followed down to the place at fault, which the outermost sentence does not
name; a sentence that is not known here is passed on as it is, in one line.
"""

import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightfed.cli.vocabulary import (
    ABSENT,
    SECTIONS,
    annotation,
    arguments,
    base_of,
    closest,
    described,
    item_of,
    keys,
    offered,
)
from lightfed.cli.written import Written, one_line
from lightfed.utils.errors import UserError

_HELP = "see lightfed fit --help"

# Sentences that go on inside: of a key, no path, a choice of types, a factory, a class.
_KEY = re.compile(r'Parser key "([^"]+)"(?: element \d+)?:\s*(.*)', re.DOTALL)
_PATH = re.compile(r"- Expected a path but .*? accessible or invalid\n\s*- (.*)", re.DOTALL)
_UNION = re.compile(
    r"Does not validate .*?\n *Errors:\n(.*)\n *Given value type: .*?\n *Given value: (.*)",
    re.DOTALL,
)
_FACTORY = re.compile(r"Type .*? expects a function or a callable class: (.*)", re.DOTALL)
_CLASS = re.compile(r"Problem with given class_path '([^']+)':\s*(.*)", re.DOTALL)

# Sentences that say what is wrong.
_OPTION = re.compile(r"Option '(.+?)' is not accepted")
_REQUIRED = re.compile(r"the following arguments are required: (.+)")
_BY_INDEX = re.compile(r"unrecognized arguments: --(\d+\.\w+)")
_AMBIGUOUS = re.compile(r"Multiple subclasses with name (\w+)\. .*?ambiguity: (.*?)\.?$")
_VALUE = re.compile(r"Expected an? (.*?)\. Got value: (.*)", re.DOTALL)
_NO_CLASS = re.compile(
    r"(?:Expected a dot import path string: |Unexpected import path format: |Import path "
    r"|Expected '|Expected an import path or a subclass spec, but got "
    r"|Expected an instantiatable class, but |Not a valid subclass of \w+(?:\. Got value: )?)(.*?)"
    r"(?:' to be .*| does not correspond .*| is (?:abstract|a protocol).*|\n *Subclass types .*)?$",
    re.DOTALL,
)
_OWN = re.compile(
    r"^ *- ((?:trainer|model|data)\.[\w.]+|delay((?:\.\w+)*)): (.+?); (.+)$", re.MULTILINE
)
_NO_MODULE = re.compile(r"module '.+' has no attribute|No module named ")

_UNWATCHED = (
    re.compile(r"Early stopping conditioned on metric `(.+?)` .* any of the following: (.*)"),
    re.compile(r"ModelCheckpoint\(monitor='(.+?)'\)` could not find .* metrics: \[(.*?)\]"),
)


def explain(message: str, argv: Sequence[str]) -> UserError:
    """What jsonargparse refused, as the one error that a user is told.

    Args:
        message: of its ArgumentError.
        argv: the command line; its configuration files tell which item of a list is meant.
    """
    written = Written(argv)
    found = _KEY.match(message)
    return _of_key(found[1], found[2], written) if found else _of_command(message, written)


def lightning_error(error: Exception, argv: Sequence[str]) -> UserError | None:
    """What Lightning has against the Trainer's flags or callbacks; None for any other error.

    And what a class of ours has against its arguments, where jsonargparse took that for one of
    several types that do not fit.
    """
    if own := _OWN.search(str(error)):
        key = own[1] if own[2] is None else _delay(own[2], own[3], Written(argv))
        return UserError(key, own[3], own[4])
    message = one_line(str(error))
    for pattern in _UNWATCHED:
        if found := pattern.search(message):
            measured = re.sub(r"[`']", "", found[2])
            fix = f"monitor one of {measured}" if measured else "monitor a column of metrics.csv"
            return UserError("trainer.callbacks", f"nothing called {found[1]} is measured", fix)
    if found := re.match(r"Found more than one stateful callback of type `(\w+)`", message):
        what = f"two {found[1]} that are told apart by nothing"
        return UserError("trainer.callbacks", what, "keep one, or set them differently")
    if not isinstance(error, MisconfigurationException):
        return None
    flags = arguments(SECTIONS["trainer"])
    flag = next((w for w in re.findall(r"`(?:Trainer\()?(\w+)", message) if w in flags), None)
    return UserError(f"trainer.{flag}" if flag else "trainer", message.rstrip("."), _HELP)


def _delay(below: str, found: str, written: Written) -> str:
    """The key of a delay's argument: a delay does not know which of an algorithm's it is."""
    keys = [f"model.algorithm.init_args.{name}" for name in ("delay", "step_delay")]
    given = [key for key in keys if written.get(key) is not None]
    for key in given:
        value = written.get(f"{key}{below}")
        number = isinstance(value, int | float) and f"{value:g}" == found
        if number or (isinstance(value, str) and value in found):
            return key + below
    return (given or keys)[0] + below


# Errors of the command line as a whole.


def _of_command(message: str, written: Written) -> UserError:
    if found := re.match(r"Subcommand '(\w+)' does not accept option '(.+)'", message):
        return _no_key(found[2], subcommand=found[1])
    if found := re.match(r"unrecognized arguments: (\S+)", message):
        word = found[1]
        return _no_key(word[2:].partition("=")[0]) if word.startswith("--") else _no_option(word)
    if found := _REQUIRED.match(message):
        names = [name.partition(".")[2] for name in found[1].split(", ")]
        return _missing(names, [annotation(n) for n in names], written)
    if found := re.match(r"argument (?:-\w/)?--(\S+): expected one argument", message):
        return UserError(f"--{found[1]}", "no value", "write one after it")
    if found := re.match(
        r"argument subcommand: invalid choice: '(.*?)' \(choose from (.*)\)", message
    ):
        return UserError(f"lightfed {found[1]}", "no such sub-command", _subcommands(found[2]))
    if found := re.match(r'expected "subcommand" to be one of (\{.*\})', message):
        return UserError("lightfed", "no sub-command", _subcommands(found[1]))
    if found := re.match(r"Option '.+' is not accepted before subcommand '(\w+)'", message):
        fix = f"write lightfed {found[1]} --config FILE"
        return UserError("--config", f"stands before {found[1]}", fix)
    if (broken := written.broken()) is not None:
        return UserError("--config", broken, "correct the file")
    named = re.search(r"['\"]([\w-]+(?:\.[\w-]+)+)['\"]", message)
    return UserError(named[1] if named else "configuration", one_line(message), _HELP)


def _subcommands(parsed: str) -> str:
    names = re.findall(r"\w+", parsed.removeprefix("(choose from "))
    # jsonargparse leaves out those behind the fifth.
    known = dict.fromkeys([*names, "plan", "report", "control", "latency"])
    return f"known: {', '.join(known)}"


def _no_option(word: str) -> UserError:
    return UserError(word, "belongs to no option", "write options as --key value")


def _no_key(key: str, *, subcommand: str = "") -> UserError:
    """A key that no section has."""
    if key in ABSENT:
        return UserError(key, *ABSENT[key])
    section, _, name = key.partition(".")
    if section == subcommand:
        return UserError(key, f"below {section}", f"write {name} at the top level")
    if section in SECTIONS:
        near = closest(name, list(arguments(SECTIONS[section])))
        near = near and f"{section}.{near}"
    else:
        near = closest(key, keys())
    return UserError(key, "no such key", f"did you mean {near}?" if near else _HELP)


# Errors in a value.


def _of_key(key: str, text: str, written: Written) -> UserError:
    if key == "config":
        return UserError("--config", one_line(text), "give the path of a YAML file")
    wanted = annotation(key)
    items, item = written.get(key), item_of(wanted)
    if isinstance(items, list) and base_of(item) is not None:
        for position, value in enumerate(items):
            if (inner := _refused(value, item)) is not None:
                return _of_value(f"{key}.{position}", item, inner, written)
    return _of_value(key, wanted, text, written)


def _refused(value: Any, wanted: Any) -> str | None:
    """What the parser has against one item of a list."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--item", type=list[wanted])
    try:
        parser.parse_object({"item": [value]})
    except ArgumentError as error:
        found = _KEY.match(str(error))
        return found[2] if found else str(error)
    return None


def _of_value(key: str, wanted: Any, text: str, written: Written) -> UserError:
    """Follow a message down to the place at fault.

    Args:
        key: of the value.
        wanted: its annotation; None if that is not known.
        text: what jsonargparse has against the value.
        written: by the user.
    """
    text = text.strip()
    if found := _PATH.match(text):
        text = found[1]
    if found := _UNION.match(text):
        inner = _meant(found[1], value=found[2])
        if inner is None:
            return _wrong_value(key, wanted, found[2])
        return _of_value(key, wanted, inner, written)
    owner = None
    if found := _FACTORY.match(text):
        head, _, given = found[1].rpartition(". Got value: ")
        named = re.match(r"Namespace\(class_path='([\w.]+)'", given)
        text, owner = head or found[1], _named(named[1]) if named else None
    elif found := _CLASS.match(text):
        owner, text = _named(found[1]), found[2]
    return _in_class(key, wanted, owner, text, written)


def _meant(errors: str, *, value: str) -> str | None:
    """Of what is said of a union's types that of the type that was meant; None if it is plain."""
    margin = re.match(r" *", errors)
    parts = re.split(rf"(?:^|\n){margin[0] if margin else ''}- ", errors)[1:]
    inside = [p for p in parts if _CLASS.match(p) or _FACTORY.match(p)]
    if inside:
        return inside[0]
    plain = any(re.match(r"Expected a (?:<class '(?!NoneType)|typing\.Literal)", p) for p in parts)
    if plain and "class_path" not in value:
        return None
    return next((p for p in parts if _NO_CLASS.match(p) or _AMBIGUOUS.match(p)), None)


def _in_class(key: str, wanted: Any, owner: Any, text: str, written: Written) -> UserError:
    """What is wrong with an argument of `owner`, the class that the key names, or with the name."""
    base = base_of(item_of(wanted) or wanted)
    plain = owner is base and is_dataclass(base)  # a cohort has its arguments right below
    below = key if plain else f"{key}.init_args"
    beside = written.beside_class_path(key)
    if beside is not None:
        return UserError(f"{key}.{beside}", "stands beside class_path", "move it below init_args")
    if found := _KEY.match(text):
        inner = arguments(owner).get(found[1]) if owner else None
        return _of_value(f"{below}.{found[1]}", inner, found[2], written)
    if owner is not None and owner is base and not plain:
        return _no_class(key, wanted, "", written)
    if found := _OPTION.match(text):
        return _no_argument(f"{below}.{found[1]}", found[1], owner)
    if found := _REQUIRED.match(text):
        names = found[1].split(", ")
        types = arguments(owner) if owner else {}
        return _missing([f"{below}.{n}" for n in names], [types.get(n) for n in names], written)
    if found := _BY_INDEX.match(text):
        fix = "change it in the configuration file"
        return UserError(f"{key}.{found[1]}", "items cannot be changed on the command line", fix)
    if found := _AMBIGUOUS.match(text):
        fix = f"write {found[2].replace(', ', ' or ')}"
        return UserError(key, f"{found[1]} is the name of several classes", fix)
    if found := _VALUE.match(text):
        return _wrong_value(key, wanted, found[2], kind=found[1])
    if found := _NO_CLASS.match(text):
        return _no_class(key, wanted, found[1], written)
    if _NO_MODULE.match(text):
        return _no_class(key, wanted, "", written)
    return UserError(key, _short(text), _HELP)


def _named(path: str) -> Any:
    """The class or function at a dotted path; None if there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


# The sentences that are told.


def _wrong_value(key: str, wanted: Any, value: str, kind: str = "") -> UserError:
    words = described(wanted) or re.sub(r"<class '(?:[\w]+\.)*(\w+)'>", r"\1", one_line(kind))
    return UserError(key, _short(value), f"give {words}" if words else _HELP)


def _no_argument(key: str, name: str, owner: Any) -> UserError:
    known = list(arguments(owner)) if owner else []
    near = closest(name, known)
    fix = f"did you mean {near}?" if near else f"known: {', '.join(known)}" if known else _HELP
    return UserError(key, f"no such argument{f' of {owner.__name__}' if owner else ''}", fix)


def _missing(names: list[str], wanted: list[Any], written: Written) -> UserError:
    """Required and not given; all are named, because the others are the next thing to write."""
    others = f", nor {', '.join(names[1:])}" if names[1:] else ""
    if not written.files:
        return UserError(names[0], f"is not given{others}", "name a configuration: --config FILE")
    base = base_of(wanted[0])
    known = offered(base) if base else []
    fix = f"name one of {', '.join(known)}" if known else f"give {described(wanted[0]) or 'one'}"
    return UserError(names[0], f"is not given{others}", fix)


def _no_class(key: str, wanted: Any, name: str, written: Written) -> UserError:
    """What is there names no class that fits; the name is empty where the message has none."""
    base, value = base_of(wanted), written.get(key)
    path = value.get("class_path") if isinstance(value, dict) else value
    shown = _short(str(path or name))
    fix = _classes(wanted, shown)
    if base is None or is_dataclass(base):
        return UserError(key, shown, fix)
    if isinstance(value, dict) and path is None:
        return UserError(key, "names no class", f"give it a class_path; {fix}")
    is_base = shown.rpartition(".")[2] == base.__name__
    return UserError(key, f"{shown} is {'abstract' if is_base else f'no {base.__name__}'}", fix)


def _classes(wanted: Any, name: str) -> str:
    """What could have been named; of many classes only the likeliest."""
    base = base_of(wanted)
    known = offered(base) if base and not is_dataclass(base) else []
    near = closest(name.rpartition(".")[2], known)
    if near and len(known) > 10:
        return f"did you mean {near}?"
    if known:
        return f"{f'did you mean {near}? ' if near else ''}known: {', '.join(known)}"
    words = described(wanted)
    return f"give {words}" if words else _HELP


def _short(text: str, limit: int = 80) -> str:
    text = one_line(text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
