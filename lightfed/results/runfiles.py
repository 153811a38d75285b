"""The contents of a run folder, as arrays.

Its files are metrics.csv, clients.csv, partition.npz, gate.npz, environment.json and config.yaml.
Only metrics.csv must exist. Masks of sparse clients are large and read by `studies.dispfl.masks`.
The run may still be writing: a last line without a line end is ignored, and the evaluation that it
belongs to counts only if there is no earlier one.
"""

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from lightfed.results.columns import of_client_groups
from lightfed.results.csvrows import CsvRows, damaged
from lightfed.results.settings import read_settings
from lightfed.utils.errors import UserError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
T = TypeVar("T")

# what numpy raises for a truncated file or one of another format
UNREADABLE = (KeyError, ValueError, AttributeError, TypeError, EOFError, zlib.error, BadZipFile)
CLIENT_KEYS = ("round", "client", "cohort")
CLIENT_COSTS = ("samples", "bytes_up", "bytes_down", "flops", "stored_bytes")


@dataclass(frozen=True)
class Evaluation:
    """The last personalised evaluation: K clients in the order of their ids.

    Attributes:
        round: finished rounds at that time.
        client: (K,) ids.
        client_group: of each client, length K.
        values: the other columns of clients.csv, (K,) each. Bytes and FLOPs count from the start.
    """

    round: int
    client: Integers
    client_group: tuple[str, ...]
    values: dict[str, Floats]

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(name for name in self.values if name not in CLIENT_COSTS)


@dataclass(frozen=True)
class Split:
    """How many training samples of each class each client has.

    Attributes:
        counts: (clients, classes).
        classes: their names.
        meta: scheme, seed, data set and whatever else was saved with the counts.
    """

    counts: Integers
    classes: tuple[str, ...]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Gates:
    """Gate outputs of pFedMoE's clients at the last evaluation.

    Attributes:
        round: finished rounds at that time.
        personal: (clients, classes) mean weight of a client's private expert over its test samples
            of a class; the shared expert has the rest. NaN without such samples.
    """

    round: int
    personal: Floats


@dataclass(frozen=True, eq=False)
class RunFiles:
    """One run folder.

    Attributes:
        folder: its path.
        rounds: (R,) numbers of the finished rounds, ascending.
        metrics: the other columns of metrics.csv, (R,) each; NaN if not measured.
        evaluation: None if no clients were evaluated individually.
        split: None without partition.npz.
        gates: None without gate.npz.
        environment: empty without environment.json.
        config: the text of config.yaml; None without it.
    """

    folder: Path
    rounds: Integers
    metrics: dict[str, Floats]
    evaluation: Evaluation | None
    split: Split | None
    gates: Gates | None
    environment: dict[str, Any]
    config: str | None

    @property
    def name(self) -> str:
        return str(self.environment.get("name") or self.folder.absolute().name)

    @property
    def last_round(self) -> int:
        return int(self.rounds[-1])

    @cached_property
    def client_groups(self) -> tuple[str, ...]:
        """As the run recorded them, in natural order; the position gives the colour."""
        found = set(self.evaluation.client_group) if self.evaluation else set()
        stated = self.environment.get("cohorts")
        found |= set(stated) if isinstance(stated, dict) else set()
        return tuple(sorted(found, key=natural_order))

    @cached_property
    def client_group_columns(self) -> frozenset[str]:
        """Columns of metrics.csv with means over a single client group."""
        return of_client_groups(self.metrics, self.client_groups)

    @property
    def holds(self) -> str:
        """Which model a client tests as its own, and when, as stated by its algorithm."""
        holds = str(self.environment.get("personal") or "what a client holds")
        moments = {"aggregated": ", after aggregation", "trained": ", as its session left it"}
        return holds + moments.get(str(self.environment.get("evaluate_at")), "")

    @property
    def num_clients(self) -> int | None:
        """From the partition, else from the environment, else from the last evaluation."""
        if self.split is not None:
            return len(self.split.counts)
        stated = whole_number(self.environment.get("clients"))
        if stated is None and self.evaluation is not None:
            return len(self.evaluation.client)
        return stated

    @property
    def planned(self) -> int | None:
        """Number of rounds configured; None if unknown or unlimited."""
        stated = whole_number(self.environment.get("rounds"))
        return stated if stated is not None and stated > 0 else None

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
        meta = self.split.meta if self.split else {}
        return self.environment.get("synthetic") is True or meta.get("synthetic") is True

    @property
    def note(self) -> str:
        """For the end of a title."""
        return " (synthetic data)" if self.synthetic else ""

    @property
    def algorithm(self) -> str:
        return str(self.environment.get("algorithm"))

    @property
    def data(self) -> str:
        return str(self.environment.get("dataset", "data not known"))

    @cached_property
    def settings(self) -> dict[str, str]:
        """The settings in config.yaml by their dotted keys.

        Raises:
            UserError: the file is not YAML.
        """
        return read_settings(self.config or "", self.folder / "config.yaml")

    def client_groups_of(self, clients: Integers) -> np.ndarray:
        """(clients,) the group of each client; empty if no evaluation names it."""
        found = self.evaluation
        known = dict(zip(found.client.tolist(), found.client_group, strict=True)) if found else {}
        return np.array([known.get(client, "") for client in clients.tolist()], dtype=np.str_)

    def series(self, name: str) -> Floats:
        """(R,) a column of metrics.csv; all NaN if there is no such column."""
        return self.metrics.get(name, np.full(len(self.rounds), np.nan))


