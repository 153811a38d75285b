"""A run folder as tables.

Only metrics.csv must exist. Masks of sparse clients are read by `studies.dispfl`. The run may still
be writing: a last line without a line end is ignored, and the evaluation that it belongs to counts
only if there is no earlier one.
"""

from __future__ import annotations

import json
import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightfed.results.columns import is_metric, natural_order
from lightfed.results.csvfile import finite, read_csv, reading
from lightfed.results.settings import read_settings
from lightfed.utils.errors import require
from lightfed.utils.keys import COLUMNS, experiment

if TYPE_CHECKING:
    from pandas import DataFrame, Series


class Partition(NamedTuple):
    """Training samples of each class (column) and client (row), scheme, seed and data set."""

    counts: DataFrame
    meta: dict[str, Any]


class Gates(NamedTuple):
    """Gate outputs of pFedMoE's clients at the last evaluation, after `round` finished rounds.

    `personal` is (clients, classes): the mean weight of a client's private expert over its test
    samples of a class; the shared expert has the rest. NaN without such samples.
    """

    round: int
    personal: np.ndarray


class Run:
    """One run folder, see `read`. A file is read on its first use: a UserError if it is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def rounds(self) -> DataFrame:
        """metrics.csv by round; NaN where it was not measured, or is not finite."""
        return finite(self._measured)

    @cached_property
    def clients(self) -> DataFrame:
        """A row a client and evaluation: `round`, `client`, `group`, metrics and costs.

        Bytes and FLOPs count from the start. Empty without clients.csv.
        """
        return finite(self._tested[0])

    @cached_property
    def evaluation(self) -> DataFrame:
        """The last complete one of `clients`, by client, inf where not finite; empty without."""
        table, growing = self._tested
        at = table["round"].unique()[-2:]
        last = table[table["round"] == at[0 if growing else -1]] if len(at) else table
        return last.set_index("client").sort_index()

    @cached_property
    def timings(self) -> DataFrame:
        """Seconds by part of each finished round, means over the ranks; empty without the file."""
        return read_csv(self.folder / "timings.csv")[0].set_index("round")

    @cached_property
    def partition(self) -> Partition | None:
        import pandas as pd

        if not (arrays := self._arrays("partition")):
            return None
        meta = json.loads(str(arrays["meta"]))
        counts = pd.DataFrame(arrays["train_counts"].astype(int))
        classes = pd.Index(meta["classes"] or counts.columns).astype(str)
        return Partition(counts.set_axis(classes, axis=1), meta)

    @cached_property
    def gates(self) -> Gates | None:
        arrays = self._arrays("gate")
        return Gates(int(arrays["round"]), arrays["personal"].astype(float)) if arrays else None

    @cached_property
    def costs(self) -> dict[str, np.ndarray]:
        """(3,) bytes up, bytes down and FLOPs of all clients of each group since the start.

        Empty without costs.npz, and if a later round has added to them.
        """
        arrays = self._arrays("costs")
        current = arrays and int(arrays["round"]) == self.last_round
        return dict(zip(self.group_sizes, arrays["sums"], strict=True)) if current else {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """environment.json."""
        with reading(self.folder / "environment.json"):
            stated: dict[str, Any] = json.loads(self._text("environment.json") or "{}")
        return stated

    @cached_property
    def config(self) -> str | None:
        """The text of config.yaml; None without it."""
        return self._text("config.yaml")

    @cached_property
    def settings(self) -> dict[str, str]:
        """Of config.yaml by their dotted keys, all values text.

        With the digests of the data and the partition, `data.dataset.digest` and so on.
        """
        digests = self.environment.get("digests", {}).items()
        stated = read_settings(self.config or "", self.folder / "config.yaml")
        return stated | {f"data.{name}.digest": text for name, text in digests}

    @property
    def name(self) -> str:
        return str(self.environment.get("name", self.folder.name))

    @property
    def algorithm(self) -> str:
        return str(self.environment.get("algorithm", "algorithm not known"))

    @property
    def data(self) -> str:
        return str(self.environment.get("dataset", "data not known"))

    @property
    def seed(self) -> int | None:
        return self.environment.get("seed")

    @property
    def num_clients(self) -> int | None:
        return self.environment.get("clients")

    @property
    def group_sizes(self) -> dict[str, int]:
        """Clients of each group, in the order of the configuration."""
        return dict(self.environment.get("groups", {}))

    @cached_property
    def experiment(self) -> dict[str, Any]:
        """Its digest and settings, see `keys.experiment`: written by the run, or from config.yaml.

        A run without a configuration is an experiment by itself.
        """
        alone = {"digest": str(self.folder.absolute())} if self.config is None else {}
        found: dict[str, Any] = self.environment.get("experiment", {})
        return found or experiment(self.settings) | alone

    @property
    def note(self) -> str:
        """For the end of a title: says so if the data are synthetic."""
        return " (synthetic data)" if self.environment.get("synthetic") else ""

    @property
    def planned(self) -> int | None:
        """Number of rounds configured; None if unlimited."""
        rounds: int = self.environment.get("rounds", -1)
        return rounds if rounds > 0 else None

    @property
    def last_round(self) -> int:
        return int(self.rounds.index[-1])

    @property
    def finished(self) -> bool:
        """Whether the run has ended, perhaps early; True for a run that recorded neither.

        A run that died after its last round counts as finished, because it has all metrics.
        """
        if "finished" in self.environment or "rounds" not in self.environment:
            return True
        return self.planned is not None and self.planned <= self.last_round

    @cached_property
    def client_groups(self) -> tuple[str, ...]:
        """Names in natural order; the position gives the colour."""
        return tuple(sorted({*self.evaluation["group"], *self.group_sizes}, key=natural_order))

    @cached_property
    def client_group_columns(self) -> frozenset[str]:
        """Columns of metrics.csv with means over one of several client groups."""
        groups = self.client_groups if len(self.client_groups) > 1 else ()
        metrics = filter(is_metric, map(str, self.rounds))
        return frozenset(f"{name}/{group}" for name in metrics for group in groups)

    @property
    def client_metrics(self) -> list[str]:
        """The metrics in clients.csv."""
        return [name for name in self.evaluation.columns if name not in COLUMNS]

    def series(self, name: str) -> Series:
        """A column of `rounds`; all NaN if there is no such column."""
        return self.rounds.reindex(columns=[name])[name]

    def final(self, name: str) -> float:
        """The last value in a column of metrics.csv: inf if it is not finite, NaN without any."""
        values = self._measured.reindex(columns=[name])[name].replace(-math.inf, math.inf)
        return float(values.ffill().iloc[-1])

    def has(self, name: str) -> bool:
        """Whether a column of metrics.csv was measured, perhaps never as a finite value."""
        return not math.isnan(self.final(name))

    @cached_property
    def _measured(self) -> DataFrame:
        """metrics.csv by round, inf where not finite."""
        return read_csv(self.folder / "metrics.csv")[0].set_index("round")

    @cached_property
    def _tested(self) -> tuple[DataFrame, bool]:
        """clients.csv, and whether its last line is incomplete."""
        return read_csv(self.folder / "clients.csv", keys=("round", "client", "group"))

    def _arrays(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of an npz file; none without it."""
        path = self.folder / f"{name}.npz"
        if not path.is_file():
            return {}
        with reading(path), np.load(path, allow_pickle=False) as file:
            return dict(file)

    def _text(self, name: str) -> str | None:
        path = self.folder / name
        with reading(path):
            return path.read_text("utf-8") if path.is_file() else None


def read(folder: Path | str) -> Run:
    """Read a run folder.

    Raises:
        UserError: the folder does not exist, has no metrics.csv or no finished round, or a file is
            damaged.
    """
    run, fix = Run(Path(folder)), "name the folder of a run, such as runs/NAME"
    require(run.folder.is_dir(), "report", f"there is no folder {folder}", fix)
    metrics = run.folder / "metrics.csv"
    require(metrics.is_file(), "report", f"{folder} holds no metrics.csv", fix)
    found, fix = f"{metrics} holds no finished round yet", "wait for the first round to end"
    require(len(run.rounds) > 0, "report", found, fix)
    return run
