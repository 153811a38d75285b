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
from lightfed.utils.errors import UserError

if TYPE_CHECKING:
    from pandas import DataFrame, Series

# What was tested: which model, on whose samples. The first that a run has is its main one.
KINDS = (
    "global",
    "personal",
    "local",
    "trained",
    "aggregated",
    "finetuned",
    "unseen",
    "unseen_finetuned",
    "gap",
)

# Before a kind: measured on validation samples, by which choices are made.
VALIDATION = "validation/"

# The name on the page and the explanation of the kinds of clients, except `personal`.
OF_CLIENTS = {
    "local": ("local", "the global model on a client's own test samples"),
    "trained": ("as trained", "what a client holds, before aggregation"),
    "aggregated": ("after aggregation", "what a client holds, before its next session"),
    "finetuned": ("fine-tuned", "the global model after a session on a client's data"),
    "unseen": ("unseen", "the global model on clients that take part in no round"),
    "unseen_finetuned": (
        "unseen, fine-tuned",
        "clients that take part in no round, after they have trained what is their own",
    ),
    "gap": ("gap in", "clients that take part minus clients that never do"),
}

# Nobody reads more than these, and they would take minutes to draw.
MOST_GROUPS = 500
MOST_COLUMNS = 5_000

# The column with the seconds of a simulated clock since the start.
TIME = "virtual_time"

# The column with the energy that clients' devices spend in a round.
ENERGY = "joules"

# A cell whose value was measured and is not a number; an empty cell was not measured.
NAN = re.compile(r"(?<=,)nan(?=[,\r\n]|$)")


