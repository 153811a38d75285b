"""A run folder as tables.

Its files are metrics.csv, clients.csv, timings.csv, partition.npz, gate.npz, costs.npz,
environment.json and config.yaml. Only metrics.csv must exist. Masks of sparse clients are read by
`studies.dispfl`. The run may still be writing: a last line without a line end is ignored, and the
evaluation that it belongs to counts only if there is no earlier one.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from lightfed.results.columns import is_metric, natural_order
from lightfed.results.csvfile import damaged, finite, read_csv
from lightfed.results.settings import read_settings
from lightfed.utils.errors import UserError
from lightfed.utils.keys import COLUMNS, experiment

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
T = TypeVar("T")
ReadFiles = dict[Path, tuple[tuple[int, ...], Any]]  # what has been read of which state of a file

# what numpy raises for a truncated file or one of another format
UNREADABLE = (KeyError, ValueError, TypeError, EOFError, zlib.error, BadZipFile)
CLIENT_KEYS = ("round", "client", "group")


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


@dataclass(frozen=True, eq=False)
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
            Empty without timings.csv.
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
    rounds: DataFrame = field(repr=False)
    diverged: frozenset[str] = field(repr=False)
    clients: DataFrame = field(repr=False)
    evaluation: DataFrame = field(repr=False)
    timings: DataFrame = field(repr=False)
    partition: Partition | None = field(repr=False)
    gates: Gates | None = field(repr=False)
    costs: tuple[int, Floats] | None = field(repr=False)
    environment: dict[str, Any] = field(repr=False)
    config: str | None = field(repr=False)
    settings: dict[str, str] = field(repr=False)

    @property
    def name(self) -> str:
        return str(self.environment.get("name") or self.folder.absolute().name)

    @property
    def last_round(self) -> int:
        return int(self.rounds.index[-1])

    @property
    def seed(self) -> int | None:
        return whole_number(self.environment.get("seed"))

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
        """Clients of each group, in the order of the configuration; empty if not recorded."""
        sizes: dict[str, int] = self.environment.get("groups", {})
        return sizes

    @cached_property
    def client_groups(self) -> tuple[str, ...]:
        """As the run recorded them, in natural order; the position gives the colour."""
        found = {*self.evaluation["group"], *self.group_sizes}
        return tuple(sorted(found, key=natural_order))

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
        """From the partition, else from the environment, else from the last evaluation."""
        if self.partition is not None:
            return len(self.partition.counts)
        return whole_number(self.environment.get("clients")) or len(self.evaluation) or None

    @property
    def planned(self) -> int | None:
        """Number of rounds configured; None if unknown or unlimited."""
        rounds = whole_number(self.environment.get("rounds"))
        return rounds if rounds and rounds > 0 else None

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


def read(folder: Path | str, known: ReadFiles | None = None) -> Run:
    """Read a run folder.

    Args:
        folder: its path.
        known: what earlier calls have read, to which this one adds: only files that have changed
            since then are read again.

    Raises:
        UserError: the folder does not exist, has no metrics.csv or no finished round, a file is
            damaged, or it was written by a newer version.
    """
    folder, known = Path(folder), {} if known is None else known
    if not folder.is_dir():
        raise UserError("report", f"there is no folder {folder}", "name the folder of a run")
    if not (folder / "metrics.csv").is_file():
        fix = "name the folder of a run, such as runs/NAME"
        raise UserError("report", f"{folder} holds no metrics.csv", fix)

    def once(name: str, reader: Callable[[Path], T]) -> T:
        path = folder / name
        found = path.stat() if path.is_file() else None
        state = () if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)
        if path not in known or known[path][0] != state:
            known[path] = (state, reader(path))
        value: T = known[path][1]
        return value

    try:
        environment = once("environment.json", _environment)
        clients, evaluation = once("clients.csv", _clients)
        config, settings = once("config.yaml", _config)
        rounds, diverged = once("metrics.csv", _rounds)
        digests: dict[str, str] = environment.get("digests", {})
        return Run(
            folder=folder,
            rounds=rounds.copy(),  # a caller may change its own
            diverged=diverged,
            clients=clients.copy(),
            evaluation=evaluation,
            timings=once("timings.csv", lambda path: finite(_by_round(path))),
            partition=once("partition.npz", lambda path: _arrays(path, _partition)),
            gates=once("gate.npz", lambda path: _of_round(path, "personal", Gates)),
            costs=once("costs.npz", lambda path: _of_round(path, "sums", lambda *read: read)),
            environment=environment,
            config=config,
            settings=settings | {f"data.{name}.digest": text for name, text in digests.items()},
        )
    except OSError as error:
        raise damaged(Path(str(error.filename)), str(error.strerror)) from error


def whole_number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _config(path: Path) -> tuple[str | None, dict[str, str]]:
    """The text, and the settings in it."""
    text = path.read_text("utf-8", "replace") if path.is_file() else None
    return text, read_settings(text or "", path)


def _rounds(path: Path) -> tuple[DataFrame, frozenset[str]]:
    """The finite values, and the columns whose last one is not."""
    table = _by_round(path)
    if table.empty:
        fix = "wait for the first round to end"
        raise UserError("report", f"{path} holds no finished round yet", fix)
    return finite(table), frozenset(table.columns[np.isinf(table.ffill().iloc[-1])])


def _by_round(path: Path) -> DataFrame:
    """A table of finished rounds; empty if it does not exist."""
    import pandas as pd

    if not path.is_file():
        return pd.DataFrame()
    # a killed and resumed run may have written a round twice: the later row counts
    table = read_csv(path, keys=["round"])[0].drop_duplicates("round", keep="last")
    return table.set_index("round").sort_index()


def _clients(path: Path) -> tuple[DataFrame, DataFrame]:
    """All evaluations, and the last complete one by client."""
    import pandas as pd

    table, cut = pd.DataFrame(columns=pd.Index(CLIENT_KEYS)), False
    if path.is_file():
        table, cut = read_csv(path, keys=CLIENT_KEYS, text=["group"])
    table = table.drop_duplicates(["round", "client"], keep="last")
    at = table["round"].unique()
    last = table[table["round"] == at[-2 if cut and len(at) > 1 else -1]] if len(at) else table
    return finite(table), last.set_index("client").sort_index()


def _arrays(path: Path, read: Callable[[Mapping[str, np.ndarray]], T]) -> T | None:
    """`read` applied to the arrays of an npz file; None without it."""
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            return read(file)
    except UNREADABLE as error:
        raise damaged(path, str(error)) from error


def _partition(file: Mapping[str, np.ndarray]) -> Partition:
    import pandas as pd

    counts = file["train_counts"].astype(np.int64)
    _, num_classes = counts.shape
    meta = json.loads(str(file["meta"])) if "meta" in file else {}
    stated = meta.get("classes", ())
    classes = pd.Index(stated if len(stated) == num_classes else range(num_classes)).astype(str)
    return Partition(pd.DataFrame(counts, columns=classes), meta)


def _of_round(path: Path, name: str, made: Callable[[int, Floats], T]) -> T | None:
    """The number of the round and a matrix of an npz file; None without it."""

    def values(file: Mapping[str, np.ndarray]) -> T:
        _rows, _columns = file[name].shape
        return made(int(file["round"]), file[name].astype(np.float64))

    return _arrays(path, values)


def _environment(path: Path) -> dict[str, Any]:
    try:
        environment: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise damaged(path, str(error)) from error
    return environment
