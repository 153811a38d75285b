"""Turns errors of the parser, of Lightning and of classes into one line for the user.

The wording is jsonargparse's and Lightning's. This file adds the whole key, which jsonargparse (as
of 4.53) spreads over nested messages, and the name that was probably meant.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from difflib import get_close_matches
from inspect import isabstract, isclass
from os.path import isfile
from pathlib import Path
from pkgutil import resolve_name
from textwrap import shorten
from typing import Any, get_args, get_type_hints

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightfed.utils.errors import UserError

_HELP = "see --help"
_SMALLER = "lower the sizes of data.dataset, data.batch_size, model.clients or model.pack_memory"

# Where words of papers and of other trainers are, by the last part of a key.
WORDS = {
    "accumulate_grad_batches": "data.batch_size",
    "alpha": "data.partition.alpha",
    "epochs": "trainer.max_epochs for rounds, model.local_epochs for clients",
    "gpus": "trainer.devices",
    "learning_rate": "model.optimizer.lr",
    "lr": "model.optimizer.lr",
    "lr_scheduler": "model.lr_schedule",
    "method": "model.algorithm",
    "min_steps": "trainer.min_epochs",
    "name": "trainer.name",
    "num_clients": "model.clients, `count` of each group",
    "optimizer": "model.optimizer",
    "overfit_batches": "trainer.limit_train_batches",
    "rounds": "trainer.max_epochs",
    "seed": "model.seed",
    "seed_everything": "model.seed",
    "val_check_interval": "trainer.check_val_every_n_epoch",
}

# Messages that contain others: about a wrong path, a class, a factory, alternatives of a type.
_AROUND = (
    r"- Expected a path but .*? invalid\n\s*- (?P<rest>.*)",
    r"Problem with given class_path '(?P<path>.+?)':\s*(?P<rest>.*)",
    r"Type .*? expects a function or a callable class: (?P<rest>.*)"
    r"\. Got value: Namespace\(class_path='(?P<path>[\w.]+)'",
    r"Does not validate .*?\n *Errors:\n(?P<margin> *)- (?:.*?\n(?P=margin)- )??"
    r"(?P<rest>(?:Problem with|Type |Expected a dot ).*?)"
    r"(?=\n(?P=margin)- |\n *Given [^\n]*\n[^\n]*\Z)",
)
_KEY = re.compile(r'Parser key "([^"]+)"(?: element \d+)?:\s*(.*)', re.DOTALL)
_UNKNOWN = re.compile(r"(?:Subcommand .*? option '|unrecognized arguments: (?:--)?)([\w.-]+)")
# A logger or callback that raises, among the alternatives of its type that do not apply.
_RAISED = re.compile(
    r"Does not validate.*?\.(Logger|Callback)\b.*?\nErrors:(.*)\nGiven value type", re.DOTALL
)
# Why a file of the user's cannot be imported.
_FAILED = re.compile(
    r"No module named '.+?'|module '.+?' has no attribute '\w+'|cannot import name '.+?' from '.+?'"
    r"|(?<=Errors:\n    - )(?!Expected |Problem |Type |Does |Not )[^\n]+"
)
_OTHERS = re.compile(r"\n  - (?:Not a valid subclass|Expected a )[^\n]*(?:\n    [^\n]*)*")
_REQUIRED = re.compile(r"the following arguments are required: ([\w.]+)")


def parser_error(message: str, argv: Sequence[str], sections: Mapping[str, Any]) -> UserError:
    """The error of jsonargparse on a command line.

    `message` is that of jsonargparse. `sections` are classes and functions by the key above their
    arguments ("" for no key).
    """
    keys = dict.fromkeys(("ckpt_path", "config", "rounds", "verbose", "world_size"))
    for section, owner in sections.items():
        keys |= {f"{section}.{name}".lstrip("."): a for name, a in accepted(owner).items()}
    if found := _UNKNOWN.match(message):
        key = found[1]
        word = WORDS.get(key.rpartition(".")[2])
        return UserError(key, "no such key", f"use {word}" if word else _hint(key, keys))
    if found := _REQUIRED.match(message):
        key = found[1].removeprefix("".join(argv[:1]) + ".")
        return UserError(key, _plain(message), class_hint("", keys.get(key)))
    if found := re.match(r"argument (?:-\w/)?(\S+): (.*)", message):
        return UserError(found[1], found[2], _HELP)
    if found := _KEY.match(message):
        key, wanted = found[1], keys.get(found[1])
        return _of_value(key + _position(key, wanted, argv), found[2], wanted)
    of_file = re.search("config|codec|before subcommand", message)
    return UserError("--config" if of_file else "lightfed", _plain(message), _HELP)


def run_error(error: Exception) -> UserError | None:
    """Lightning's error about flags or callbacks, or a lack of memory; None for any other error."""
    message = _plain(str(error)).rstrip(".")
    if isinstance(error, MemoryError) or "can't allocate memory" in message:
        return UserError("memory", message or "exhausted", _SMALLER)
    if re.match(r"Early stopping cond|`ModelCheckpoint\(mon|Found more than one state", message):
        message = re.sub(r"Pass in or modify your .*? following:", "There are", message)
        return UserError("trainer.callbacks", message, _HELP)
    twice = re.match(r"Received both `precision=", message)  # a ValueError
    if not isinstance(error, MisconfigurationException) and not twice:
        return None
    flag = re.search(r"\bTrainer\((\w+)|`(\w+)` parameter|\b(plugin)s?\b", message)
    fix = "give more" if message.startswith("You restored") else _HELP
    name = f"trainer.{flag[1] or flag[2] or 'plugins'}" if flag else "trainer"
    return UserError(name, message, fix)


