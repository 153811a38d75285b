"""Numbers and names for readers: three digits and a decimal unit (1 MB = 10^6 bytes).

A value that was not measured (NaN) is a dash.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

from lightfed.utils.metrics import lower_is_better

NOTHING = "-"
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

# Names of accuracies, such as `val/acc` and `top1_acc`.
ACCURACY = re.compile(r"accuracy|(?<![a-z])acc(?![a-z])")


def is_share(metric: str) -> bool:
    """Return whether a metric is in 0..1 and shown in per cent."""
    return ACCURACY.search(metric.lower()) is not None


def direction(metric: str) -> int:
    """Return 1 if a higher value of a metric is better, and -1 if a lower one is."""
    return -1 if lower_is_better(metric) else 1


def metric_text(metric: str, value: float, half: float = math.nan) -> str:
    """Return the value of a metric as text, such as `79.76 +- 0.31 %`.

    Args:
        metric: The name of the metric.
        value: The value.
        half: Half of its interval, if it is known.
    """
    if math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "not finite"

    has_interval = math.isfinite(half)
    if is_share(metric):
        interval = f" +- {100 * half:.2f}" if has_interval else ""
        return f"{100 * value:.2f}{interval} %"
    interval = f" +- {half:.2g}" if has_interval else ""
    return f"{value:.4g}{interval}"


def signed(metric: str, value: float) -> str:
    """Return a difference with its sign, in percentage points or in the metric's unit."""
    return f"{100 * value:+.2f}" if is_share(metric) else f"{value:+.3g}"


def bytes_text(value: float) -> str:
    """Return a number of bytes as text, such as `1.23 MB`."""
    return _scaled_text(value, "B")


def flops_text(value: float) -> str:
    """Return a number of operations as text, such as `1.23 GFLOPs`."""
    return _scaled_text(value, "FLOPs")


def joules_text(value: float) -> str:
    """Return an energy as text, such as `1.23 kJ`."""
    return _scaled_text(value, "J")


def seconds_text(value: float) -> str:
    """Return a time in seconds as text, such as `12 ms`, `1.23 s`, `5.0 min` or `3.1 h`."""
    if math.isnan(value):
        return NOTHING
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 120:
        return f"{_three_digits(value)} s"
    if value < 7200:
        return f"{value / 60:.1f} min"
    return f"{value / 3600:.1f} h"


def count_text(value: float) -> str:
    """Return a number as text, such as `1,234`."""
    return NOTHING if math.isnan(value) else f"{value:,.0f}"


def counted(number: int, word: str) -> str:
    """Return a number of things, such as `1 rank` or `4 ranks`."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def seeds_text(seeds: Sequence[int]) -> str:
    """Return ascending seeds as text, such as `0-2 13-25`."""
    # Within a stretch of consecutive seeds, seed minus position is constant.
    stretches = itertools.groupby(enumerate(seeds), key=lambda pair: pair[1] - pair[0])
    texts = []
    for _, pairs in stretches:
        texts.append(ends_text([seed for _, seed in pairs], between="-"))
    return " ".join(texts)


def named_seeds(seeds: Sequence[int]) -> str:
    """Return seeds as text with their name, such as `seed 3` or `seeds 0-2 13`."""
    word = "seed" if len(seeds) == 1 else "seeds"
    return f"{word} {seeds_text(sorted(seeds))}"


def ends_text(numbers: Sequence[int], between: str = " to ") -> str:
    """Return the first and the last number, such as `4 to 40`.

    If they are equal, there is one; without numbers it is empty.
    """
    if not numbers:
        return ""
    first = str(numbers[0])
    last = str(numbers[-1])
    return first if first == last else f"{first}{between}{last}"


def readable(name: str) -> str:
    """Return a column in words: `personal/accuracy_worst10` is `personal accuracy worst 10 %`."""
    return name.replace("_worst10", " worst 10 %").replace("/", " ").replace("_", " ")


def sentence(name: str) -> str:
    """Return a column in words with a capital, for titles; `mIoU` stays as it is."""
    text = readable(name)
    first_word = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if first_word.islower() else text


def holders(groups: Mapping[str, int], parts: Sequence[float]) -> list[str]:
    """Return what each client holds: its group's model, and the density of its part.

    The density is there only if clients have different ones.

    Args:
        groups: The number of clients of each group, by name.
        parts: The densities. Client i has the one at i modulo their number.
    """
    names: list[str] = []
    for name, count in groups.items():
        names += [name] * count

    if len(set(parts)) < 2:
        return names
    return [f"{name}, density {parts[i % len(parts)]:g}" for i, name in enumerate(names)]


def goal_text(column: str, target: float) -> str:
    """Return a value of a column in words, such as `79.76 % personal accuracy`."""
    return f"{metric_text(column, target)} {readable(column)}"


def unit_of(largest: float, unit: str) -> tuple[float, str]:
    """Return the divisor and the name of the unit in which a value is in 1..1000.

    For 2,000,000 and `B` they are 1e6 and `MB`.
    """
    for factor, prefix in PREFIXES:
        if largest >= factor:
            return factor, prefix + unit
    return 1.0, unit


def _three_digits(value: float) -> str:
    size = abs(value)
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"


def _scaled_text(value: float, unit: str) -> str:
    if math.isnan(value):
        return NOTHING
    factor, name = unit_of(abs(value), unit)
    if factor == 1:
        return f"{value:.0f} {name}"
    return f"{_three_digits(value / factor)} {name}"
