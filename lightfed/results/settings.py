"""The settings in a run's config.yaml by their dotted keys."""

import re
from collections.abc import Mapping

KEY = re.compile(r"([^\s:#'\"][^:]*):(?:\s+(.*))?$")

# what makes an experiment another one, not where and how it was run
OPTION = re.compile(
    r"trainer\.(max_epochs|gradient_clip_(val|algorithm)|precision)$"
    r"|model\.(?!(export|evaluate)\b|(seed|store|accumulate|exchange_buffer|eval_clients)$)"
    r"|data\.(?!dataset\.init_args\.(root|download)$|(eval_batch_size|channels_last)$)"
)

_FORMER = re.compile(r"^model\.cohorts\b")  # the key's name in version 0.1


def options(told: Mapping[str, str], *, but: re.Pattern[str]) -> dict[str, str]:
    """The settings that make an experiment another one, without those whose keys match `but`."""
    return {k: value for k, value in told.items() if OPTION.match(k) and not but.match(k)}


def settings(config: str) -> dict[str, str]:
    """`{"model.clients.0.level": "a", ...}`: every value as the text that stands there.

    Reads YAML as a run writes it: block style, a key or an item a line. Of a value that goes on in
    further lines the first is taken; a value in braces or brackets is one text.
    """
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []  # what a line lies in: depth, and key or place in a list
    for line in config.splitlines():
        rest = line.lstrip(" ")
        indent, item = len(line) - len(rest), False
        while rest.startswith("- "):
            depth = 2 * indent + 1  # odd: an item may stand below its key without an indent
            path.append((depth, str(_leave(path, depth) + 1)))
            inner = rest[1:].lstrip(" ")
            indent, rest, item = indent + len(rest) - len(inner), inner, True
        setting = KEY.match(rest)
        if setting:
            _leave(path, 2 * indent)
            path.append((2 * indent, setting.group(1)))
        value = setting.group(2) if setting else rest if item else None
        if value:
            key = ".".join(step for _, step in path)
            found[_FORMER.sub("model.clients", key)] = value.strip().strip("'\"")
    return found


def _leave(path: list[tuple[int, str]], depth: int) -> int:
    """Steps out of all that is as deep or deeper; the place of the item that lay there, or -1."""
    place = -1
    while path and path[-1][0] >= depth:
        at, step = path.pop()
        place = int(step) if at == depth and depth % 2 else -1
    return place
