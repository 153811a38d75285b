"""The settings of a run by their dotted keys, and in which of them runs differ."""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import yaml  # type: ignore[import-untyped]

from lightfed.results.csvfile import reading
from lightfed.utils.keys import column_of, experiment, flat, long_name

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

# of settings whose values explain themselves in a label
NAMELESS = ("levels", "optimizer", "partition")
LAST = ("max_epochs", "lr_schedule")  # they follow from what experiments are about
NOTHING_ELSE = re.compile(r"(?!)")


def options(
    settings: Mapping[str, str],
    *,
    but: re.Pattern[str] = NOTHING_ELSE,
    unspoken: re.Pattern[str] = NOTHING_ELSE,
) -> dict[str, str]:
    """The settings that define an experiment, by their names in reports; classes by their own.

    `but` matches keys to leave out, `unspoken` the beginning of a key to drop from its name. Keys
    that would share a name have longer ones, such as `algorithm lr` and `optimizer lr`.
    """
    texts = {k: v for k, v in experiment(settings)["settings"].items() if not but.match(k)}
    names = {key: column_of(unspoken.sub("", key)) for key in texts}
    times = Counter(names.values())
    return {
        name if times[name] == 1 else long_name(key): (
            texts[key].rsplit(".", 1)[-1] if key.endswith("class_path") else texts[key]
        )
        for key, name in names.items()
    }


def read_settings(config: str, path: Path) -> dict[str, str]:
    """`{"model.clients.0.level": "a", ...}`: every value as the text in the file.

    A UserError if `config`, the content of `path`, is not YAML.
    """
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # keeps scalars as text
    with reading(path):
        content = yaml.load(config, Loader=loader)
    return {key: str(value) for key, value in flat(content) if key and value != ""}


def gathered(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by key, in the order of each key's first item."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def told_apart(options: Sequence[Mapping[str, str]], known: str = "") -> list[str]:
    """Few settings that tell experiments apart: `lr 0.1`; equal ones get equal texts.

    Earlier settings are preferred, and all to those of LAST. Empty where none is needed. The values
    of NAMELESS stand alone; readers know the setting `known`.
    """
    chosen = [known]
    names = dict.fromkeys(name for one in options for name in one)
    for name in sorted(names, key=lambda name: name.startswith(LAST)):
        tried = [tuple(one.get(key) for key in (*chosen, name)) for one in options]
        if len(set(tried)) > len({values[:-1] for values in tried}):
            chosen.append(name)
    texts = [{name: one[name] for name in chosen[1:] if name in one} for one in options]
    return [
        ", ".join(text if name in NAMELESS else f"{name} {text}" for name, text in own.items())
        for own in texts
    ]
