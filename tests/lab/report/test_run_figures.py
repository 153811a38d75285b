"""The figures of a run: what is drawn is what was measured, and as much as a page can hold."""

from pathlib import Path

import pytest

from lightfed.lab.report.figures import (
    clients,
    course,
    partition,
    run_figures,
)
from lightfed.lab.results.run import Run, read
from tests.lab.report.make_run import CLIENTS, ENVIRONMENT, METRICS, by_title, drawn, write_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    stated = {**ENVIRONMENT, "parameters": {"a": 1000, "b": 250}}
    return read(write_run(tmp_path / "run", environment=stated))


def test_the_curves_go_through_the_measured_points(run: Run) -> None:
    lines = drawn(by_title(course(run))["Accuracy"])
    assert lines["global"] == [(1, 0.5), (3, 0.75)]
    assert lines["personal, worst 10 %"] == [(1, 0.4), (3, 0.3)]
    assert drawn(by_title(course(run))["Loss"])["training"] == [(1, 2), (2, 1), (3, 0.5)]
    band = by_title(course(run))["Accuracy"].data.query("series == 'personal, mean'")
    assert band["low"].tolist() == pytest.approx([0.5, 0.4])


def test_the_cost_panel_is_against_all_bytes_so_far(run: Run) -> None:
    chart = by_title(course(run))["Accuracy vs. bytes sent"]
    assert drawn(chart)["global"] == [(3, 0.5), (9, 0.75)]
    assert chart.columns["x"].heading.endswith("(kB)")


def test_a_run_with_devices_has_a_panel_against_virtual_time(run: Run, tmp_path: Path) -> None:
    timed = write_run(tmp_path / "timed", metrics=METRICS | {"virtual_time": (60.0, 120.0, 150.0)})
    chart = by_title(course(read(timed)))["Accuracy vs. virtual time"]
    assert drawn(chart)["global"] == [(1, 0.5), (2.5, 0.75)]
    assert chart.columns["x"].heading.endswith("(min)")
    figure = course(run)
    assert figure is not None
    assert not any("virtual" in chart.title for chart in figure.charts)


def test_a_metric_with_a_slash_and_one_of_a_users_own_have_panels(tmp_path: Path) -> None:
    metrics = {name.replace("accuracy", "val/acc"): values for name, values in METRICS.items()}
    metrics |= {"global/f1": (0.1, "", 0.2), "extra": (1, 2, 3)}
    columns = CLIENTS.replace("accuracy", "val/acc")
    run = read(write_run(tmp_path / "run", metrics=metrics, client_columns=columns))
    assert "f1" in str(
        [chart.title.lower() for figure in run_figures(run) for chart in figure.charts]
    )
    assert by_title(course(run))["Val acc"].columns["y"].format == ".4~%"
    groups = by_title(clients(run))["Val acc by client group"]
    assert set(drawn(groups)) == {"a", "b"}


def test_clients_are_shown_by_group(run: Run) -> None:
    figure = clients(run)
    assert figure is not None
    assert [chart.title for chart in figure.charts] == [
        "Accuracy of each client",
        "Accuracy by client group",
    ]
    assert figure.series == {"a": 0, "b": 1}
    assert "mean 65.00 %, worst tenth 30.00 %, 4 clients" in figure.caption
    spread = figure.charts[0]
    assert sorted(spread.data["x"].dropna()) == [0.3, 0.5, 0.8, 1.0]


def test_the_heat_map_shows_the_counts(run: Run) -> None:
    (heat,) = partition(run).charts  # type: ignore[union-attr]
    cells = heat.data.set_index(["y", "x"])["value"]
    assert cells["zero"].tolist() == [20, 0, 10, 0]
    assert cells["zero"].index.tolist() == ["0 a", "1 a", "2 b", "3 b"]
    run.environment |= {"parts": [1.0, 0.5], "groups": {"a": 2, "b": 2}}
    (heat,) = partition(run).charts  # type: ignore[union-attr]
    held = heat.data["x"].unique().tolist()
    assert held == ["0 a, density 1", "1 a, density 0.5", "2 b, density 1", "3 b, density 0.5"]
    run.partition = run.partition.clip(lower=1)  # type: ignore[union-attr]
    assert "of 3 classes." in partition(run).caption  # type: ignore[union-attr]
