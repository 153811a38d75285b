"""The verdict on a pair of methods as a table, for files beside the page of `lightfed compare`."""

from __future__ import annotations

from pandas import DataFrame

from lightfed.lab.results.groups import Group
from lightfed.lab.results.verdicts import answer_of, gain_text, p_of, p_text
from lightfed.lab.until import Ended


def pair_claims(a: Group, b: Group, metric: str, ended: Ended | None = None) -> DataFrame:
    """Return a table of one row: the verdict, the difference with its interval, and the p value.

    Args:
        a: The experiment that is compared with.
        b: The other one, with runs of the same seeds.
        metric: The column of the verdict.
        ended: A comparison whose seeds were not fixed: then its own verdict and interval are shown.
    """
    difference, verdict = answer_of(a, b, metric)
    half = None
    p = p_of(a, b, metric)
    if ended is not None:
        difference = ended.look.difference
        verdict = ended.verdict
        half = ended.look.half
        p = ended.look.p

    heads = ["method", f"against {a.name}", "difference", "p"]
    row = (b.name, verdict, gain_text(difference, metric, half=half), p_text(p))
    return DataFrame([row], columns=heads, dtype="str")
