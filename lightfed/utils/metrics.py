"""What the name of a metric says about it."""

import re

# The short words of the second line count only if no letter is next to them, as in `val/ppl` and
# `top1_err`.
_FALLING = re.compile(
    r"loss|perplexity|error|mse|mae|mape|nll|brier"
    r"|(?<![a-z])(ppl|err|ece|wer|cer|eer|bpc|kl)(?![a-z])"
)


def lower_is_better(metric: str) -> bool:
    """Return whether a metric falls as a model gets better, as a loss or an error does.

    A participation gap is that of a metric: it falls if the metric rises, and rises towards 0 if
    the metric falls.
    """
    falls = _FALLING.search(metric.lower()) is not None
    is_gap = metric.removeprefix("validation/").startswith("gap/")
    return falls != is_gap
