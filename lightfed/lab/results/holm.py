"""Several claims of one study, corrected together.

Of 21 claims that are all false, one in twenty would be shown by luck at 95 %, and in two studies of
three there would be at least one. Holm's procedure keeps the probability of one wrong claim or more
at 5 %, whatever the claims have in common, such as a rival.

Source: S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
Statistics 6 (1979) 65-70.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightfed.lab.results.paired import LEVEL

# What a corrected p value must not exceed.
ERROR = round(1 - LEVEL, 12)


def corrected(p_values: Sequence[float], claims: int | None = None) -> list[float]:
    """Return the p values of several claims, corrected together.

    A claim is shown if its corrected p value is at most `ERROR`.

    Args:
        p_values: The p value of each claim by itself. NaN counts as 1: nothing is known of it.
        claims: The number of claims of the study, if more were made than have a p value. The others
            count as 1, so that what is shown now is still shown once they have one.

    Returns:
        The corrected p values in the same order, at most 1.
    """
    known = [1.0 if math.isnan(p) else p for p in p_values]
    number = max(len(known), claims or 0)

    # The smallest p value is multiplied by the number of all claims, the next one by one less. None
    # may be less than that of a claim before it.
    found = np.ones(len(known))
    largest = 0.0
    for rank, place in enumerate(np.argsort(known, kind="stable")):
        largest = max(largest, min(1.0, (number - rank) * known[place]))
        found[place] = largest
    return [float(p) for p in found]


def said(number: int, known: int | None = None) -> list[str]:
    """Return a note on the correction, as a list of one sentence; empty for a single claim.

    Args:
        number: The number of claims that are corrected together.
        known: How many of them have a result, if not all.
    """
    if number < 2:
        return []

    note = (
        f"{number} claims, corrected together by Holm (1979): the probability that one or more of "
        f"them are wrongly shown is at most {100 * ERROR:.0f} %; "
        "each interval is a 95 % interval by itself"
    )
    if known is not None and known < number:
        note += f"; {number - known} of the claims have no result yet and count as not shown"
    return [note]
