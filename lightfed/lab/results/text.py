"""Numbers and names for readers: three digits and a decimal unit (1 MB = 10^6 bytes).

A value that was not measured (NaN) is a dash.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

NOTHING = "-"
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
FALLING = re.compile(
    r"loss|perplexity|error|mse|mae|mape|nll|brier"
    r"|(?<![a-z])(ppl|err|ece|wer|cer|eer|bpc|kl)(?![a-z])"  # and `val/ppl`, `top1_err`
)
ACCURACY = re.compile(r"accuracy|(?<![a-z])acc(?![a-z])")  # and `val/acc`, `top1_acc`


def is_share(metric: str) -> bool:
    """Whether a metric is in 0..1 and shown in per cent."""
    return ACCURACY.search(metric.lower()) is not None


def lower_is_better(metric: str) -> bool:
    return FALLING.search(metric.lower()) is not None


def direction(metric: str) -> int:
    """1 if higher is better, -1 if lower is."""
    return -1 if lower_is_better(metric) else 1


def metric_text(metric: str, value: float, half: float = math.nan) -> str:
    """The value, with half its interval if known."""
    if not math.isfinite(value):
        return NOTHING if math.isnan(value) else "not finite"
    known = math.isfinite(half)
    if is_share(metric):
        return f"{100 * value:.2f}" + f" +- {100 * half:.2f}" * known + " %"
    return f"{value:.4g}" + f" +- {half:.2g}" * known


def signed(metric: str, value: float) -> str:
    """A difference with its sign, in percentage points or in the metric's unit."""
    return f"{100 * value:+.2f}" if is_share(metric) else f"{value:+.3g}"


def bytes_text(value: float) -> str:
    return _scaled_text(value, "B")


def flops_text(value: float) -> str:
    return _scaled_text(value, "FLOPs")


def seconds_text(value: float) -> str:
    if math.isnan(value):
        return NOTHING
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 120:
        return f"{_three_digits(value)} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def count_text(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:,.0f}"


def counted(number: int, word: str) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def seeds_text(seeds: Sequence[int]) -> str:
    """`0-2 13-25`."""
    # within a stretch of consecutive seeds, seed minus position is constant
    stretches = itertools.groupby(enumerate(seeds), key=lambda pair: pair[1] - pair[0])
    return " ".join(ends_text([seed for _, seed in own], "-") for _, own in stretches)


def ends_text(numbers: Sequence[int], between: str = " to ") -> str:
    """The first and the last one, `4 to 40`; once if they are equal, empty without any."""
    return between.join(dict.fromkeys(map(str, (*numbers[:1], *numbers[-1:]))))


def readable(name: str) -> str:
    """`personal/accuracy_worst10` -> `personal accuracy worst 10 %`."""
    return name.replace("_worst10", " worst 10 %").replace("/", " ").replace("_", " ")


def sentence(name: str) -> str:
    """The readable name with a capital, for titles; a word with capitals is unchanged (`mIoU`)."""
    text = readable(name)
    first = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if first.islower() else text


def holders(groups: Mapping[str, int], parts: Sequence[float]) -> list[str]:
    """What each client holds: its group's model, and the density of its part if these differ.

    `groups` are numbers of clients by name; client i holds the part i mod length.
    """
    names = [name for name, count in groups.items() for _ in range(count)]
    if len({*parts}) < 2:
        return names
    return [f"{name}, density {parts[i % len(parts)]:g}" for i, name in enumerate(names)]


def goal_text(column: str, target: float) -> str:
    """`79.76 % personal accuracy`."""
    return f"{metric_text(column, target)} {readable(column)}"


def unit_of(largest: float, unit: str) -> tuple[float, str]:
    """Divisor and name of the unit in which `largest` is in 1..1000, such as (1e6, "MB")."""
    found = ((factor, prefix + unit) for factor, prefix in PREFIXES if largest >= factor)
    return next(found, (1.0, unit))


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2}f}"


def _scaled_text(value: float, unit: str) -> str:
    if math.isnan(value):
        return NOTHING
    factor, name = unit_of(abs(value), unit)
    return f"{value:.0f} {name}" if factor == 1 else f"{_three_digits(value / factor)} {name}"
