"""Levels of clients (HeteroFL, Diao et al., ICLR 2021) and the names of their combinations."""

import math
import re
from collections import Counter
from collections.abc import Mapping

from lightfed.utils.keys import LEVELS

UNEVEN = 0.05  # of the clients: rounding error of a level's share that still counts as equal


def level_name(rate: float) -> str:
    """The letter of the rate, or the rate itself."""
    return next((level for level, width in LEVELS.items() if width == rate), f"{rate:g}")


def client_group_keys(settings: Mapping[str, str]) -> list[str]:
    """`model.clients.0` and so on, as they are in config.yaml."""
    found = (re.match(r"model\.clients\.\d+", name) for name in settings)
    return list(dict.fromkeys(key[0] for key in found if key))


def level_counts(settings: Mapping[str, str]) -> dict[float, int]:
    """Clients by rate, the widest first; empty if a rate or a count is not known."""
    counts: Counter[float] = Counter()
    for key in client_group_keys(settings):
        rate, members = rate_of(settings, key), settings.get(f"{key}.count", "")
        if not rate or not members.isdecimal():
            return {}
        counts[rate] += int(members)
    return dict(sorted(counts.items(), reverse=True))


def rate_of(settings: Mapping[str, str], client_group: str) -> float | None:
    """The width of a group: its `rate` or `level`, 1 without both; None if invalid."""
    rate, level = (settings.get(f"{client_group}.{key}", "null") for key in ("rate", "level"))
    if rate == "null":
        return LEVELS.get(level, 1.0)
    try:
        return float(rate) if 0 < float(rate) <= 1 else None
    except ValueError:
        return None


def even(counts: Mapping[float, int]) -> bool:
    """Whether levels have equal shares, up to rounding to whole clients."""
    spread = max(counts.values()) - min(counts.values())
    return spread < len(counts) and spread <= UNEVEN * sum(counts.values())


def combination(counts: Mapping[float, int]) -> str:
    """`a-e` for equal shares, else shares in tenths, or in smallest numbers: `a2-b8`.

    Counts are those of clients by rate, the widest first.
    """
    if even(counts):
        return "-".join(map(level_name, counts))
    clients = sum(counts.values())
    tenths = all(10 * count % clients == 0 for count in counts.values())
    unit = clients / 10 if tenths else math.gcd(*counts.values())
    return "-".join(f"{level_name(rate)}{count / unit:.0f}" for rate, count in counts.items())
