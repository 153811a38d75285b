"""The charts of clouds of servers, and the virtual time to a target."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]

from lightfed.lab.drawing.marks import Figure
from lightfed.lab.report.tables import comparison_table
from lightfed.lab.results.groups import cost_to, grouped, reached_by_all, singles
from lightfed.lab.results.run import TIME, Run, read
from lightfed.lab.studies.fedbcd import figures, servers_figure
from tests.lab.report.make_run import ENVIRONMENT, by_title, drawn, rows_of, write_run

OPTIONS = {"servers": 10, "active": 3, "wait": None, "mu": 0.0, "gamma": 1.0}


def _run(
    root: Path,
    algorithm: str,
    scores: Sequence[float | str] = (0.25, 0.5),
    times: Sequence[float] = (10.0, 20.0),
    *,
    seed: int = 0,
    name: str = "",
    personal: Sequence[float | str] | None = None,
    partition: str = "Diversity",
    data: str = "Digits",
    metric: str = "accuracy",
    sent: Sequence[float] = (),
    **options: Any,
) -> Run:
    """A run whose global metric is `scores`, measured at `times`; servers `sent` so many bytes."""
    own = scores if personal is None else personal
    method = {"class_path": f"lightfed.algorithms.{algorithm}", "init_args": OPTIONS | options}
    config = {
        "model": {"algorithm": method, "seed": seed},
        "data": {"dataset": data, "partition": {"class_path": f"lightfed.data.{partition}"}},
    }
    name = f"{name or algorithm}-s{seed}"
    stated = {"name": name, "algorithm": algorithm, "dataset": data, "seed": seed}
    folder = write_run(
        root / name,
        metrics={
            f"global/{metric}": scores,
            f"personal/{metric}": own,
            "virtual_time": times,
            **({"server_bytes": sent} if sent else {}),
        },
        environment=ENVIRONMENT | stated | {"rounds": len(scores)},
        config=yaml.safe_dump(config, sort_keys=False),
        evaluations=None,
        counts=None,
    )
    return read(folder)


def _study(root: Path) -> list[Run]:
    """All methods, and FedBCD with four B."""
    return [
        _run(root, "CloudFedAvg", (0.1, 0.2), name="fedavg"),
        _run(root, "CloudFedAvg", (0.2, 0.3), name="fedprox", mu=5.0),
        _run(root, "FedBCDI", (0.3, 0.4)),
        *(
            _run(root, "FedBCD", (b / 20, b / 10), (b, 2 * b), name=f"b{b}", wait=b)
            for b in (10, 7, 3, 5)
        ),
    ]


def drawings(runs: Sequence[Run]) -> dict[str, Figure]:
    """The figures of one study by their kind."""
    return {figure.name.partition("-")[0]: figure for figure in figures(runs)}


LABELS = {
    "CloudFedAvg, mu 0.0": (0.1, 0.2),
    "CloudFedAvg, mu 5.0": (0.2, 0.3),
    "FedBCDI": (0.3, 0.4),
    **{f"FedBCD, wait {b}": (b / 20, b / 10) for b in (10, 7, 3, 5)},
}


def test_devices_without_a_pull_have_no_global_model_and_send_nothing(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path, "FedBCD", (0.3, 0.4), sent=(20, 20)),
        _run(tmp_path, "FedBCD", ("", ""), personal=(0.5, 0.6), gamma=0.0, name="alone"),
        _run(tmp_path, "CloudFedAvg", (0.7, 0.8), sent=(20, 20)),
    ]
    found = drawings(runs)
    own, other = by_title(found["rounds"]).values()
    assert list(drawn(own)) == ["FedBCD, gamma 1.0", "FedBCD, gamma 0.0", "CloudFedAvg"]
    assert drawn(own)["FedBCD, gamma 0.0"] == [(1, 0.5), (2, 0.6)]
    assert list(drawn(other)) == ["FedBCD, gamma 1.0", "CloudFedAvg"]
    assert "FedBCD, gamma 0.0" in found["times"].series
    assert list(found["traffic"].series) == ["FedBCD, gamma 1.0", "CloudFedAvg"]


@pytest.mark.parametrize("over", ["rounds", "times"])
def test_methods_and_the_servers_waited_for_are_series(over: str, tmp_path: Path) -> None:
    figure = drawings(_study(tmp_path))[over]
    assert figure.title.startswith("Digits: accuracy against ")
    assert list(by_title(figure)) == ["Personal accuracy", "Global accuracy"]
    places = dict.fromkeys(LABELS, (1, 2) if over == "rounds" else (10, 20))
    if over == "times":
        places |= {f"FedBCD, wait {b}": (b, 2 * b) for b in (10, 7, 3, 5)}
    expected = {name: [*zip(places[name], scores, strict=True)] for name, scores in LABELS.items()}
    for chart in figure.charts:
        assert drawn(chart) == expected


def test_seeds_meet_at_their_mean_time_with_a_band(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path, "FedBCD", (0.46, 0.56), (10, 20), seed=0, wait=5),
        _run(tmp_path, "FedBCD", (0.48, 0.58), (20, 40), seed=1, wait=5),
    ]
    chart = by_title(drawings(runs)["times"])["Global accuracy"]
    assert drawn(chart) == {"FedBCD": [(15, 0.47), (30, 0.57)]}
    half = 12.706204736432095 * 0.01  # Student's t with one degree of freedom
    np.testing.assert_allclose(chart.data["high"], np.array([0.47, 0.57]) + half)
    np.testing.assert_allclose(chart.data["low"], np.array([0.47, 0.57]) - half)


def test_bytes_between_servers_have_a_chart_of_the_runs_that_have_some(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path, "FedBCD", (0.1, 0.2), name="b5", wait=5, sent=(1000, 500)),
        _run(tmp_path, "FedBCD", (0.3, 0.4), name="b10", sent=(2000, 2000)),
        _run(tmp_path, "CloudFedAvg", (0.5, 0.6), sent=(2000, 2000)),
        _run(tmp_path, "CloudFedAvg", (0.7, 0.8), name="old", mu=5.0),
    ]
    chart = by_title(drawings(runs)["traffic"])["Global accuracy"]
    assert drawn(chart) == {
        "FedBCD, wait 5": [(1000, 0.1), (1500, 0.2)],
        "FedBCD": [(2000, 0.3), (4000, 0.4)],
        "CloudFedAvg, mu 0.0": [(2000, 0.5), (4000, 0.6)],
    }
    assert "traffic" not in drawings(runs[3:])


def test_data_and_partitions_have_figures_of_their_own(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"partition": "Quantity"}, {"data": "MNIST"}]
    runs = [_run(tmp_path, "FedBCD", name=f"{i}", wait=5, **c) for i, c in enumerate(changes)]
    runs.append(_run(tmp_path, "FedBCD", name="one", wait=5, active=1))
    found = [figure for figure in figures(runs) if figure.name.startswith("times")]
    assert [figure.title.partition(":")[0] for figure in found] == [
        "Digits, Diversity",
        "Digits, Quantity",
        "MNIST, Diversity",
    ]
    # two of one name are told apart by their labels
    assert [len(figure.series) for figure in found] == [2, 1, 1]
    assert all("active" in name for name in found[0].series)


def test_nothing_is_drawn_of_what_is_not_there(tmp_path: Path) -> None:
    short = _run(tmp_path, "FedBCD", (0.1,), (1.0,), name="short", wait=5)
    assert [*figures([short])] == [*figures([])] == []
    (short.folder / "metrics.csv").write_text("round,global/accuracy\n1,0.5\n2,0.6\n")
    assert [*figures([read(short.folder)])] == []  # no virtual time
    assert servers_figure(read(short.folder)) is None
    bare = write_run(tmp_path / "bare", config=None, environment={"algorithm": "FedBCD"})
    assert [*figures([read(bare)])] == []


def test_time_to_a_target_is_that_of_the_first_measurement_as_good(tmp_path: Path) -> None:
    run = _run(tmp_path, "FedBCD", (0.2, "", 0.5, 0.4, 0.6), (1, 2, 3, 4, 5))
    reached = [cost_to(goal, run, "global/accuracy")[TIME] for goal in (0.2, 0.21, 0.5, 0.55)]
    assert reached == [1, 3, 3, 5]
    assert math.isnan(cost_to(0.61, run, "global/accuracy")[TIME])
    loss = _run(tmp_path, "FedBCD", (2.0, 1.0), (1, 2), name="y", metric="loss")
    assert cost_to(1.5, loss, "global/loss")[TIME] == 2


def test_the_usual_target_is_what_every_run_reached(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path, "FedBCD", (0.4, 0.8, 0.7), (1, 2, 3)),
        _run(tmp_path, "CloudFedAvg", (0.1, 0.6, 0.5), (1, 2, 3)),
    ]
    assert reached_by_all(runs, "global/accuracy") == 0.6
    losses = [
        _run(tmp_path, "FedBCD", (2.0, 0.5), name="p", metric="loss"),
        _run(tmp_path, "FedBCD", (3.0, 0.7), name="q", metric="loss"),
    ]
    assert reached_by_all(losses, "global/loss") == 0.7
    assert math.isnan(reached_by_all([], "global/accuracy"))


def test_the_table_tells_the_time_of_those_that_have_one(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path, "FedBCD", (0.1, 0.5), (10, 20), seed=0),
        _run(tmp_path, "FedBCD", (0.5, 0.7), (14, 30), seed=1),
        read(write_run(tmp_path / "untimed")),
    ]
    table = comparison_table(grouped(runs), "global/accuracy")
    assert table.columns[-1] == "virtual time to 50.00 % global accuracy"
    assert [row[-1] for row in rows_of(table)] == ["17.0 s", "-"]
    table = comparison_table(singles(runs), "global/accuracy", target=0.6)
    assert table.columns[-1] == "virtual time to 60.00 % global accuracy"
    assert [row[-1] for row in rows_of(table)] == ["-", "30.0 s", "-"]
    untimed = comparison_table(singles(runs[2:]), "global/accuracy")
    assert not any("virtual" in header for header in untimed.columns)


def test_a_run_shows_its_servers(tmp_path: Path) -> None:
    mixed = {f"mixed/{n}": [float(n in v) for v in ((0, 1), (1, 2), (0, 1))] for n in range(3)}
    measures = {"server_gradient": (4.0, 2.0, 3.0), "consensus": (1.0, 1.0, 0.1)}
    figure = servers_figure(read(write_run(tmp_path / "run", metrics=mixed | measures)))
    assert figure is not None
    gradient, consensus, graph = figure.charts
    means = {"of the round": [4.0, 2.0, 3.0], "mean so far": [4.0, 3.0, 3.0]}
    assert drawn(gradient) == {name: [*enumerate(own, 1)] for name, own in means.items()}
    assert drawn(consensus)["mean so far"][-1] == (3, pytest.approx(0.7))
    assert graph.data["value"].tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 0]  # servers 0-2 by round
