"""What a user wrote: the options of a command line, and the configuration files that they name."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]


class Written:
    """Options in their order, configuration files among them, as far as they can be read.

    Args:
        argv: the words of a command line.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._options: list[tuple[str, str]] = []
        for word, after in zip(argv, [*argv[1:], ""], strict=False):
            if word == "-c" or word.startswith("--"):
                key, equals, value = word.lstrip("-").partition("=")
                self._options.append(("config" if key == "c" else key, value if equals else after))

    @property
    def files(self) -> list[str]:
        """The configuration files, by name."""
        return [value for key, value in self._options if key == "config"]

    def get(self, key: str) -> Any:
        """The last value of a key, whose steps may be positions in lists; None if it has none."""
        last = None
        for option, text in self._options:
            if option == "config":
                value = _below(_read(text)[0], key.split("."))
            elif key == option:
                value = _parse(text)[0]
            else:
                continue
            last = last if value is None else value
        return last

    def beside_class_path(self, key: str) -> str | None:
        """A key that stands beside the value's `class_path` and is none that may."""
        value = self.get(key)
        if not isinstance(value, dict) or "class_path" not in value:
            return None
        return next((k for k in value if k not in ("class_path", "init_args", "dict_kwargs")), None)

    def broken(self) -> str | None:
        """The first configuration file that is none, and why."""
        for path in self.files:
            content, fault = _read(path)
            if fault is None and not isinstance(content, dict):
                fault = "it holds no keys"
            if fault is not None:
                return f"{path} is no configuration: {fault}"
        return None


def one_line(message: str) -> str:
    """Collapse white space."""
    return re.sub(r"\s+", " ", message).strip()


def _read(path: str) -> tuple[Any, str | None]:
    try:
        return _parse(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        return None, one_line(str(error))


def _parse(text: str) -> tuple[Any, str | None]:
    """The content of a YAML text, or None and what is wrong with it."""
    try:
        return yaml.safe_load(text), None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        return None, f"line {line}, {error.problem}"
    except yaml.YAMLError as error:
        return None, one_line(str(error))


def _below(node: Any, path: Sequence[str]) -> Any:
    for step in path:
        if isinstance(node, list) and step.isdigit() and int(step) < len(node):
            node = node[int(step)]
        elif isinstance(node, dict):
            node = node.get(step)
        else:
            return None
    return node
