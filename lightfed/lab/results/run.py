"""A run folder as tables, and what came out of it: its primary metric, best values and costs.

Only metrics.csv must exist. Masks of sparse clients are read by `studies.dispfl`. The run may still
be writing: a last line without a line end is ignored, and the evaluation that it belongs to counts
only if there is no earlier one.

A column of metrics.csv is `<kind>/<metric>`, its spread, or its mean over a client group. Metrics
(`val/acc`) and client groups may have slashes in their names.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightfed.lab.results.text import direction, is_share
from lightfed.utils import record
from lightfed.utils.errors import UserError, require

if TYPE_CHECKING:
    from pandas import DataFrame, Series

# what was tested: which model, on whose samples; the first that a run has is its main one
KINDS = ("global", "personal", "local", "trained", "aggregated", "finetuned")
# name on the page and explanation of the clients' kinds, except `personal`
OF_CLIENTS = {
    "local": ("local", "the global model on a client's own test samples"),
    "trained": ("as trained", "what a client holds, before aggregation"),
    "aggregated": ("after aggregation", "what a client holds, before its next session"),
    "finetuned": ("fine-tuned", "the global model after a session on a client's data"),
}
MOST_GROUPS, MOST_COLUMNS = 500, 5_000  # more than anybody reads, in seconds
TIME = "virtual_time"  # column of the seconds of a simulated clock since the start
NAN = re.compile(r"(?<=,)nan(?=[,\r\n]|$)")


class Run:
    """One run folder, see `read`. Its tables are read on first use: a UserError if damaged.

    Attributes:
        folder: that of the run.
        environment: environment.json, which states all the others.
        name, algorithm, data, seed, num_clients: as recorded; the last two are None without.
        group_sizes: clients of each group, in the order of the configuration.
        digest: that of its experiment, see `keys.experiment`; without one it is one by itself.
        settings: those of its experiment by their dotted keys, all values text.
        note: for the end of a title: says so if the data are synthetic.
        planned: number of rounds configured; None if unlimited.
    """

    def __init__(self, folder: Path) -> None:
        with reading(folder / record.NAME) as path:
            recorded = record.parse(record.read_text(path)) if path.is_file() else {}
        stated = {name: value for name, value in recorded.items() if value is not None}
        experiment, rounds = stated.get("experiment", {}), stated.get("rounds", -1)
        self.folder, self.environment = folder, recorded
        self.name = str(stated.get("name", folder.name))
        self.algorithm = str(stated.get("algorithm", "algorithm not known"))
        self.data = str(stated.get("dataset", "data not known"))
        self.seed: int | None = stated.get("seed")
        self.num_clients: int | None = stated.get("clients")
        self.group_sizes: dict[str, int] = stated.get("groups", {})
        self.digest = str(experiment.get("digest", folder.absolute()))
        self.settings: dict[str, str] = experiment.get("settings", {})
        self.note = " (synthetic data)" if stated.get("synthetic") else ""
        self.planned: int | None = rounds if rounds > 0 else None
        if len(self.group_sizes) > MOST_GROUPS:
            found = f"{folder} has {len(self.group_sizes)} groups of clients"
            raise UserError("report", found, f"reports show at most {MOST_GROUPS}")

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
    def partition(self) -> DataFrame | None:
        """Training samples of each class (column) and client (row)."""
        import pandas as pd

        if not (arrays := self.arrays("partition")):
            return None
        counts = pd.DataFrame(arrays["train_counts"].astype(int))
        classes = pd.Index(json.loads(str(arrays["meta"]))["classes"] or counts.columns)
        return counts.set_axis(classes.astype(str), axis=1)

    @cached_property
    def costs(self) -> dict[str, np.ndarray]:
        """(3,) bytes up, bytes down and FLOPs of all clients of each group since the start.

        Empty without costs.npz or the names of the groups, and if a later round has added to them.
        """
        arrays = self.arrays("costs")
        if not arrays or not self.group_sizes or int(arrays["round"]) != self.last_round:
            return {}
        return dict(zip(self.group_sizes, arrays["sums"], strict=True))

    @cached_property
    def config(self) -> str:
        """The text of config.yaml; empty without it."""
        with reading(self.folder / "config.yaml") as path:
            return path.read_text("utf-8") if path.is_file() else ""

    def check(self) -> None:
        """Read all that reports need; a UserError names the folder if one of its files is damaged.

        Without this a report of many runs would end at the first of them.
        """
        with reading(self.folder):
            whole = [self.costs, self.partition, self.client_groups, self.metrics, self.config]
            assert len(whole) == 5, "all of them are read"

    @property
    def last_round(self) -> int:
        return int(self.rounds.index[-1])

    @property
    def of_search(self) -> bool:
        """Whether the run only served to choose a setting, as `compare --tune` does."""
        return bool(self.environment.get("search"))

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
        """Names in the order of the configuration; the position gives the colour."""
        return tuple(dict.fromkeys([*self.group_sizes, *self.evaluation["group"]]))

    @cached_property
    def metrics(self) -> list[str]:
        """The columns that are metrics of the whole run: not of a group, not a spread."""
        columns = [name for name in map(str, self.rounds) if is_metric(name)]
        groups = self.client_groups if len(self.client_groups) > 1 else ()
        ends = [*(f"/{group}" for group in groups), "_std", "_worst10"]
        parts = {name + end for name in columns for end in ends}
        return [name for name in columns if name not in parts]

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

    def best(self, name: str) -> tuple[float, int]:
        """The best value of a column, and its round; NaN and 0 without any."""
        values = self.series(name).dropna()
        if values.empty:
            return math.nan, 0
        place = int((values * direction(name)).argmax())
        return float(values.iloc[place]), int(values.index[place])

    @cached_property
    def _measured(self) -> DataFrame:
        """metrics.csv by round, inf where not finite."""
        return read_csv(self.folder / "metrics.csv")[0].set_index("round")

    @cached_property
    def _tested(self) -> tuple[DataFrame, bool]:
        """clients.csv, and whether its last line is incomplete."""
        return read_csv(self.folder / "clients.csv")

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of an npz file; none without it."""
        path = self.folder / f"{name}.npz"
        if not path.is_file():
            return {}
        with reading(path), np.load(path, allow_pickle=False) as file:
            return dict(file)


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
    if not len(run.rounds):
        found, fix = f"{metrics} holds no finished round yet", "wait for the first round to end"
        raise NotBegun("report", found, fix)
    with reading(metrics):
        rounds = run.rounds.index.to_numpy()
        whole = np.isfinite(rounds).all() and (rounds % 1 == 0).all() and rounds[0] >= 1
        if not whole or (np.diff(rounds) <= 0).any():
            raise ValueError("its rounds are not 1, 2, ... in order")
    return run


