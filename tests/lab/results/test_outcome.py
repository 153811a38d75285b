"""The figures that come out of a run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lightfed.lab.report.figures import clients
from lightfed.lab.report.tables import client_group_table, key_figures
from lightfed.lab.results.run import Run, primary_metric, read, totals, traffic, worst_tenth
from lightfed.lab.results.text import bytes_text, flops_text, metric_text, seconds_text
from tests.lab.report.make_run import CLIENTS, EVALUATIONS, METRICS, rows_of, write_run

NAN = math.nan


def _load(folder: Path, metrics: Mapping[str, Sequence[Any]]) -> Run:
    return read(write_run(folder / "run", metrics=metrics, evaluations=None, counts=None))


def _values(run: Run) -> dict[str, str]:
    return dict(zip(*key_figures(run)[["metric", "final"]].T.to_numpy(), strict=True))


def test_the_totals_of_a_known_run(tmp_path: Path) -> None:
    found = totals(read(write_run(tmp_path / "run")))
    expected = {"bytes_up": 3000, "bytes_down": 6000, "sent": 9000, "flops": 12e9, "seconds": 4.5}
    assert {name: found[name] for name in expected} == expected
    assert found["per_round"] == 1.5


def test_bytes_between_servers_are_a_figure_of_runs_that_have_them(tmp_path: Path) -> None:
    assert "between servers" not in _values(read(write_run(tmp_path / "run")))
    clouds = _load(tmp_path / "clouds", METRICS | {"server_bytes": (500, 700, 800)})
    assert totals(clouds)["sent"] == 9000
    assert _values(clouds)["between servers"] == "2.00 kB"


def test_a_group_of_which_some_are_tested_says_so_and_has_the_costs_of_all(tmp_path: Path) -> None:
    """`a` has 2 clients, of which one is tested, the one that has sent most."""
    rows = [row for row in EVALUATIONS if row[1] != 1]
    rows[-3] = (3, 0, "a", 30, 1.0, 0.5, 1600, 2000, 4e9)
    run = read(write_run(tmp_path / "run", evaluations=rows))
    first, second = client_group_table(run).to_dict("records")
    assert (first["clients"], second["clients"]) == ("1 of 2", "2")
    assert (first["up / client"], second["up / client"]) == ("1.00 kB", "500 B")


def test_costs_of_groups_that_a_later_round_has_added_to_are_not_shown(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run", evaluations=EVALUATIONS[:4]))
    assert "up / client" not in client_group_table(run)


def test_a_client_that_diverged_counts_in_its_group(tmp_path: Path) -> None:
    rows = [(*row[:4], "nan" if row[:2] == (3, 1) else row[4], *row[5:]) for row in EVALUATIONS]
    run = read(write_run(tmp_path / "run", evaluations=rows))
    first, second = client_group_table(run).to_dict("records")
    assert (first["accuracy"], first["worst 10 %"], first["std over clients"]) == (
        *["not finite"] * 2,
        "-",
    )
    assert second["accuracy"] == "40.00 %"


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"personal/accuracy": (0.5,), "global/accuracy": (0.5,)}, "global/accuracy"),
        ({"global/accuracy": ("",), "personal/accuracy": (0.5,)}, "personal/accuracy"),
        ({"global/loss": (1,), "personal/f1_std": (0,), "personal/f1": (1,)}, "personal/f1"),
        ({"personal/pixel_std": (1,), "personal/f1": (0,)}, "personal/pixel_std"),
        ({"personal/f1/a": (1,), "personal/f1": ("",), "global/mse": (9,)}, "global/mse"),
        ({"global/val/f1": (1,), "personal/val/acc": (0.5,)}, "personal/val/acc"),
        ({"aggregated/val/acc": (0.5,), "personal/val/acc": (0.5,)}, "personal/val/acc"),
        ({"global/pace": (1,), "global/top1_acc": (0.5,)}, "global/top1_acc"),
        ({"train/acc": (0.5,), "train_loss": (1,)}, "train_loss"),
        ({"train_loss": (1,), "global/loss": (1,), "lr-SGD": (1,)}, "train_loss"),
    ],
)
def test_the_primary_metric(
    tmp_path: Path, columns: Mapping[str, Sequence[Any]], expected: str
) -> None:
    assert primary_metric(_load(tmp_path, columns)) == expected


def test_a_metric_that_falls_has_its_best_value_at_the_bottom(tmp_path: Path) -> None:
    run = _load(tmp_path, {"global/perplexity": (90, 20, 30)})
    assert run.best("global/perplexity") == (20, 2)


def _keeping(folder: Path, *stored: float) -> Run:
    """A run of sparse clients that keep so many bytes each."""
    rows = [(*row, kept) for row, kept in zip(EVALUATIONS[-len(stored) :], stored, strict=True)]
    return read(write_run(folder, evaluations=rows, client_columns=f"{CLIENTS},stored_bytes"))


def test_stored_bytes_are_a_cost_of_the_clients_and_no_metric(tmp_path: Path) -> None:
    run = _keeping(tmp_path / "run", 1000, 3000, 500, 500)
    assert totals(run)["stored_bytes"] == 1250
    assert _values(run)["stored / client"] == "1.25 kB"
    table = client_group_table(run)
    assert table.columns[-1] == "stored / client"
    assert [row[-1] for row in rows_of(table)] == ["2.00 kB", "500 B"]


@pytest.mark.parametrize("stored", [(0, 0, 0, 0), ("", "", "", "")])
def test_clients_that_keep_nothing_have_no_figure_of_it(
    tmp_path: Path, stored: tuple[Any, ...]
) -> None:
    run = _keeping(tmp_path / "run", *stored)
    assert "stored / client" not in _values(run)
    assert client_group_table(run).columns[-1] == "compute / client"


def test_what_was_not_measured_is_not_a_number(tmp_path: Path) -> None:
    assert all(map(math.isnan, totals(_load(tmp_path, {"train_loss": (1.0,)})).values()))


def test_traffic_adds_up_both_ways_and_over_rounds(tmp_path: Path) -> None:
    run = _load(tmp_path, {"bytes_up": (1, "", 4), "bytes_down": (2, "", "")})
    np.testing.assert_array_equal(traffic(run), [3, NAN, 7])


@pytest.mark.parametrize(
    ("values", "metric", "expected"),
    [
        (np.arange(20.0), "accuracy", 0.5),
        (np.arange(20.0), "loss", 18.5),
        (np.arange(11.0), "accuracy", 0.5),
        (np.array([0.3, NAN]), "accuracy", 0.3),
        (np.array([NAN]), "accuracy", NAN),
    ],
)
def test_the_worst_tenth(values: np.ndarray, metric: str, expected: float) -> None:
    assert worst_tenth(pd.Series(values), metric) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(999), "999 B"),
        (bytes_text(1234), "1.23 kB"),
        (bytes_text(12_345_678), "12.3 MB"),
        (bytes_text(NAN), "-"),
        (flops_text(2.5e12), "2.50 TFLOPs"),
        (seconds_text(0.0125), "12 ms"),
        (seconds_text(600), "10.0 min"),
        (seconds_text(9000), "2.5 h"),
        (metric_text("accuracy", 0.98765), "98.77 %"),
        (metric_text("f1", 0.98764), "0.9876"),
        (metric_text("loss", NAN), "-"),
        (metric_text("accuracy", 0.5, 0.125), "50.00 +- 12.50 %"),
        (metric_text("accuracy", 0.5, NAN), "50.00 %"),
    ],
)
def test_numbers_as_text(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("chosen_by", "metric", "expected"),
    [
        # Twenty clients with the test values 0, 1, ..., 19, of which two are the worst.
        (np.arange(20.0), "accuracy", 0.5),
        (-np.arange(20.0), "accuracy", 18.5),
        (-np.arange(20.0), "loss", 0.5),
        # The worst one is client 7. Clients 8 and 9 are next, and equally bad.
        (np.array([5.0] * 7 + [1.0, 2.0, 2.0] + [5.0] * 10), "accuracy", (7 + 8.5) / 2),
        # All are equally bad, so nothing is known of who is.
        (np.zeros(20), "accuracy", 9.5),
        # A client without validation samples is not among the worst: 10 of 20 are known.
        (np.array([NAN] * 10 + [*range(10)]), "accuracy", 10.0),
        (np.full(20, NAN), "accuracy", NAN),
    ],
)
def test_the_worst_tenth_by_validation_samples(
    chosen_by: np.ndarray, metric: str, expected: float
) -> None:
    found = worst_tenth(pd.Series(np.arange(20.0)), metric, pd.Series(chosen_by))
    assert found == pytest.approx(expected, nan_ok=True)


def test_the_worst_clients_of_a_summary_are_chosen_by_validation_samples(tmp_path: Path) -> None:
    """On test samples client 3 is the worst, and on validation samples client 2."""
    columns = CLIENTS.replace(",accuracy,", ",accuracy,validation/accuracy,")
    validated = {0: 0.9, 1: 0.8, 2: 0.1, 3: 0.7}
    rows = [(*row[:5], validated[int(row[1])], *row[5:]) for row in EVALUATIONS]
    run = read(write_run(tmp_path / "run", evaluations=rows, client_columns=columns))
    figures = key_figures(run).set_index("metric")
    assert figures.loc["worst 10 %", "final"] == "50.00 %"
    note = "of the clients that are worst on validation samples; 30.00 % if test samples say so"
    assert figures.loc["worst 10 %", "note"] == note
    _, second = client_group_table(run).to_dict("records")
    assert second["worst 10 %"] == "50.00 %"
    figure = clients(run)
    assert figure is not None
    assert "worst tenth 50.00 % (worst on validation samples)" in figure.caption

    # Without validation samples it is that of the clients with the worst test figures.
    plain = read(write_run(tmp_path / "plain"))
    figures = key_figures(plain).set_index("metric")
    assert figures.loc["worst 10 %", "final"] == "30.00 %"


def test_a_value_after_some_rounds_is_the_last_one_that_was_measured(tmp_path: Path) -> None:
    run = _load(tmp_path, {"global/accuracy": ("", 0.5, "", "nan"), "train_loss": (4, 3, 2, 1)})
    found = [run.after("global/accuracy", rounds) for rounds in (1, 2, 3, 4)]
    assert found == pytest.approx([NAN, 0.5, 0.5, math.inf], nan_ok=True)
    assert run.after("train_loss", 3) == 2
    assert run.after("train_loss", 9) == run.final("train_loss") == 1
    assert math.isnan(run.after("global/f1", 2))
