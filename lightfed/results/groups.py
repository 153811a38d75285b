"""The rows of a comparison: single runs, or groups of runs that differ only in the seed."""

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from lightfed.results.columns import base_name
from lightfed.results.outcome import last, mean_and_std, primary_metric, traffic
from lightfed.results.runfiles import Floats, RunFiles
from lightfed.results.variants import gathered

SEED_SUFFIX = re.compile(r"[-_.]?(?:seed|s)[-_.=]?\d+$", re.IGNORECASE)
SEED_SETTING = re.compile(r"\b\w*seed\w*['\"]?\s*:\s*[^,}\n]*", re.IGNORECASE)
PLACE_SETTING = re.compile(r"^[\s-]*(?:name|version|\w*dir|\w*path|\w*folder|output)\s*:(.*)$")


@dataclass(frozen=True)
class Course:
    """A metric over the rounds in which every run of a group measured it.

    Attributes:
        rounds: (M,).
        sent: (M,) mean bytes up and down since the start, NaN if unknown.
        mean: (M,) over the runs.
        std: (M,) sample standard deviation over the runs; None for a single run.
    """

    rounds: Floats
    sent: Floats
    mean: Floats
    std: Floats | None


@dataclass(frozen=True)
class Group:
    """One row of a comparison: one run, or several of different seeds.

    Attributes:
        label: says so if no run is finished.
        runs: the finished ones, or all if none is.
        left_out: the others, whose last metrics are from an earlier round.
    """

    label: str
    runs: tuple[RunFiles, ...]
    left_out: tuple[RunFiles, ...] = ()

    def score(self, column: str) -> tuple[float, float]:
        """The last value in a column of metrics.csv: mean and sample deviation over the runs."""
        return mean_and_std([last(run.series(column)) for run in self.runs])

    def course(self, column: str) -> Course:
        measured = [run.rounds[np.isfinite(run.series(column))] for run in self.runs]
        common = functools.reduce(np.intersect1d, measured)
        paired = [(run, np.isin(run.rounds, common)) for run in self.runs]
        values = np.stack([run.series(column)[place] for run, place in paired])
        sent = np.stack([traffic(run)[place] for run, place in paired])
        return Course(
            rounds=common.astype(np.float64),
            sent=sent.mean(axis=0),
            mean=values.mean(axis=0),
            std=values.std(axis=0, ddof=1) if len(self.runs) > 1 else None,
        )


@dataclass(frozen=True, eq=False)
class Experiment:
    """Runs that differ only in the seed, and their settings.

    Attributes:
        group: its runs; data and algorithm are read from the first.
        options: the settings, by short names.
    """

    group: Group
    options: Mapping[str, str] = field(repr=False)

    @property
    def data(self) -> str:
        return self.group.runs[0].data

    @property
    def algorithm(self) -> str:
        return self.group.runs[0].algorithm


Member = TypeVar("Member", bound=Experiment | Group)


@dataclass(frozen=True)
class Study(Generic[Member]):
    """Experiments that are shown together.

    Attributes:
        name: what they have in common.
        metric: what is drawn, without `global/` or `personal/`.
        members: in the order shown.
    """

    name: str
    metric: str
    members: tuple[Member, ...]

    @property
    def note(self) -> str:
        return synthetic_note(self.members)


def studied(members: Iterable[Member], name: Callable[[Member], str]) -> list[Study[Member]]:
    """A study for each name, with the metric that most of its runs show first."""
    found = gathered(members, name).items()
    return [Study(name, usual_metric(own), tuple(own)) for name, own in found]


def runs_of(members: Iterable[Experiment | Group]) -> list[RunFiles]:
    groups = (one.group if isinstance(one, Experiment) else one for one in members)
    return [run for group in groups for run in group.runs]


def repeated(members: Iterable[Experiment | Group]) -> bool:
    """Whether some experiment was run with several seeds."""
    return any(len(runs_of([one])) > 1 for one in members)


def synthetic_note(members: Iterable[Experiment | Group]) -> str:
    """For the end of a title: says so if a run used synthetic data."""
    return max((run.note for run in runs_of(members)), default="")


def usual_metric(members: Iterable[Experiment | Group]) -> str:
    """The metric that most runs show first, without `global/` or `personal/`."""
    names = [base_name(primary_metric(run)) for run in runs_of(members)]
    return Counter(names).most_common(1)[0][0]


def singles(runs: Sequence[RunFiles]) -> list[Group]:
    """A row per run, labelled by its name, or by its path if two runs have the same name."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        parent = common_parent(runs)
        names = [os.path.relpath(run.folder.absolute(), parent) for run in runs]
    return [_group(name, [run]) for name, run in zip(names, runs, strict=True)]


def grouped(runs: Sequence[RunFiles]) -> list[Group]:
    """A row per experiment, in the order of their first runs."""
    groups, times = [], Counter[str]()
    for found in gathered(runs, identity).values():
        label = _label(found)
        times[label] += 1
        groups.append(_group(f"{label} #{times[label]}" if times[label] > 1 else label, found))
    return groups


def _group(label: str, runs: Sequence[RunFiles]) -> Group:
    finished = tuple(run for run in runs if run.finished)
    if not finished:
        return Group(f"{label} (not finished)", tuple(runs))
    return Group(label, finished, tuple(run for run in runs if not run.finished))


def identity(run: RunFiles) -> str:
    """A key that runs share if they differ only in the seed.

    It is the configuration without seeds and output paths. Without a configuration it is the name
    without the seed, and the settings in environment.json.
    """
    if run.config is None:
        keys = ("algorithm", "dataset", "clients", "rounds")
        return repr((_stem(run.name), [run.environment.get(key) for key in keys]))
    names = {run.name, run.folder.absolute().name}
    kept = [line for line in run.config.splitlines() if not _names_place(line, names)]
    return SEED_SETTING.sub("", "\n".join(kept))


def common_parent(runs: Sequence[RunFiles]) -> Path:
    """The deepest folder that holds all the runs; relative if it is below the current one."""
    parent = Path(os.path.commonpath([run.folder.absolute().parent for run in runs]))
    return parent.relative_to(Path.cwd()) if parent.is_relative_to(Path.cwd()) else parent


def _names_place(line: str, names: set[str]) -> bool:
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
    names = [run.name for run in runs]
    return os.path.commonprefix(names).rstrip("-_. ") or names[0]  # noqa: RUF071 - no paths
