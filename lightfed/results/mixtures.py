"""Levels of clients (HeteroFL, Diao et al., ICLR 2021) and the names of their combinations."""

import math
from collections import Counter
from collections.abc import Mapping
from itertools import count, takewhile

from lightfed.utils.keys import LEVELS

UNEVEN = 0.05  # of the clients: rounding error of a level's share that still counts as equal


def level_name(rate: float) -> str:
    """The letter of the rate, or the rate itself."""
    return next((level for level, width in LEVELS.items() if width == rate), f"{rate:g}")


def level_counts(settings: Mapping[str, str]) -> dict[float, int]:
    """Clients by rate, the widest first; a group without `rate` and `level` has rate 1."""
    counts: Counter[float] = Counter()
    groups = (f"model.clients.{place}" for place in count())
    for group in takewhile(lambda group: f"{group}.count" in settings, groups):
        rate, level = (settings.get(f"{group}.{key}", "null") for key in ("rate", "level"))
        width = LEVELS.get(level, 1.0) if rate == "null" else float(rate)
        counts[width] += int(settings[f"{group}.count"])
    return dict(sorted(counts.items(), reverse=True))


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
    tenths = all(10 * number % clients == 0 for number in counts.values())
    unit = clients / 10 if tenths else math.gcd(*counts.values())
    return "-".join(f"{level_name(rate)}{number / unit:.0f}" for rate, number in counts.items())
