"""The options in which an experiment differs from most of those it is compared with."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def gathered(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by key, in the order of each key's first item."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def usual(options: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The most frequent value of each option; `unset` if most have none.

    In a tie no value is usual, so all of them are shown.
    """
    names = dict.fromkeys(name for one in options for name in one)
    found = {}
    for name in names:
        (value, times), *others = Counter(one.get(name, "unset") for one in options).most_common(2)
        found[name] = "" if others and others[0][1] == times else value
    return found


def difference(options: Mapping[str, str], usual: Mapping[str, str]) -> str:
    """The options with unusual values, such as `norm gn, width 0.5`."""
    own = {name: options.get(name, "unset") for name in usual}
    return ", ".join(f"{name} {own[name]}" for name in usual if own[name] != usual[name])


def variants(options: Sequence[Mapping[str, str]], alike: Sequence[Hashable]) -> list[str]:
    """How each differs from most of those with the same key.

    Args:
        options: of each experiment.
        alike: the key of each experiment.
    """
    paired = list(zip(options, alike, strict=True))
    members = gathered(paired, lambda pair: pair[1])
    most = {key: usual([own for own, _ in found]) for key, found in members.items()}
    return [difference(own, most[key]) for own, key in paired]
