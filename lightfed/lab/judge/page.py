"""What `lightfed judge` says of a candidate: numbers for a program, tables, and a page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pandas import DataFrame, concat

from lightfed.lab.contest import Held, Method
from lightfed.lab.drawing.files import write_files
from lightfed.lab.drawing.summary import new_console, print_line, print_table
from lightfed.lab.judge.conformity import RANKS
from lightfed.lab.judge.contender import Contender
from lightfed.lab.report.comparison import Files, pair_numbers, write_page
from lightfed.lab.report.figures import comparison_figures
from lightfed.lab.report.tables import comparison_table
from lightfed.lab.results import text
from lightfed.lab.results.groups import Group
from lightfed.lab.results.holm import ERROR
from lightfed.lab.results.verdicts import difference_table, gain_text, p_text, rows_of
from lightfed.lab.until import Ended

# The verdict if one ground shows a gain, and another a loss.
MIXED = "better and worse"


class OnGround(NamedTuple):
    """What was found on one ground.

    Attributes:
        name: Its name.
        methods: The commands of the rival and of the candidate.
        ended: The comparison.
    """

    name: str
    methods: Sequence[Method]
    ended: Ended

    @property
    def held(self) -> Held:
        """The compared runs."""
        return self.ended.held

    @property
    def numbers(self) -> dict[str, Any]:
        """What was found, for a program."""
        rival, candidate = self.held.groups
        commands = [shlex.join(method.words) for method in self.methods]
        numbers = pair_numbers(
            rival,
            candidate,
            commands,
            self.held.metric,
            None,
            differ=self.held.differ,
            search=self.held.search,
        )
        return {"on": self.name, **numbers, **self.ended.numbers}

    @property
    def claim(self) -> tuple[str, str, str, str]:
        """What was found, as a row of a table."""
        look = self.ended.look
        gain = gain_text(look.difference, self.held.metric, half=look.half)
        return self.name, self.ended.verdict, gain, p_text(look.p)


class Judgement(NamedTuple):
    """What is said of a candidate.

    Attributes:
        candidate: The candidate.
        rival: What it was compared with.
        names: The names of the rival and of the candidate for readers.
        minutes: The budget in CPU minutes.
        spent: What of it was spent.
        fault: How the candidate fails in the kit; None if it passes.
        judged: What was found on each ground; empty for a candidate that fails.
    """

    candidate: Contender
    rival: Contender
    names: Sequence[str]
    minutes: float
    spent: float
    fault: str | None
    judged: Sequence[OnGround]

    @property
    def verdict(self) -> str | None:
        """The verdict over all grounds; None for a candidate that fails in the kit."""
        verdicts = {on_ground.ended.verdict for on_ground in self.judged}
        if not verdicts:
            return None
        if {"better", "worse"} <= verdicts:
            return MIXED
        for verdict in ("better", "worse", "not shown"):
            if verdict in verdicts:
                return verdict
        return "identical runs"

    @property
    def numbers(self) -> dict[str, Any]:
        """All of it, for a program."""
        rival_name, candidate_name = self.names
        contenders = {}
        for key, name, one in (
            ("candidate", candidate_name, self.candidate),
            ("against", rival_name, self.rival),
        ):
            contenders[key] = {"name": name, "class": one.path, "digest": one.digest}
        return {
            **contenders,
            "conformance": {
                "passed": self.fault is None,
                "ranks": list(RANKS),
                "fault": self.fault,
            },
            "verdict": self.verdict,
            "error": ERROR,
            "comparisons": [on_ground.numbers for on_ground in self.judged],
            "minutes": {"budget": self.minutes, "spent": self.spent},
        }

    def write(self, place: Path, notes: Sequence[str], files: Files, *, prints: bool) -> Path:
        """Write the page of a candidate that was compared, and print its tables.

        Args:
            place: The folder to write to.
            notes: Notes on how the methods were compared.
            files: Which files to write besides the page.
            prints: Whether to print.

        Returns:
            The page.
        """
        rival_name, candidate_name = self.names
        several = len(self.judged) > 1
        all_notes = [
            f"{candidate_name} gives the same bits on {' and '.join(map(str, RANKS))} ranks, and "
            "after a stop and a restart (conformance kit)",
            *notes,
        ]
        if several:
            all_notes.append(
                f"{len(self.judged)} data sets, corrected together by Bonferroni: the probability "
                f"that one or more verdicts are wrong is at most {100 * ERROR:.0f} %"
            )
        for on_ground in self.judged:
            all_notes += on_ground.held.differ
            for method in on_ground.methods:
                command = shlex.join(method.words)
                all_notes.append(f"{method.name} on {on_ground.name}: lightfed {command}")
        all_notes.append(
            f"{self.spent:.1f} of {self.minutes:g} CPU minutes, with what runs that were there "
            "already have not cost again"
        )

        answers = []
        claims = []
        for on_ground in self.judged:
            line = on_ground.ended.line
            answers.append(f"on {on_ground.name}: {line}" if several else line)
            claims.append(on_ground.claim)
        claims_table = DataFrame(
            claims,
            columns=["data", f"{candidate_name} against {rival_name}", "difference", "p"],
            dtype="str",
        )

        groups: list[Group] = []
        for on_ground in self.judged:
            groups += on_ground.held.groups
        metric = self.judged[0].held.metric
        finals = comparison_table(groups, metric)
        differences = self._table("differences")
        search = self._table("search")
        figures = comparison_figures(groups, metric)
        title = f"{candidate_name} against {rival_name}: {text.readable(metric)}"
        page = write_page(
            place,
            title,
            finals,
            all_notes,
            figures,
            answers=answers,
            differences=differences,
            search=search,
        )
        tables = {
            "comparison-table": finals,
            "comparison-differences": differences,
            "search": search,
            "claims": claims_table,
        }
        write_files(figures, tables, place, *files)

        if prints:
            console = new_console()
            for table in (search, differences):
                print_table(console, table)
            for line in [*all_notes, *answers, f"page: {page}"]:
                print_line(console, line)
        return page

    def _table(self, kind: str) -> DataFrame:
        """Return the table of differences, or that of the search, of all grounds.

        With several of them, the first column names the ground.
        """
        tables = []
        for on_ground in self.judged:
            table = on_ground.held.search
            if kind == "differences":
                rival, candidate = on_ground.held.groups
                rows = rows_of(rival, candidate)
                table = difference_table(rows, (rival.name, candidate.name))
            if len(self.judged) > 1:
                table = table.copy()
                table.insert(0, "data", on_ground.name)
            tables.append(table)
        return concat(tables, ignore_index=True)
