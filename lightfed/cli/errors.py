"""Turns errors of the parser, of Lightning and of classes into one line for the user.

The wording is jsonargparse's and Lightning's. This file adds the whole key, which jsonargparse (as
of 4.53) spreads over nested messages, and the name that was probably meant.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightfed.cli.hints import SEE_HELP, accepted, class_hint, name_hint, plain_sentence
from lightfed.cli.usage import no_command, unknown_command
from lightfed.cli.value_errors import OF_KEY, REQUIRED, item_at_fault, value_error
from lightfed.utils.errors import UserError

# The key that a user of papers or of other trainers looks for, by the last part of theirs.
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

# Options of commands that are in none of the sections of a configuration.
_OPTIONS_OF_COMMANDS = (
    "ckpt_path",
    "config",
    "json",
    "pause_after",
    "rounds",
    "verbose",
    "world_size",
)

_NEEDS_LESS_MEMORY = (
    "lower the sizes of data.dataset, data.batch_size, model.clients or model.pack_memory"
)

_UNKNOWN_KEY = re.compile(r"(?:Subcommand .*? option '|unrecognized arguments: (?:--)?)([\w.-]+)")
_UNKNOWN_COMMAND = re.compile(r"argument subcommand: invalid choice: '(.*?)' \(choose")

# A logger or callback that cannot be made, among the other alternatives of its type.
_RAISED_BY_CLASS = re.compile(
    r"Does not validate.*?\.(?P<base>Logger|Callback)\b.*?"
    r"\nErrors:(?P<errors>.*)\nGiven value type",
    re.DOTALL,
)
_OTHER_ALTERNATIVES = re.compile(
    r"\n  - (?:Not a valid subclass|Expected a )[^\n]*(?:\n    [^\n]*)*"
)


def parser_error(message: str, argv: Sequence[str], sections: Mapping[str, Any]) -> UserError:
    """Return the error for a message of jsonargparse about a command.

    Args:
        message: The message of jsonargparse.
        argv: The words of the command.
        sections: The class or function whose arguments are below each key; "" is no key.
    """
    annotation_of: dict[str, Any] = dict.fromkeys(_OPTIONS_OF_COMMANDS)
    for section, owner in sections.items():
        for name, annotation in accepted(owner).items():
            annotation_of[f"{section}.{name}" if section else name] = annotation

    unknown = _UNKNOWN_KEY.match(message)
    if unknown is not None:
        key = unknown[1]
        known_elsewhere = WORDS.get(key.rpartition(".")[2])
        fix = f"use {known_elsewhere}" if known_elsewhere else name_hint(key, annotation_of)
        return UserError(key, found="no such key", fix=fix)

    required = REQUIRED.match(message)
    if required is not None:
        key = required["key"]
        if argv:
            # jsonargparse puts the command before the key: `fit.data.dataset`.
            key = key.removeprefix(f"{argv[0]}.")
        return UserError(key, plain_sentence(message), class_hint("", annotation_of.get(key)))

    command = _UNKNOWN_COMMAND.match(message)
    if command is not None:
        return unknown_command(command[1])
    if message.startswith('expected "subcommand" to be one of'):
        return no_command()

    of_argument = re.match(r"argument (?:-\w/)?(\S+): (.*)", message)
    if of_argument is not None:
        return UserError(of_argument[1], of_argument[2], SEE_HELP)

    of_key = OF_KEY.match(message)
    if of_key is not None:
        key = of_key["key"]
        annotation = annotation_of.get(key)
        key += item_at_fault(key, annotation, argv)
        return value_error(key, of_key["message"], annotation)

    is_about_file = re.search("config|codec|before subcommand", message) is not None
    return UserError("--config" if is_about_file else "lightfed", plain_sentence(message), SEE_HELP)


def run_error(error: Exception) -> UserError | None:
    """Return the line for an error of Lightning or for a lack of memory.

    Args:
        error: An error of a command.

    Returns:
        The line if it is Lightning's error about flags or callbacks, or if there is not enough
        memory; None for any other error.
    """
    message = plain_sentence(str(error)).rstrip(".")

    if isinstance(error, MemoryError) or "can't allocate memory" in message:
        return UserError("memory", message or "exhausted", _NEEDS_LESS_MEMORY)

    if re.match(r"Early stopping cond|`ModelCheckpoint\(mon|Found more than one state", message):
        message = re.sub(r"Pass in or modify your .*? following:", "There are", message)
        return UserError("trainer.callbacks", message, SEE_HELP)

    # Lightning raises a ValueError for this one.
    is_about_precision = message.startswith("Received both `precision=")
    if not isinstance(error, MisconfigurationException) and not is_about_precision:
        return None

    flag = re.search(r"\bTrainer\((\w+)|`(\w+)` parameter|\b(?:plugin)s?\b", message)
    key = "trainer"
    if flag is not None:
        key = f"trainer.{flag[1] or flag[2] or 'plugins'}"

    is_finished = message.startswith("You restored")
    return UserError(key, message, fix="give more" if is_finished else SEE_HELP)


def class_error(error: Exception) -> UserError | None:
    """Return the line for a class that cannot be made.

    Args:
        error: The error of jsonargparse, or of the class itself.

    Returns:
        The UserError that one of our classes has raised, or the line for a logger or callback that
        raises or lacks a package; None for any other error.
    """
    message = str(error)

    # A logger or callback of Lightning lacks a package.
    requirement = re.search(r"(Requirement '.*?' not met).*`(pip install .*?)`", message)
    if requirement is not None:
        return UserError("trainer", found=requirement[1], fix=requirement[2])
    if "`tensorboard` nor `tensorboardX` is available" in message:
        return UserError(
            key="trainer.logger",
            found="TensorBoardLogger without the package tensorboard",
            fix="pip install tensorboard",
        )

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return cause
        cause = cause.__cause__

    unknown = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", message)
    if isinstance(error, TypeError) and unknown is not None:
        return UserError(f"{unknown[1]}.{unknown[2]}", "no such argument", "leave it out")

    raised = _RAISED_BY_CLASS.match(message)
    if raised is not None:
        found = _OTHER_ALTERNATIVES.sub("", raised["errors"]).strip(" \n-")
        if found:
            key = "trainer.logger" if raised["base"] == "Logger" else "trainer.callbacks"
            return UserError(key, plain_sentence(found), "correct its init_args")
    return None


def whole_key(refused: UserError, config: Mapping[str, Any]) -> UserError:
    """Return an error with the key of the configuration, if it names a class and its argument.

    A class knows its arguments, such as `Exponential.mean`, but not where it is written.

    Args:
        refused: The error of the class.
        config: The configuration in plain values.

    Returns:
        The error with the whole key, or the same error if the class is not in the configuration.
    """
    named = re.fullmatch(r"([A-Z]\w*)\.(\w+)", refused.key)
    if named is None:
        return refused

    uses = list(_uses_of_argument(named[1], named[2], config, above=""))
    if not uses:
        return refused

    # If the class is there several times, it is probably the one with the rejected value.
    keys_with_rejected_value = [key for key, value in uses if _is_shown_as(value, refused.found)]
    all_keys = [key for key, _ in uses]
    key = (keys_with_rejected_value or all_keys)[0]
    return UserError(key, refused.found, refused.fix)


def _is_shown_as(value: Any, text: str) -> bool:
    """Return whether an error about a value shows it by this text."""
    if isinstance(value, int | float):
        return text in (f"{value}", f"{value:g}")
    return text == f"{value}"


def _uses_of_argument(
    class_name: str, argument: str, value: Any, above: str
) -> Iterator[tuple[str, Any]]:
    """Yield the whole keys of an argument of a class, and the values that are given there.

    Args:
        class_name: The bare name of the class.
        argument: The name of the argument.
        value: A part of the configuration.
        above: The key of that part, with a dot at its end; empty for the whole configuration.
    """
    if isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from _uses_of_argument(class_name, argument, item, f"{above}{position}.")

    if isinstance(value, Mapping):
        name_here = str(value.get("class_path", "")).rpartition(".")[2]
        arguments = value.get("init_args")
        if name_here == class_name and isinstance(arguments, Mapping):
            yield f"{above}init_args.{argument}", arguments.get(argument)

        for key, inner in value.items():
            yield from _uses_of_argument(class_name, argument, inner, f"{above}{key}.")
