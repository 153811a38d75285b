"""The accuracy of each strategy and version, for the terminal, the page and a csv file."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
from pandas import DataFrame
from rich.console import Console

from lightfed.drawing.markup import parts
from lightfed.drawing.summary import fits, print_line, print_table
from lightfed.results.groups import runs_of
from lightfed.results.intervals import resolution, resolution_text
from lightfed.results.settings import gathered
from lightfed.results.tables import readable, text_table
from lightfed.results.units import NOTHING, is_share, spread_text
from lightfed.studies.flexifed.strategies import Setting, Study
from lightfed.studies.flexifed.trials import BASELINE

NAME_LETTERS = 20  # in a line of the terminal
SPARE = ("target", "rounds", "mean", "speed")
CSV_COLUMNS = ("data", "family", "setting", "strategy", "version", "model", "seeds", "mean", "std")
PACE = ("target", "rounds", "speed")
RESOLUTION = "resolution"


@dataclass(frozen=True)
class StrategyTable:
    """All settings of some studies; the target asked of the speed is by default Clustered-FL's."""

    studies: Sequence[Study]
    asked: float | None

    @property
    def settings(self) -> list[Setting]:
        return [setting for study in self.studies for setting in study.settings]

    @property
    def versions(self) -> list[str]:
        """V1, V2 and so on, as many as the largest family has."""
        most = max(len(study.topic.versions) for study in self.studies)
        return [f"V{number + 1}" for number in range(most)]

    def text(self, *, spread: bool) -> DataFrame:
        """A row per setting and strategy, a star before the best of a setting and version."""
        rows: list[tuple[str, ...]] = []
        for setting in self.settings:
            # down the first column, next to the strategies
            names = textwrap.wrap(setting.name, NAME_LETTERS)
            cells = [self._row(setting, name, spread=spread) for name in setting.trials]
            cells += [("",) * len(cells[0])] * (len(names) - len(cells))
            names += [""] * (len(cells) - len(names))
            rows += [(name, *row) for name, row in zip(names, cells, strict=True)]
        return self._table(rows)

    def markup(self) -> list[str]:
        """For the page: a row per setting and strategy."""
        part = parts()
        rows = [
            (setting.name, *self._row(setting, name, spread=True))
            for setting in self.settings
            for name in setting.trials
        ]
        notes = (part.paragraph(text, "small") for text in self.notes())
        return [part.heading("Strategies by version"), part.table(self._table(rows)), *notes]

    def csv(self) -> str:
        """A line per setting, strategy and version, and one for all clients; unknown is empty."""
        trials = [(setting, name) for setting in self.settings for name in setting.trials]
        lines = [line for setting, name in trials for line in self._csv_lines(setting, name)]
        columns = pd.Index((*CSV_COLUMNS, *PACE, RESOLUTION))
        return pd.DataFrame(lines, columns=columns).to_csv(index=False)

    def _csv_lines(self, setting: Setting, name: str) -> Iterator[tuple[object, ...]]:
        topic, trial, runs = setting.topic, setting.trials[name], setting.trials[name].group.runs
        first = (topic.data, topic.family, setting.variant, name)
        for label, version in zip(self.versions, topic.versions, strict=False):
            if version in trial.client_groups:
                scores = trial.score(topic.metric, version)
                yield (*first, label, version, len(runs), *scores, "", "", "", "")
        pace, target = setting.pace(name, self.asked), setting.target(self.asked)
        steps = max(resolution(run, f"personal/{topic.metric}") for run in runs)
        every = (*trial.score(topic.metric), target, pace.rounds, pace.speed, steps)
        yield (*first, "mean", "", len(runs), *every)

    def notes(self) -> list[str]:
        """How to read the table."""
        metrics = dict.fromkeys(study.topic.metric for study in self.studies)
        names = " and ".join(readable(m) + (" in %" if is_share(m) else "") for m in metrics)
        families = {study.topic.family: study.topic.versions for study in self.studies}
        versions = "; ".join(f"{family} {', '.join(found)}" for family, found in families.items())
        target = f"what {BASELINE} reached in the end" if self.asked is None else f"{self.asked:g}"
        return [
            f"Final {names}: each client's model on its own test samples, mean over the clients "
            "with the sample deviation over seeds. The best strategy of a setting and version "
            "has a star.",
            f"V1 and so on: {versions}.",
            f"Speed: the first evaluated round in which {BASELINE} reached the target over that of "
            "the strategy, in the mean over all clients; a dash where it was not reached. "
            f"Target: {target}, in {self._resolutions()}.",
        ]

    def _resolutions(self) -> str:
        """`personal accuracy (resolution 4 rounds)` for each metric."""
        studies = gathered(self.studies, lambda study: f"personal/{study.topic.metric}")
        runs = {c: runs_of(t for study in own for t in study.trials) for c, own in studies.items()}
        texts = (f"{readable(c)} (resolution {resolution_text(own, c)})" for c, own in runs.items())
        return " and ".join(texts)

    def _table(self, rows: Sequence[tuple[str, ...]]) -> DataFrame:
        headers = ("setting", "strategy", *self.versions, "mean", *PACE)
        return text_table([dict(zip(headers, row, strict=True)) for row in rows])

    def _row(self, setting: Setting, name: str, *, spread: bool) -> tuple[str, ...]:
        """Of the text, without the setting's name."""
        trial, metric = setting.trials[name], setting.topic.metric

        def text(mean: float, std: float = math.nan) -> str:
            return spread_text(metric, mean, std if spread else math.nan).removesuffix(" %")

        def score(version: str | None) -> str:
            return "*" * (name in setting.best(version)) + text(*trial.score(metric, version))

        rounds = setting.pace(name, self.asked).rounds
        return (
            name,
            *map(score, setting.topic.versions),
            *[NOTHING] * (len(self.versions) - len(setting.topic.versions)),  # a smaller family
            score(None),
            text(setting.target(self.asked)),
            NOTHING if math.isnan(rounds) else f"{rounds:.0f}",
            self._speed(setting, name),
        )

    def _speed(self, setting: Setting, name: str) -> str:
        speed = setting.pace(name, self.asked).speed
        return NOTHING if math.isnan(speed) else f"{speed:.2f}"


def print_strategies(console: Console, strategies: StrategyTable) -> None:
    """Print the table, without deviations if the console is too narrow, and its notes."""
    content = strategies.text(spread=True)
    if not fits(console, content.drop(columns=[*SPARE])):
        content = strategies.text(spread=False)
    print_table(console, content, left=(0, 1), spare=SPARE)
    for text in strategies.notes():
        print_line(console, text)
