"""Checks configuration files for what YAML would change without a word.

YAML keeps the last of two equal keys, and reads some numbers differently from how they are
written. jsonargparse sees only the result, so both have to be found in the file itself.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from lightfed.cli.named_files import files_of
from lightfed.cli.shipped import is_study
from lightfed.cli.yaml_words import misread
from lightfed.utils.errors import UserError


class _Duplicate(NamedTuple):
    """A key that one mapping of a file has twice.

    Attributes:
        key: The whole key, with dots.
        first_line: Line in which it stands first, counted from 1.
        second_line: Line in which it stands again.
    """

    key: str
    first_line: int
    second_line: int


class _HoldsItselfError(Exception):
    """A value of a file contains itself by an anchor, so that it has no end.

    Attributes:
        line: Line at which the value begins, counted from 1.
    """

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line}")
        self.line = line


def check_files(words: Sequence[str]) -> None:
    """Check the configuration files that a command names.

    A file that is not YAML passes: the parser reports it better.

    Args:
        words: The words of the command.

    Raises:
        UserError: A file has a key twice, or a number in base 60 or with leading zeros, which YAML
            would convert. The error names the lines. Or a file is nested too deeply to be read, or
            a value contains itself, or it is a study.
    """
    for path in files_of(words):
        if is_study(path):
            raise UserError(
                key="--config",
                found=f"{path} is a study of several methods, and not the configuration of a run",
                fix=f"run it with `lightfed study {path}`",
            )
        check_file(path, "--config")


def check_file(path: Path, key: str) -> None:
    """Check a file of configurations or of a study.

    A file that is not YAML passes: whoever reads it next says what is wrong with it.

    Args:
        path: The file.
        key: What names the file on the command line, for an error about the whole file.

    Raises:
        UserError: YAML would read the file otherwise than it is written. See `check_files`.
    """
    try:
        root = yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader)
        duplicates = list(_duplicates(root, above=""))
        misread_numbers = list(misread(root))
    except RecursionError as error:
        raise UserError(
            key=key,
            found=f"{path} is nested too deeply",
            fix="write it flat, as the shipped configurations are",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError):
        # The parser reads the file again and says what is wrong with it.
        return
    except _HoldsItselfError as error:
        raise UserError(
            key=key,
            found=f"the value at line {error.line} of {path} contains itself, by an anchor",
            fix="write it out, without the alias",
        ) from error

    for duplicate in duplicates:
        lines = f"lines {duplicate.first_line} and {duplicate.second_line} of {path}"
        raise UserError(duplicate.key, found=f"given twice, in {lines}", fix="keep one")

    for misread_key, text, line in misread_numbers:
        raise UserError(
            key=misread_key,
            found=f"{text}, in line {line} of {path}, which YAML reads as another number",
            fix="write it in decimal without leading zeros, or as a word in quotes",
        )


def _duplicates(node: Any, above: str, enclosing: tuple[Any, ...] = ()) -> Iterator[_Duplicate]:
    """Yield the keys that a mapping of a file has twice, at any depth.

    Args:
        node: A node of the file, as `yaml.compose` gives it.
        above: The key of the node, with a dot at its end; empty for the root.
        enclosing: The nodes that contain this one.

    Raises:
        _HoldsItselfError: A node contains itself.
    """
    if any(node is outer for outer in enclosing):
        raise _HoldsItselfError(node.start_mark.line + 1)
    enclosing = (*enclosing, node)

    if isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            yield from _duplicates(item, f"{above}{position}.", enclosing)

    if isinstance(node, yaml.MappingNode):
        line_of_key: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1

            # `<<` merges another mapping into this one, and may be written several times.
            if key in line_of_key and key != "<<":
                yield _Duplicate(f"{above}{key}", line_of_key[key], line)
            line_of_key[key] = line

            yield from _duplicates(value_node, f"{above}{key}.", enclosing)
