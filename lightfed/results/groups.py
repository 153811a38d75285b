"""The rows of a comparison: each run by itself, or together those that differ in the seed alone."""

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from lightfed.results.columns import base_name
from lightfed.results.outcome import last, mean_and_std, primary_metric, traffic
from lightfed.results.runfiles import Floats, RunFiles

SEED_SUFFIX = re.compile(r"[-_.]?(?:seed|s)[-_.=]?\d+$", re.IGNORECASE)
SEED_SETTING = re.compile(r"\b\w*seed\w*['\"]?\s*:\s*[^,}\n]*", re.IGNORECASE)
PLACE_SETTING = re.compile(r"^[\s-]*(?:name|version|\w*dir|\w*path|\w*folder|output)\s*:(.*)$")


@dataclass(frozen=True)
class Course:
    """A metric over the rounds in which every run of a group measured it.

    Attributes:
        rounds: (M,).
        sent: mean bytes up and down since the start, NaN where unknown, (M,).
        mean: over the runs, (M,).
        std: sample standard deviation over the runs, None for a single run.
    """

    rounds: Floats
    sent: Floats
    mean: Floats
    std: Floats | None


@dataclass(frozen=True)
class Group:
    """One row of a comparison: one run, or several of different seeds.

    Attributes:
        label: says so where no run is finished.
        runs: those that are finished, or all where none is.
        left_out: the others: their last figures are of an earlier round.
    """

    label: str
    runs: tuple[RunFiles, ...]
    left_out: tuple[RunFiles, ...] = ()

    def score(self, column: str) -> tuple[float, float]:
        """The final value of a column of metrics.csv: mean and sample deviation over the runs."""
        return mean_and_std([last(run.series(column)) for run in self.runs])

    def course(self, column: str) -> Course:
        measured = [run.rounds[np.isfinite(run.series(column))] for run in self.runs]
        common = measured[0]
        for rounds in measured[1:]:
            common = np.intersect1d(common, rounds)
        places = [np.isin(run.rounds, common) for run in self.runs]
        paired = list(zip(self.runs, places, strict=True))
        values = np.stack([run.series(column)[place] for run, place in paired])
        sent = np.stack([traffic(run)[place] for run, place in paired])
        return Course(
            rounds=common.astype(np.float64),
            sent=sent.mean(axis=0),
            mean=values.mean(axis=0),
            std=values.std(axis=0, ddof=1) if len(self.runs) > 1 else None,
        )


class Experiment(Protocol):
    """Something made of runs that differ in the seed alone."""

    @property
    def group(self) -> Group: ...


def repeated(experiments: Iterable[Experiment]) -> bool:
    """Whether some experiment was run with several seeds."""
    return any(len(one.group.runs) > 1 for one in experiments)


def synthetic_note(experiments: Iterable[Experiment]) -> str:
    """For the end of a title: whether some run was of synthetic data."""
    return max((run.note for one in experiments for run in one.group.runs), default="")


def usual_metric(groups: Iterable[Group]) -> str:
    """What most runs would show first, without `global/` or `personal/`."""
    names = [base_name(primary_metric(run)) for group in groups for run in group.runs]
    return Counter(names).most_common(1)[0][0]


def singles(runs: Sequence[RunFiles]) -> list[Group]:
    """A row per run, under its name, or under its path where two runs have one name."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        parent = common_parent(runs)
        names = [os.path.relpath(run.folder.absolute(), parent) for run in runs]
    return [_group(name, [run]) for name, run in zip(names, runs, strict=True)]


def grouped(runs: Sequence[RunFiles]) -> list[Group]:
    """A row per experiment, in the order in which the first run of each was named."""
    members: dict[str, list[RunFiles]] = {}
    for run in runs:
        members.setdefault(experiment(run), []).append(run)
    labels = [_label(found) for found in members.values()]
    groups = []
    for place, found in enumerate(members.values()):
        label, same = labels[place], labels[:place].count(labels[place])
        groups.append(_group(f"{label} #{same + 1}" if same else label, found))
    return groups


def _group(label: str, runs: Sequence[RunFiles]) -> Group:
    finished = tuple(run for run in runs if run.finished)
    if not finished:
        return Group(f"{label} (not finished)", tuple(runs))
    return Group(label, finished, tuple(run for run in runs if not run.finished))


def experiment(run: RunFiles) -> str:
    """What a run shares with the same run of another seed.

    That is its configuration without seeds and without lines that tell where this run is written;
    where there is no configuration, its name without the seed and what its environment says of it.
    """
    if run.config is None:
        told = [run.environment.get(key) for key in ("algorithm", "dataset", "clients", "rounds")]
        return repr((_stem(run.name), told))
    names = {run.name, run.folder.absolute().name}
    kept = [line for line in run.config.splitlines() if not _tells_place(line, names)]
    return SEED_SETTING.sub("", "\n".join(kept))


def common_parent(runs: Sequence[RunFiles]) -> Path:
    """The deepest folder that holds all the runs, as a relative path if it is below this one."""
    parent = Path(os.path.commonpath([run.folder.absolute().parent for run in runs]))
    return parent.relative_to(Path.cwd()) if parent.is_relative_to(Path.cwd()) else parent


def _tells_place(line: str, names: set[str]) -> bool:
    setting = PLACE_SETTING.match(line)
    parts = re.split(r"[/\\'\"\s]+", setting.group(1)) if setting else []
    return any(part in names for part in parts)


def _stem(name: str) -> str:
    return SEED_SUFFIX.sub("", name) or name


def _label(runs: Sequence[RunFiles]) -> str:
    """The common part of the runs' names."""
    if len(runs) == 1:
        return runs[0].name
    stems = {_stem(run.name) for run in runs}
    if len(stems) == 1:
        return stems.pop()
    letters = zip(*(run.name for run in runs), strict=False)
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, letters)
    return "".join(column[0] for column in alike).rstrip("-_. ") or runs[0].name