class NotBegun(UserError):
    """A run has no finished round yet."""


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Raise a UserError that names the file, whatever a library raises that cannot read it."""
    try:
        yield path
    except UserError:
        raise
    except Exception as error:
        found = f"{path} cannot be read: {' '.join(str(error).split())}"
        version = record.by_another_version(_recorded(path))
        found = f"{found}; {version}" if version else found
        raise UserError("report", found, "write the file again or remove it") from error


def _recorded(path: Path) -> dict[str, Any]:
    """What environment.json says of the run of a file, or of a folder; empty if unreadable."""
    return record.read_record(path if path.is_dir() else path.parent)


def read_csv(path: Path) -> tuple[DataFrame, bool]:
    """The complete lines of a csv file, and whether the last one is incomplete.

    All columns but `group` are numbers. An empty field is NaN, and `nan`, a value that was
    measured, is infinite. Without a line it has no rows. A UserError if the file is damaged.
    """
    import pandas as pd

    text = path.read_bytes().decode("utf-8", "replace") if path.is_file() else ""
    lines, _, rest = text.rpartition("\n")
    if "\n" not in lines:  # no row yet
        return pd.DataFrame(columns=["round", "client", "group"]), bool(rest)
    with reading(path):
        columns = lines.partition("\n")[0].count(",") + 1
        if columns > MOST_COLUMNS:
            raise ValueError(f"it has {columns} columns, and reports show at most {MOST_COLUMNS}")
        source = io.StringIO(NAN.sub("inf", lines))
        table = pd.read_csv(source, dtype={"group": "str"}, na_values=[""], keep_default_na=False)
        texts = table.drop(columns="group", errors="ignore").select_dtypes(exclude="number")
        if len(texts.columns) or "round" not in table:
            raise ValueError(f"no numbers in column {[*texts, 'round'][0]}")
    return table, bool(rest)


def finite(table: DataFrame) -> DataFrame:
    return table.replace([np.inf, -np.inf], np.nan)


def is_metric(column: str) -> bool:
    return "/" in column and column.partition("/")[0] in KINDS


def base_name(column: str) -> str:
    """`personal/val/acc` -> `val/acc`; a column without a kind keeps its name."""
    return column.partition("/")[2] if is_metric(column) else column


def primary_metric(run: Run) -> str:
    """The run's main column: accuracy, else the first metric, else the training loss."""

    def rank(column: str) -> tuple[bool, bool, int]:
        kind, _, metric = column.partition("/")
        return metric != "accuracy", not is_share(metric), KINDS.index(kind)

    own = [name for name in run.metrics if run.has(name) and "loss" not in name.lower()]
    return min(own, key=rank, default="train_loss")


def traffic(run: Run) -> Series:
    """By round: bytes up and down of all clients since the start of the run."""
    both = run.rounds.reindex(columns=["bytes_up", "bytes_down"])
    return both.sum(axis=1).cumsum().where(both.notna().any(axis=1))


def totals(run: Run) -> dict[str, float]:
    """Over all clients and rounds: the columns summed, and `sent`, up and down; NaN if unknown.

    `per_round` are the mean seconds of the timed rounds, and `stored_bytes` those kept by a client,
    mean over the clients of the last evaluation.
    """
    summed = ("bytes_up", "bytes_down", "server_bytes", "flops", "seconds")
    found = {name: float(run.series(name).sum(min_count=1)) for name in summed}
    kept = run.evaluation.reindex(columns=["stored_bytes"])["stored_bytes"].mean()
    found |= {"sent": float(traffic(run).max()), "stored_bytes": float(kept)}
    return found | {"per_round": float(run.series("seconds").mean())}


def worst_tenth(values: Series, metric: str) -> float:
    """The mean of the worst tenth (rounded up) of the known values; inf if one is not finite."""
    known = values.dropna()
    if np.isinf(known).any():
        return math.inf
    worst = known.nsmallest if direction(metric) > 0 else known.nlargest
    return float(worst(math.ceil(len(known) / 10)).mean())