def class_error(error: Exception) -> UserError | None:
    """The UserError of one of our classes, found among jsonargparse's errors; None without one."""
    needed = re.search(r"(Requirement '.*?' not met).*`(pip install .*?)`", str(error))
    if needed:  # by a logger or callback of Lightning
        return UserError("trainer", needed[1], needed[2])
    if "`tensorboard` nor `tensorboardX` is available" in str(error):
        found = "TensorBoardLogger without the package tensorboard"
        return UserError("trainer.logger", found, "pip install 'lightfed[tensorboard]'")
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, UserError):
        inner = inner.__cause__
    unknown = re.search(
        r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error)
    )
    if inner is None and isinstance(error, TypeError) and unknown is not None:
        return UserError(f"{unknown[1]}.{unknown[2]}", "no such argument", "leave it out")
    raised = _RAISED.match(str(error))
    if inner is None and raised and (found := _OTHERS.sub("", raised[2]).strip(" \n-")):
        key = "trainer.logger" if raised[1] == "Logger" else "trainer.callbacks"
        return UserError(key, _plain(found), "correct its init_args")
    return inner


def whole_key(refused: UserError, config: Mapping[str, Any]) -> UserError:
    """The same error with the key of the configuration, if it names a class and its argument.

    A class knows its arguments, such as `Exponential.mean`, and not where it is written.
    """
    named = re.fullmatch(r"([A-Z]\w*)\.(\w+)", refused.key)
    if named is None:
        return refused
    places = list(_places_of(named[1], named[2], config, ""))
    chosen = [key for key, value in places if _says(refused.found, value)] or [k for k, _ in places]
    return UserError(chosen[0], refused.found, refused.fix) if chosen else refused


def _says(found: str, value: Any) -> bool:
    """Whether an error is about this value."""
    number = isinstance(value, int | float)
    return found in ({f"{value}", f"{value:g}"} if number else {f"{value}"})


def _places_of(name: str, argument: str, value: Any, above: str) -> Iterator[tuple[str, Any]]:
    """The keys of an argument of the classes of this name, and what is given there."""
    inner: Any = enumerate(value) if isinstance(value, list | tuple) else ()
    if isinstance(value, Mapping):
        inner = value.items()
        own = value.get("init_args")
        if str(value.get("class_path", "")).rpartition(".")[2] == name and isinstance(own, Mapping):
            yield f"{above}init_args.{argument}", own.get(argument)
    for key, below in inner:
        yield from _places_of(name, argument, below, f"{above}{key}.")


def accepted(owner: Any) -> dict[str, Any]:
    """Arguments of a class or function, also those behind `**kwargs`, and their annotations."""
    parser = ArgumentParser()
    add = parser.add_class_arguments if isclass(owner) else parser.add_function_arguments
    hints = annotations(owner)
    return {name: hints.get(name) for name in add(owner, fail_untyped=False)}


def annotations(owner: Any) -> dict[str, Any]:
    """Annotations of the arguments of a class or function, by name."""
    hints: dict[str, Any] = {}
    kinds: Any = reversed(owner.__mro__) if isclass(owner) else ()
    for maker in [kind.__init__ for kind in kinds] or [owner]:
        with suppress(NameError, TypeError):  # a name that only type checkers import
            hints |= get_type_hints(maker)
    return hints