class Run:
    """One run folder; see `read`.

    Its tables are read when they are used for the first time. A UserError says if one is damaged.

    Attributes:
        folder: The folder of the run.
        environment: The content of environment.json, which has all of the following.
        name: The name of the run.
        algorithm: The class of its algorithm.
        data: The name of its data set.
        seed: Its seed; None if it is unknown.
        num_clients: The number of its clients; None if it is unknown.
        group_sizes: The number of clients of each group, in the order of the configuration.
        digest: The digest of its experiment (`keys.experiment`). A run without one is an
            experiment by itself.
        settings: The settings of its experiment by their dotted keys; all values are text.
        note: What to put at the end of a title: says so if the data are synthetic.
        planned: The configured number of rounds; None if it is unlimited.
    """

    def __init__(self, folder: Path) -> None:
        with reading(folder / record.NAME) as path:
            recorded = record.parse(record.read_text(path)) if path.is_file() else {}
        known = {name: value for name, value in recorded.items() if value is not None}

        self.folder = folder
        self.environment = recorded
        self.name = str(known.get("name", folder.name))
        self.algorithm = str(known.get("algorithm", "algorithm not known"))
        self.data = str(known.get("dataset", "data not known"))
        self.seed: int | None = known.get("seed")
        self.num_clients: int | None = known.get("clients")
        self.group_sizes: dict[str, int] = known.get("groups", {})
        self.note = " (synthetic data)" if known.get("synthetic") else ""

        experiment = known.get("experiment", {})
        self.digest = str(experiment.get("digest", folder.absolute()))
        self.settings: dict[str, str] = experiment.get("settings", {})

        rounds = known.get("rounds", -1)
        self.planned: int | None = rounds if rounds > 0 else None

        if len(self.group_sizes) > MOST_GROUPS:
            raise UserError(
                key="report",
                found=f"{folder} has {len(self.group_sizes)} groups of clients",
                fix=f"reports show at most {MOST_GROUPS}",
            )

    @cached_property
    def rounds(self) -> DataFrame:
        """The table metrics.csv by round; NaN where a value was not measured, or is not finite."""
        return finite(self._measured)

    @cached_property
    def clients(self) -> DataFrame:
        """The table clients.csv, with a row for each client and evaluation; empty without it.

        It has columns `round`, `client`, `group`, metrics and costs. Bytes and FLOPs count from the
        start.
        """
        return finite(self._tested[0])

    @cached_property
    def evaluation(self) -> DataFrame:
        """The last complete evaluation of `clients`, by client; empty without one.

        Values that are not finite are infinite here.
        """
        table, is_growing = self._tested
        last_rounds = table["round"].unique()[-2:]
        if len(last_rounds) == 0:
            return table.set_index("client").sort_index()

        # The evaluation that is still written lacks clients. Take the one before it, if there is.
        chosen = last_rounds[0] if is_growing else last_rounds[-1]
        return table[table["round"] == chosen].set_index("client").sort_index()

    def worst_clients(self, metric: str, tested: DataFrame | None = None) -> float:
        """Return the mean of a metric over the worst tenth of clients in the last evaluation.

        Validation samples choose the clients, if they have some; see `worst_tenth`.

        Args:
            metric: The column of clients.csv.
            tested: The rows of some clients; by default those of all.
        """
        table = self.evaluation if tested is None else tested
        chosen_by = table[VALIDATION + metric] if self.validates_clients(metric) else None
        return worst_tenth(table[metric], metric, chosen_by)

    def validates_clients(self, metric: str) -> bool:
        """Return whether clients have a metric on validation samples in the last evaluation."""
        name = VALIDATION + metric
        return name in self.evaluation and bool(np.isfinite(self.evaluation[name]).any())

    @cached_property
    def partition(self) -> DataFrame | None:
        """The number of training samples of each client (row) and class (column)."""
        import pandas as pd

        arrays = self.arrays("partition")
        if not arrays:
            return None
        counts = pd.DataFrame(arrays["train_counts"].astype(int))
        classes = pd.Index(json.loads(str(arrays["meta"]))["classes"] or counts.columns)
        return counts.set_axis(classes.astype(str), axis=1)

    @cached_property
    def costs(self) -> dict[str, np.ndarray]:
        """For each group an array of shape (3,): bytes up, bytes down and FLOPs of all its clients.

        They count from the start. Empty without costs.npz or the names of the groups, and if the
        file is that of an earlier round.
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
        """Read all that reports need, so that a damaged file is found before any of it is shown.

        Without this, a report of many runs would end at the first damaged one.

        Raises:
            UserError: A file is damaged; the error names the folder.
        """
        with reading(self.folder):
            # Each of these reads a file, and keeps what it has read.
            for name in ("costs", "partition", "client_groups", "metrics", "config"):
                getattr(self, name)

    @property
    def last_round(self) -> int:
        """The last round, counted from 1."""
        return int(self.rounds.index[-1])

    @property
    def of_search(self) -> bool:
        """Whether the run only served to choose a setting, as `compare --tune` does."""
        return bool(self.environment.get("search"))

    @property
    def finished(self) -> bool:
        """Whether the run has ended, perhaps early.

        A run that did not record its end or its rounds counts as finished. A run that died after
        its last round does, too, because it has all metrics.
        """
        if "finished" in self.environment or "rounds" not in self.environment:
            return True
        return self.planned is not None and self.planned <= self.last_round

    @cached_property
    def client_groups(self) -> tuple[str, ...]:
        """The names of groups in the order of the configuration; the position gives the color."""
        return tuple(dict.fromkeys([*self.group_sizes, *self.evaluation["group"]]))

    @cached_property
    def metrics(self) -> list[str]:
        """The columns that are metrics of the whole run: not of a group, and not a spread."""
        columns = [name for name in map(str, self.rounds) if is_metric(name)]

        endings = ["_std", "_worst10", "_half"]
        if len(self.client_groups) > 1:
            endings += [f"/{group}" for group in self.client_groups]

        # A metric can itself end like a group or a spread. It is one only beside its metric.
        details = {name + ending for name in columns for ending in endings}
        return [name for name in columns if name not in details]

    def series(self, name: str) -> Series:
        """Return a column of `rounds`; all NaN if there is no such column."""
        return self.rounds.reindex(columns=[name])[name]

    def final(self, name: str) -> float:
        """Return the last value in a column of metrics.csv.

        It is infinite if the last one is not finite, and NaN if there is none.
        """
        return float(self._finals.get(name, math.nan))

    def after(self, name: str, rounds: int) -> float:
        """Return the last value in a column of metrics.csv after so many rounds; see `final`."""
        if name not in self._measured:
            return math.nan
        values = self._measured[name].loc[:rounds].dropna()
        last = float(values.iloc[-1]) if len(values) else math.nan
        return math.inf if math.isinf(last) else last

    def has(self, name: str) -> bool:
        """Return whether a column of metrics.csv was measured, perhaps never as a finite value."""
        return not math.isnan(self.final(name))

    def best(self, name: str) -> tuple[float, int]:
        """Return the value of a column in its best round, and that round; NaN and 0 without any.

        The round is chosen by the same metric on validation samples, if the run measured it there.
        """
        values = self.series(name).dropna()
        if values.empty:
            return math.nan, 0

        choosing = self.series(self.chosen_by(name)).reindex(values.index)
        if choosing.isna().all():
            choosing = values
        position = int((choosing * direction(name)).argmax())
        return float(values.iloc[position]), int(values.index[position])

    def chosen_by(self, name: str) -> str:
        """Return the column by which a choice about a column is made.

        It is the same metric on validation samples, or the column itself without them.
        """
        on_validation = VALIDATION + name
        return on_validation if self.has(on_validation) else name

    @cached_property
    def _finals(self) -> Series:
        """The last value in each column of numbers; see `final`."""
        # Of all columns at once: reports ask for each of them several times.
        numbers = self._measured.select_dtypes("number")
        return numbers.replace(-math.inf, math.inf).ffill().iloc[-1]

    @cached_property
    def _measured(self) -> DataFrame:
        """The table metrics.csv by round, infinite where a value is not finite."""
        table, _ = read_csv(self.folder / "metrics.csv")
        return table.set_index("round")

    @cached_property
    def _tested(self) -> tuple[DataFrame, bool]:
        """The table clients.csv, and whether its last line is incomplete."""
        return read_csv(self.folder / "clients.csv")

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays of an npz file of the run; none without it."""
        path = self.folder / f"{name}.npz"
        if not path.is_file():
            return {}
        with reading(path), np.load(path, allow_pickle=False) as file:
            return dict(file)


