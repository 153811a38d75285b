"""`lightfed compare A B C ...`: each of several methods against the first.

The claims are corrected together, as those of a study are: this is a study without a file.
"""

from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame

from lightfed.lab.contest import Held
from lightfed.lab.report.comparison import Files, show
from lightfed.lab.report.tables import comparison_table
from lightfed.lab.results import holm
from lightfed.lab.results.claims import Question, answered
from lightfed.lab.results.paired import Difference
from lightfed.lab.results.verdicts import Target, gain_text, goal_of, p_text, verdict


def show_several(
    held: Held, place: Path, notes: Sequence[str], files: Files, target: Target | None
) -> None:
    """Print the table of several methods and what is shown of each, and write them to a page.

    Args:
        held: Their runs. The first method is the one that others are compared with.
        place: The folder to write to.
        notes: Notes on how they are compared.
        files: Which files to write besides the page.
        target: The column and the value until which the table has costs.
    """
    first, *others = held.groups
    claims = answered([Question(group, first, held.metric) for group in others])
    answers = []
    for group, claim in zip(others, claims, strict=True):
        answers.append(verdict(first, group, held.metric, p=claim.p))

    all_notes = [*notes, *held.differ, *holm.said(len(claims))]
    if target is not None:
        all_notes.append(f"target: {goal_of(target)}")
    of_target, value = ("", None) if target is None else target

    rows = []
    for claim in claims:
        rows.append((claim.better, claim.verdict, *_cells(claim.difference, held.metric, claim.p)))
    heads = ["method", f"against {first.name}", "difference", "corrected p"]
    show(
        place,
        "compare",
        held.groups,
        held.metric,
        comparison_table(held.groups, held.metric, target=value, of_target=of_target),
        all_notes,
        answers,
        target=target,
        search=held.search,
        files=files,
        claims=DataFrame(rows, columns=heads, dtype="str"),
    )


def _cells(difference: Difference, metric: str, p: float) -> tuple[str, str]:
    """Return a difference with its interval, and its corrected p value."""
    return gain_text(difference, metric), p_text(p)
