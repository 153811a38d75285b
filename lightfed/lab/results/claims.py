"""What runs say of the claims of a study, which are corrected together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightfed.lab.results import holm, text
from lightfed.lab.results.groups import Group
from lightfed.lab.results.paired import Difference, Verdict
from lightfed.lab.results.verdicts import (
    Target,
    answer_of,
    excluded_text,
    gain_text,
    p_of,
    p_text,
)

HOLDS: dict[Verdict, str] = {
    "better": "holds",
    "worse": "the opposite is shown",
    "not shown": "not shown",
    "identical runs": "identical runs",
}


class Claim(NamedTuple):
    """What the runs say of a claim.

    Attributes:
        better: The method that is claimed to be better.
        than: The method that it is compared with.
        metric: A column of metrics.csv, or a cost with the ending `UNTIL`.
        difference: The difference of both.
        verdict: Whether the first is better, after the correction.
        alone: The same without the correction.
        p: The corrected p value.
    """

    better: str
    than: str
    metric: str
    difference: Difference
    verdict: Verdict
    alone: Verdict
    p: float

    @property
    def sentence(self) -> str:
        """The claim itself."""
        return f"{self.better} is better than {self.than} in {text.readable(self.metric)}"

    @property
    def answer(self) -> str:
        """Whether it holds, and if that is not shown, which differences are excluded."""
        answer = HOLDS[self.verdict]
        if self.verdict != "not shown" or not math.isfinite(self.difference.low):
            return answer
        if self.alone != self.verdict:
            answer += f"; by itself it would be: {HOLDS[self.alone]}"
        return f"{answer}; {excluded_text(self.difference, self.metric)}"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The row of the claim in a table."""
        return self.sentence, self.answer, gain_text(self.difference, self.metric), p_text(self.p)

    @property
    def line(self) -> str:
        """The claim and what is said of it."""
        sentence, answer, gain, p = self.cells
        return f"{sentence}: {answer}, {gain}, p {p}"

    @property
    def values(self) -> dict[str, Any]:
        """The claim for a program."""
        values = {
            "difference": self.difference.mean,
            "low": self.difference.low,
            "high": self.difference.high,
            "p": self.p,
        }
        numbers: dict[str, Any] = {}
        for name, value in values.items():
            numbers[name] = value if math.isfinite(value) else None
        return {
            "better": self.better,
            "than": self.than,
            "metric": self.metric,
            "verdict": self.verdict,
            "alone": self.alone,
            **numbers,
            "seeds": list(self.difference.seeds),
            "sequential": None,
        }


class Question(NamedTuple):
    """A claim, with the runs that decide it.

    Attributes:
        better: The method that is claimed to be better.
        than: The method that it is compared with, with runs of the same seeds.
        metric: A column of metrics.csv, or a cost with the ending `UNTIL`.
        target: The target of that cost.
    """

    better: Group
    than: Group
    metric: str
    target: Target | None = None


def answered(questions: Sequence[Question], number: int | None = None) -> list[Claim]:
    """Return what runs say of claims, which are corrected together.

    Args:
        questions: The claims.
        number: The number of all claims of the study, if it is larger. The others count as not
            shown.
    """
    p_values = [p_of(asked.than, asked.better, asked.metric, asked.target) for asked in questions]
    corrected = holm.corrected(p_values, number)

    claims = []
    for (better, than, metric, target), p in zip(questions, corrected, strict=True):
        difference, alone = answer_of(than, better, metric, target)
        _, verdict = answer_of(than, better, metric, target, p=p)
        claims.append(Claim(better.name, than.name, metric, difference, verdict, alone, p))
    return claims
