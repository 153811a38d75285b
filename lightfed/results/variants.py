"""In which of its options an experiment differs from most others that it stands beside."""

from collections import Counter
from collections.abc import Mapping, Sequence


def usual(options: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The most frequent value of each option, `unset` where most have none.

    Of a tie, neither is usual: all are told.
    """
    names = dict.fromkeys(name for one in options for name in one)
    found = {}
    for name in names:
        (value, times), *others = Counter(one.get(name, "unset") for one in options).most_common(2)
        found[name] = "" if others and others[0][1] == times else value
    return found


def difference(options: Mapping[str, str], usual: Mapping[str, str]) -> str:
    """The options that are not the usual ones, as `norm gn, width 0.5`."""
    own = {name: options.get(name, "unset") for name in usual}
    return ", ".join(f"{name} {own[name]}" for name in usual if own[name] != usual[name])