def _of_value(key: str, text: str, wanted: Any) -> UserError:
    """The innermost error about a value, with its whole key."""
    path = ""  # of the class whose argument is meant
    while found := next(filter(None, (re.match(a, text, re.DOTALL) for a in _AROUND)), None):
        text, path = found["rest"].strip(), found.groupdict().get("path") or path
    owner, takes, base = None, {}, base_of(wanted)
    with suppress(ImportError, AttributeError, TypeError, ValueError):
        owner = resolve_name(path)
        takes = accepted(owner)
    # Arguments of a client group are directly below its key.
    below = key if is_dataclass(owner) and owner is base else f"{key}.init_args"
    if found := _KEY.match(text):
        return _of_value(f"{below}.{found[1]}", found[2], takes.get(found[1]))
    if found := re.match(r"Option '(.+?)' is not accepted", text):
        if owner is base and below != key:
            return UserError(key, "no class_path", class_hint("", wanted))
        hint = _hint(found[1], takes)
        return UserError(f"{below}.{found[1]}", f"no such argument of {path}", hint)
    if found := _REQUIRED.match(text):
        hint = class_hint("", takes.get(found[1]))
        return UserError(f"{below}.{found[1]}", _plain(text), hint)
    missing = re.match(r"No module named '(.+?)'", text)
    if missing and path and not path.startswith(missing[1]):
        return UserError(key, f"{path}: {_plain(text)}", "correct the imports of its file")
    if found := re.match(r"Multiple subclasses with name (\w+).*?: (.*?)\.?$", text):
        choice = " or ".join(found[2].split(", "))
        return UserError(key, f"{found[1]} is {choice}", "give the whole name")
    if found := re.match(r"Expected an instantiatable class, but (\S+) is abstract", text):
        lacks = ", ".join(sorted(getattr(resolve_name(found[1]), "__abstractmethods__", ())))
        if lacks and not found[1].startswith("lightfed."):  # of our own another class is meant
            return UserError(key, f"{found[1]} lacks {lacks}", "define it in the class")
    named = re.search(r"(?:import path string:|class, but) ([\w.]+)", text)
    name = named[1] if named else "" if owner else path
    value = re.match(".*(?:Got|Given) value: (.*)", text, re.DOTALL)
    hint = class_hint(name, wanted)
    if value and (failed := _FAILED.search(text)) and not hint.startswith("did you"):
        return UserError(key, _plain(f"{failed[0]}, from {value[1]}"), "correct the name or file")
    return UserError(key, _plain(value[1] if value else text) or "''", hint)


def _position(key: str, wanted: Any, argv: Sequence[str]) -> str:
    """Which item of a list is at fault, such as ".1"; or ""."""
    given = [word.partition("=")[2] for word in argv if word.startswith(f"--{key}=")]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--items", type=wanted)
    with suppress(RecursionError, TypeError, yaml.YAMLError):  # of lists without end, or no YAML
        items = yaml.safe_load(given[-1]) if given else list_in_files(argv, key)
        for position, item in enumerate(items if isinstance(items, list) else []):
            try:
                parser.parse_object({"items": [item]})
            except ArgumentError:
                return f".{position}"
    return ""


def files_of(words: Sequence[str]) -> list[Path]:
    """The configuration files that a command line names."""
    found = re.findall(r"(?:--config|-c)[\0=]([^\0]+)", "\0".join(words))
    return [Path(name) for name in found if isfile(name)]


def list_in_files(words: Sequence[str], key: str) -> list[Any]:
    """The list of the last configuration file that has it; empty without one."""
    found: Any = None
    for path in files_of(words):
        try:
            value: Any = yaml.safe_load(path.read_text("utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            continue  # the parser says what is wrong
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        found = value if value is not None else found
    return found if isinstance(found, list) else []


def _plain(text: str) -> str:
    """A sentence or an annotation in one line, with the bare names of types."""
    for noise in (r"\s*Subclass types expect one of:.*", r"Type \S.*? callable class: "):
        text = re.sub(noise, "", text, flags=re.DOTALL)
    return " ".join(re.sub(r"<class '(.*?)'>", r"\1", text).split())


def _hint(name: str, names: Collection[str]) -> str:
    """The name that was probably meant, or all of them if they are few."""
    if near := get_close_matches(name, names, n=1):
        return f"did you mean {near[0]}?"
    known = f"known: {', '.join(sorted({*names}))}"
    return shorten(known, 180, placeholder=" ...") if 0 < len(names) <= 30 else _HELP


def class_hint(name: str, wanted: Any) -> str:
    """`_hint` for the classes that a key accepts; its annotation if there are none or many."""
    names: list[str] = []
    left: list[type] = [base] if (base := base_of(wanted)) else []
    while left:
        children: list[type] = type.__subclasses__(left.pop())
        left += children
        names += [c.__name__ for c in children if _has_short_name(c)]
    if (hint := _hint(name.rpartition(".")[2], names)) != _HELP or wanted is None:
        return hint
    if base and "Callable" in str(wanted):
        return f"name a {base.__name__} by class_path"
    form = ", as [one,other]" * ("Sequence[" in str(wanted))
    return "give " + re.sub(r"\b(?:[a-z]\w*\.)+(?=[A-Z])", "", _plain(str(wanted))) + form


def _has_short_name(cls: type) -> bool:
    """Whether a class of these packages may be named without its module."""
    package = cls.__module__.partition(".")[0]
    public = cls.__name__[0] != "_" and not isabstract(cls)
    return public and package in ("lightfed", "lightning", "torch")


def base_of(wanted: Any) -> type | None:
    """The class whose subclasses a key names by `class_path`; None if it names none."""
    if isclass(wanted) and not get_args(wanted):
        plain = wanted.__module__ in ("builtins", "collections.abc", "datetime", "pathlib", "torch")
        return None if plain else wanted
    return next(filter(None, map(base_of, reversed(get_args(wanted)))), None)