def load(folder: Path) -> RunFiles:
    """Read a run folder.

    Raises:
        UserError: the folder does not exist, has no metrics.csv or no finished round, or a file is
            damaged.
    """
    if not folder.is_dir():
        raise UserError("report", f"there is no folder {folder}", "name the folder of a run")
    if not (folder / "metrics.csv").is_file():
        fix = "name the folder of a run, such as runs/NAME"
        raise UserError("report", f"{folder} holds no metrics.csv", fix)
    try:
        return _load(folder)
    except OSError as error:
        raise damaged(Path(str(error.filename)), str(error.strerror)) from error


def natural_order(name: str) -> list[tuple[int, str]]:
    """A sort key that puts client10 after client9."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def whole_number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _load(folder: Path) -> RunFiles:
    rounds, metrics = _read_metrics(folder / "metrics.csv")
    config = folder / "config.yaml"
    return RunFiles(
        folder=folder,
        rounds=rounds,
        metrics=metrics,
        evaluation=_read_evaluation(folder / "clients.csv"),
        split=_read_arrays(folder / "partition.npz", _split),
        gates=_read_arrays(folder / "gate.npz", _gates),
        environment=_read_environment(folder / "environment.json"),
        config=config.read_text("utf-8", "replace") if config.is_file() else None,
    )


def _read_metrics(path: Path) -> tuple[Integers, dict[str, Floats]]:
    rows: dict[int, list[float]] = {}
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = CsvRows(path, file)
        reader.require(("round",))
        columns = [name for name in reader.header if name != "round"]
        for row in reader:
            # a killed and resumed run may have written a round twice: the later row counts
            rows[reader.whole(row, "round")] = [reader.number(row, name) for name in columns]
    if not rows:
        fix = "wait for the first round to end"
        raise UserError("report", f"{path} holds no finished round yet", fix)
    order = sorted(rows)
    return np.array(order, dtype=np.int64), _by_column(columns, [rows[i] for i in order])


def _read_evaluation(path: Path) -> Evaluation | None:
    """The last evaluation in the file; earlier ones may be millions of rows and are dropped."""
    if not path.is_file():
        return None
    number, rows = -1, dict[int, tuple[str, list[float]]]()
    earlier = number, rows
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = CsvRows(path, file)
        reader.require(CLIENT_KEYS)
        columns = [name for name in reader.header if name not in CLIENT_KEYS]
        for row in reader:
            if (found := reader.whole(row, "round")) != number:
                earlier, number, rows = (number, rows), found, {}
            values = [reader.number(row, name) for name in columns]
            rows[reader.whole(row, "client")] = row["cohort"], values
    if reader.cut and earlier[1]:
        number, rows = earlier
    if not rows:
        return None
    order = sorted(rows)
    return Evaluation(
        round=number,
        client=np.array(order, dtype=np.int64),
        client_group=tuple(rows[client][0] for client in order),
        values=_by_column(columns, [rows[client][1] for client in order]),
    )


def _by_column(columns: list[str], rows: list[list[float]]) -> dict[str, Floats]:
    table = np.array(rows, dtype=np.float64).reshape(len(rows), -1)
    return {name: table[:, i] for i, name in enumerate(columns)}


def _read_arrays(path: Path, read: Callable[[Mapping[str, np.ndarray]], T]) -> T | None:
    """`read` applied to the arrays of an npz file; None if there is no file."""
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            return read(file)
    except UNREADABLE as error:
        raise damaged(path, str(error)) from error


def _split(file: Mapping[str, np.ndarray]) -> Split:
    counts = file["train_counts"].astype(np.int64)
    _, num_classes = counts.shape
    meta = json.loads(str(file["meta"])) if "meta" in file else {}
    classes = tuple(str(name) for name in meta.get("classes", ()))
    if len(classes) != num_classes:
        classes = tuple(str(i) for i in range(num_classes))
    return Split(counts=counts, classes=classes, meta=meta)


def _gates(file: Mapping[str, np.ndarray]) -> Gates:
    personal = file["personal"].astype(np.float64)
    _clients, _classes = personal.shape
    return Gates(int(file["round"]), personal)


def _read_environment(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        environment = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise damaged(path, str(error)) from error
    if not isinstance(environment, dict):
        raise damaged(path, f"a {type(environment).__name__} instead of a mapping")
    return environment