def read(folder: Path | str) -> Run:
    """Read a run folder.

    Raises:
        UserError: The folder does not exist, has no metrics.csv, or a file is damaged.
        NotBegun: The run has no finished round yet.
    """
    run = Run(Path(folder))
    fix = "name the folder of a run, such as runs/NAME"
    if not run.folder.is_dir():
        raise UserError("report", found=f"there is no folder {folder}", fix=fix)

    metrics = run.folder / "metrics.csv"
    if not metrics.is_file():
        raise UserError("report", found=f"{folder} holds no metrics.csv", fix=fix)
    if run.rounds.empty:
        raise NotBegun(
            key="report",
            found=f"{metrics} holds no finished round yet",
            fix="wait for the first round to end",
        )

    with reading(metrics):
        rounds = run.rounds.index.to_numpy()
        are_whole = np.isfinite(rounds).all() and (rounds % 1 == 0).all() and rounds[0] >= 1
        are_in_order = (np.diff(rounds) > 0).all()
        if not (are_whole and are_in_order):
            raise ValueError("its rounds are not 1, 2, ... in order")
    return run


class NotBegun(UserError):
    """A run has no finished round yet."""


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Name a file or folder in the error of whatever cannot read it in a block.

    Raises:
        UserError: A library has raised any error.
    """
    try:
        yield path
    except UserError:
        raise
    except Exception as error:
        found = f"{path} cannot be read: {' '.join(str(error).split())}"
        version = record.by_another_version(_record_of(path))
        if version:
            found += f"; {version}"
        raise UserError("report", found, "write the file again or remove it") from error


def _record_of(path: Path) -> dict[str, Any]:
    """Return environment.json of a run folder or of one of its files; empty if it is unreadable."""
    return record.read_record(path if path.is_dir() else path.parent)


def read_csv(path: Path) -> tuple[DataFrame, bool]:
    """Read the complete lines of a csv file.

    All columns but `group` are numbers. An empty field is NaN. The word `nan`, a value that was
    measured, is infinite.

    Args:
        path: The file. Without it there are no rows.

    Returns:
        The table, and whether the last line of the file is incomplete.

    Raises:
        UserError: The file is damaged.
    """
    import pandas as pd

    text = path.read_bytes().decode("utf-8", "replace") if path.is_file() else ""
    lines, _, incomplete_line = text.rpartition("\n")
    is_growing = incomplete_line != ""
    has_rows = "\n" in lines
    if not has_rows:
        return pd.DataFrame(columns=["round", "client", "group"]), is_growing

    with reading(path):
        columns = lines.partition("\n")[0].count(",") + 1
        if columns > MOST_COLUMNS:
            raise ValueError(f"it has {columns} columns, and reports show at most {MOST_COLUMNS}")

        source = io.StringIO(NAN.sub("inf", lines))
        table = pd.read_csv(source, dtype={"group": "str"}, na_values=[""], keep_default_na=False)
        texts = table.drop(columns="group", errors="ignore").select_dtypes(exclude="number")
        if len(texts.columns) > 0:
            raise ValueError(f"no numbers in column {texts.columns[0]}")
        if "round" not in table:
            raise ValueError("no numbers in column round")
    return table, is_growing


def finite(table: DataFrame) -> DataFrame:
    """Return a table with NaN in place of infinite values."""
    return table.replace([np.inf, -np.inf], np.nan)


def is_metric(column: str) -> bool:
    """Return whether a column begins with what was tested, such as `global/`."""
    kind, slash, _ = column.removeprefix(VALIDATION).partition("/")
    return slash != "" and kind in KINDS


def base_name(column: str) -> str:
    """Return a metric without what was tested: `personal/val/acc` is `val/acc`."""
    return column.removeprefix(VALIDATION).partition("/")[2] if is_metric(column) else column


def primary_metric(run: Run) -> str:
    """Return the main column of a run: accuracy, else the first metric, else the training loss."""

    def rank(column: str) -> tuple[bool, bool, int]:
        kind, _, metric = column.partition("/")
        return metric != "accuracy", not is_share(metric), KINDS.index(kind)

    candidates = []
    for name in run.metrics:
        is_loss = "loss" in name.lower()
        if run.has(name) and not is_loss and not name.startswith(VALIDATION):
            candidates.append(name)
    return min(candidates, key=rank, default="train_loss")


def traffic(run: Run) -> Series:
    """Return by round the bytes up and down of all clients since the start of the run."""
    up_and_down = run.rounds.reindex(columns=["bytes_up", "bytes_down"])
    is_known = up_and_down.notna().any(axis=1)
    return up_and_down.sum(axis=1).cumsum().where(is_known)


def totals(run: Run) -> dict[str, float]:
    """Return the costs of a run by name; NaN where they are unknown.

    The names are the summed columns of metrics.csv, `sent` for the bytes up and down of all
    clients, `per_round` for the mean seconds of the timed rounds, and `stored_bytes` for the bytes
    that a client keeps, as a mean over the last evaluation.
    """
    costs = {}
    for name in ("bytes_up", "bytes_down", "server_bytes", "flops", "seconds", ENERGY):
        costs[name] = float(run.series(name).sum(min_count=1))

    stored = run.evaluation.reindex(columns=["stored_bytes"])["stored_bytes"]
    costs["sent"] = float(traffic(run).max())
    costs["stored_bytes"] = float(stored.mean())
    costs["per_round"] = float(run.series("seconds").mean())
    return costs


def worst_tenth(values: Series, metric: str, chosen_by: Series | None = None) -> float:
    """Return the mean of a metric over the worst tenth of the clients, rounded up.

    The worst of many values are also the unluckiest: their mean lies below that of the same clients
    on other samples. Where clients have validation samples, these say who is among the worst, and
    the values are shown of the same clients. Of clients that are equally bad on them, and of which
    only some belong to the tenth, all count, with a part of their weight.

    Args:
        values: The metric of each client; a client without one does not count.
        metric: Its name, which says what is bad.
        chosen_by: The metric on validation samples, by which the clients are chosen. A client
            without one is not among the worst. By default `values` themselves.

    Returns:
        The mean. It is infinite if one of all values is not finite.
    """
    if chosen_by is not None:
        values = values[chosen_by.notna()]
    known = values.dropna()
    if np.isinf(known).any():
        return math.inf

    count = math.ceil(len(known) / 10)
    if chosen_by is None:
        worst = known.nsmallest(count) if direction(metric) > 0 else known.nlargest(count)
        return float(worst.mean())
    if count == 0:
        return math.nan

    badness = -direction(metric) * chosen_by[known.index]
    least_bad = badness.nlargest(count).iloc[-1]
    surely = known[badness > least_bad]
    perhaps = known[badness == least_bad]
    left = count - len(surely)
    return float((surely.sum() + left * perhaps.mean()) / count)
