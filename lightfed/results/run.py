"""A run folder as tables.

Only metrics.csv must exist. Masks of sparse clients are read by `studies.dispfl`. The run may still
be writing: a last line without a line end is ignored, and the evaluation that it belongs to counts
only if there is no earlier one.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightfed.results.columns import is_metric, natural_order
from lightfed.results.csvfile import finite, read_csv, reading
from lightfed.results.settings import read_settings
from lightfed.utils.errors import require
from lightfed.utils.keys import COLUMNS, experiment

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Partition:
    """Training samples of each class (column) and client (row), scheme, seed and data set."""

    counts: DataFrame
    meta: dict[str, Any]


@dataclass(frozen=True)
class Gates:
    """Gate outputs of pFedMoE's clients at the last evaluation, after `round` finished rounds.

    `personal` is (clients, classes): the mean weight of a client's private expert over its test
    samples of a class; the shared expert has the rest. NaN without such samples.
    """

    round: int
    personal: Floats


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """One run folder.

    Attributes:
        folder: its path.
        rounds: metrics.csv by round; NaN where it was not measured, or is not finite.
        diverged: the columns of `rounds` whose last measured value is not finite.
        clients: a row a client and evaluation: `round`, `client`, `group`, metrics and costs.
            Bytes and FLOPs count from the start. Empty without clients.csv.
        evaluation: the last complete one, by client, inf where not finite; empty without any.
        timings: seconds of a finished round, which is the index, by its part; means over the ranks.
            `moved` is the number of rows that moved. Empty without timings.csv.
        partition: None without partition.npz.
        gates: None without gate.npz.
        costs: the round of the last evaluation, and what all clients of each group have sent and
            computed until then: (groups, 3) bytes up, bytes down and FLOPs, in the order of the
            configuration; None without costs.npz.
        environment: empty without environment.json.
        config: the text of config.yaml; None without it.
        settings: of config.yaml by their dotted keys, all values text; and the digests of the data
            and the partition as `data.dataset.digest` and `data.partition.digest`.
    """

    folder: Path
    rounds: DataFrame
    diverged: frozenset[str]
    clients: DataFrame
    evaluation: DataFrame
    timings: DataFrame
    partition: Partition | None
    gates: Gates | None
    costs: tuple[int, Floats] | None
    environment: dict[str, Any]
    config: str | None
    settings: dict[str, str]

    @property
    def name(self) -> str:
        return str(self.environment.get("name") or self.folder.absolute().name)

    @property
    def last_round(self) -> int:
        return int(self.rounds.index[-1])

    @property
    def seed(self) -> int | None:
        seed: int | None = self.environment.get("seed")
        return seed

    @cached_property
    def experiment(self) -> dict[str, Any]:
        """Its digest and settings, see `keys.experiment`: written by the run, or from config.yaml.

        A run without a configuration is an experiment by itself.
        """
        if "experiment" in self.environment:
            return {**self.environment["experiment"]}
        alone = {"digest": str(self.folder.absolute())} if self.config is None else {}
        return experiment(self.settings) | alone

    @property
    def group_sizes(self) -> dict[str, int]:
        """Clients of each group, in the order of the configuration."""
        sizes: dict[str, int] = self.environment.get("groups", {})
        return sizes

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

    @property
    def holds(self) -> str:
        """Which model a client tests as its own, and when, as stated by its algorithm."""
        holds = str(self.environment.get("personal") or "what a client holds")
        moments = {"aggregated": ", after aggregation", "trained": ", as its session left it"}
        return holds + moments.get(str(self.environment.get("evaluate_at")), "")

    @property
    def num_clients(self) -> int | None:
        clients: int | None = self.environment.get("clients")
        return clients

    @property
    def planned(self) -> int | None:
        """Number of rounds configured; None if unknown or unlimited."""
        rounds = self.environment.get("rounds") or 0
        return rounds if rounds > 0 else None

    @property
    def finished(self) -> bool:
        """Whether the run has ended, perhaps early; True for a run that recorded neither.

        A run that died after its last round counts as finished, because it has all metrics.
        """
        if "finished" in self.environment or "rounds" not in self.environment:
            return True
        return self.planned is not None and self.planned <= self.last_round

    @property
    def synthetic(self) -> bool:
        return self.environment.get("synthetic") is True

    @property
    def note(self) -> str:
        """For the end of a title."""
        return " (synthetic data)" if self.synthetic else ""

    @property
    def algorithm(self) -> str:
        return str(self.environment.get("algorithm", "algorithm not known"))

    @property
    def data(self) -> str:
        return str(self.environment.get("dataset", "data not known"))

    def series(self, name: str) -> Series:
        """A column of `rounds`; all NaN if there is no such column."""
        return self.rounds.reindex(columns=[name])[name]

    def final(self, name: str) -> float:
        """The last value in a column of `rounds`: inf if it is not finite, NaN without any."""
        return math.inf if name in self.diverged else float(self.series(name).ffill().iloc[-1])

    def has(self, name: str) -> bool:
        """Whether a column of `rounds` was measured, perhaps never as a finite value."""
        return not math.isnan(self.final(name))


def read(folder: Path | str) -> Run:
    """Read a run folder.

    Raises:
        UserError: the folder does not exist, has no metrics.csv or no finished round, or a file is
            damaged.
    """
    import pandas as pd

    folder = Path(folder)
    fix = "name the folder of a run, such as runs/NAME"
    require(folder.is_dir(), "report", f"there is no folder {folder}", fix)
    require((folder / "metrics.csv").is_file(), "report", f"{folder} holds no metrics.csv", fix)
    rounds = _by_round(folder / "metrics.csv")
    found, fix = f"{folder}/metrics.csv holds no finished round yet", "wait for the first to end"
    require(len(rounds) > 0, "report", found, fix)
    clients, growing = read_csv(folder / "clients.csv")
    if clients.empty:
        clients = pd.DataFrame(columns=pd.Index(["round", "client", "group"]))
    at = clients["round"].unique()[-2:]
    last = clients[clients["round"] == at[0 if growing else -1]] if len(at) else clients
    arrays = _arrays(folder / "partition.npz")
    partition = None
    if arrays:
        meta = json.loads(str(arrays["meta"]))
        classes = pd.Index(meta["classes"]).astype(str)
        counts = pd.DataFrame(arrays["train_counts"].astype(np.int64), columns=classes)
        partition = Partition(counts, meta)
    gates, costs = (_arrays(folder / f"{name}.npz") for name in ("gate", "costs"))
    stated, config = (_text(folder / name) for name in ("environment.json", "config.yaml"))
    with reading(folder / "environment.json"):
        environment = json.loads(stated or "{}")
    digests = environment.get("digests", {}).items()
    return Run(
        folder=folder,
        rounds=finite(rounds),
        diverged=frozenset(rounds.columns[np.isinf(rounds.ffill().iloc[-1])]),
        clients=finite(clients),
        evaluation=last.set_index("client").sort_index(),
        timings=finite(_by_round(folder / "timings.csv")),
        partition=partition,
        gates=Gates(int(gates["round"]), gates["personal"].astype(np.float64)) if gates else None,
        costs=(int(costs["round"]), costs["sums"].astype(np.float64)) if costs else None,
        environment=environment,
        config=config,
        settings=read_settings(config or "", folder / "config.yaml")
        | {f"data.{name}.digest": text for name, text in digests},
    )


def _by_round(path: Path) -> DataFrame:
    """A table of finished rounds; empty if it does not exist."""
    table, _ = read_csv(path)
    return table.set_index("round") if len(table) else table


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file; none without it."""
    if not path.is_file():
        return {}
    with reading(path), np.load(path, allow_pickle=False) as file:
        return dict(file)


def _text(path: Path) -> str | None:
    with reading(path):
        return path.read_text("utf-8") if path.is_file() else None
