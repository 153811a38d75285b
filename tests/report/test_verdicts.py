"""Experiments against each other, seed by seed: who meets whom, in what, and what is said of it."""

import csv
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from lightfed.report import compare
from lightfed.report.figures import comparison_figures
from lightfed.report.tables import comparison_table
from lightfed.report.verdicts import Contest, contests, verdicts_table
from lightfed.results.groups import grouped
from lightfed.results.run import Run, read
from tests.report.make_run import ENVIRONMENT, write_run
from tests.report.read_page import ReadPage

SENT = {"bytes_up": (5, 5), "bytes_down": (5, 5)}
# personal, and the same clients at another moment
DISPFL = {"personal/accuracy": (0.5, 0.8), "aggregated/accuracy": (0.4, 0.7), **SENT}
FEDAVG = {"personal/accuracy": (0.3, 0.72), "finetuned/accuracy": (0.6, 0.82), **SENT}
ALONE = {"personal/accuracy": (0.55, 0.65), "bytes_up": (0, 0), "bytes_down": (0, 0)}


def _run(
    root: Path,
    name: str,
    metrics: dict[str, Sequence[Any]],
    *,
    seed: int = 0,
    alpha: float = 0.3,
    data: str = "Digits",
    **stated: Any,
) -> Run:
    config = (
        f"model:\n  algorithm: {name}\n  seed: {seed}\n"
        f"data:\n  partition:\n    class_path: Dirichlet\n    init_args:\n      alpha: {alpha}\n"
    )
    stated.setdefault("evaluate_at", "aggregated" if name == "fedavg" else "trained")
    environment = {**ENVIRONMENT, "name": f"{name}-s{seed}", "algorithm": name, "seed": seed}
    folder = write_run(
        root / f"{alpha}-{data}" / f"{stated.get('algorithm', name)}-s{seed}",
        metrics=metrics,
        environment={**environment, "rounds": 2, "dataset": data, **stated},
        config=config,
        evaluations=None,
        counts=None,
    )
    return read(folder)


def _study(root: Path) -> list[Run]:
    """DisPFL and FedAvg, both measured twice a round, and Standalone; two seeds of each."""
    runs = []
    for name, columns in (("dispfl", DISPFL), ("fedavg", FEDAVG), ("alone", ALONE)):
        for seed in (0, 1):
            shift = {key: 0.01 * seed * key.endswith("accuracy") for key in columns}
            metrics = {key: (own[0], own[1] + shift[key]) for key, own in columns.items()}
            runs.append(_run(root, name, metrics, seed=seed))
    return runs


def _columns(found: Sequence[Contest]) -> dict[str, dict[str, str]]:
    return {one.name: {g.name: c for g, c in one.columns.items()} for one in found}


def _rows(page: ReadPage, first: str) -> list[dict[str, str]]:
    """The table whose first header is that, in which names may stand more than once."""
    ((head, *rows),) = [cells for cells in page.cells if cells[0][0] == first]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_a_client_that_has_trained_meets_clients_that_have_trained(tmp_path: Path) -> None:
    found = contests(_study(tmp_path))
    assert _columns(found) == {
        "accuracy after aggregation": {
            "dispfl": "aggregated/accuracy",
            "fedavg": "personal/accuracy",
        },
        "accuracy after local training": {
            "dispfl": "personal/accuracy",
            "fedavg": "finetuned/accuracy",
            "alone": "personal/accuracy",
        },
    }
    # by personal/ alone DisPFL would lead by 8 points
    assert found[1].verdicts()[0] == (
        "fedavg +2.00 points over dispfl, the next best, "
        "95 % paired t interval 2.00 to 2.00, 2 seeds (0-1): better."
    )


def test_a_seed_that_has_not_been_evaluated_yet_hides_no_method(tmp_path: Path) -> None:
    running = {key: values[:1] for key, values in SENT.items()}
    found = contests([*_study(tmp_path), _run(tmp_path, "dispfl", running, seed=2)])
    assert [len(one.columns) for one in found] == [2, 3]
    assert "2 seeds (0-1): better" in found[1].verdicts()[0]


def test_a_run_says_at_which_moment_its_clients_were_tested(tmp_path: Path) -> None:
    both = {"personal/accuracy": (0.4, 0.7), "trained/accuracy": (0.5, 0.8), **SENT}
    later = {"personal/accuracy": (0.4, 0.75), **SENT}
    runs = [
        _run(tmp_path, "flexifed", both, evaluate_at="aggregated"),
        _run(tmp_path, "pfedmoe", later, evaluate_at="trained"),
        _run(tmp_path, "fedavg", FEDAVG),
    ]
    assert _columns(contests(runs)) == {
        "accuracy after aggregation": {
            "flexifed-s0": "personal/accuracy",
            "fedavg-s0": "personal/accuracy",
        },
        "accuracy after local training": {
            "flexifed-s0": "trained/accuracy",
            "pfedmoe-s0": "personal/accuracy",
            "fedavg-s0": "finetuned/accuracy",
        },
    }


def test_without_two_moments_the_figures_are_global_local_and_personal(tmp_path: Path) -> None:
    metrics = {f"{kind}/accuracy": (0.1, 0.2) for kind in ("global", "local", "personal")}
    runs = [_run(tmp_path, name, metrics) for name in ("a", "b")]
    runs.append(_run(tmp_path, "c", {"global/accuracy": (0.1, 0.3)}))
    found = contests(runs)
    assert [one.name for one in found] == ["global accuracy", "local accuracy", "personal accuracy"]
    assert [len(one.columns) for one in found] == [3, 2, 2]


def test_settings_in_which_runs_differ_are_a_table(tmp_path: Path) -> None:
    runs = [_run(tmp_path, name, ALONE, alpha=alpha) for name, alpha in (("a", 0.3), ("b", 0.5))]
    page = compare(runs, tables=["csv"])
    table = (page.parent / "comparison-settings.csv").read_text().splitlines()
    assert table == ["settings,partition alpha", "a,0.3", "b,0.5"]
    assert "Settings in which they differ" in page.read_text()


def test_only_runs_on_equal_data_meet(tmp_path: Path) -> None:
    runs = [_run(tmp_path, name, ALONE, alpha=alpha) for alpha in (0.3, 0.5) for name in ("a", "b")]
    runs += [_run(tmp_path, "c", ALONE, alpha=0.7), _run(tmp_path, "d", ALONE, data="MNIST")]
    runs += [_run(tmp_path, name, ALONE, clients=9) for name in ("e", "f")]
    found = contests(runs)
    assert [(one.data, [g.label for g in one.columns]) for one in found] == [
        ("Digits, alpha 0.3, clients 4", ["a", "b"]),
        ("Digits, alpha 0.5, clients 4", ["a", "b"]),
        ("Digits, alpha 0.3, clients 9", ["e", "f"]),
    ]
    assert contests(runs[:1]) == []


def test_data_are_named_once_and_never_drawn_in_one_chart(tmp_path: Path) -> None:
    runs = [_run(tmp_path, name, ALONE, alpha=alpha) for alpha in (0.3, 0.5) for name in ("a", "b")]
    page = ReadPage(compare(runs))
    assert [row["data"] for row in _rows(page, "run")] == ["Digits, alpha 0.3"] * 2 + [
        "Digits, alpha 0.5"
    ] * 2
    assert [row["run"] for row in _rows(page, "run")] == ["a", "b"] * 2
    assert "All runs: n 1, seed 0, clients 4, rounds 2." in page.texts["p"]
    figures = comparison_figures(grouped(runs), "personal/accuracy")
    for figure in figures:
        assert figure.series == {"a": 0, "b": 1}
        titles = [chart.title for chart in figure.charts]
        parts = [[t for t in titles if t.startswith(f"Digits, alpha {x}: ")] for x in (0.3, 0.5)]
        assert len(parts[0]) == len(parts[1]) == len(titles) / 2
        assert all(set(chart.data["series"]) <= {"a", "b"} for chart in figure.charts)
    text = page.source
    order = ("Final figures", "seed by seed", "Course of", "Settings in which they differ")
    places = [text.index(f">{begin}" if begin != order[1] else begin) for begin in order]
    assert places == sorted(places)


def test_a_table_of_methods_has_one_star(tmp_path: Path) -> None:
    """An ablation is compared with the whole method, too."""
    settings = [("PFedMoE", 0.9, "true"), ("PFedMoE", 0.8, "false"), ("FML", 0.7, "true")]
    runs = []
    for name, final, federate in settings:
        init = f"{{federate: {federate}}}" if name == "PFedMoE" else "{}"
        algorithm = f"{{class_path: {name}, init_args: {init}}}"
        metrics = {"personal/accuracy": (0.1, final)}
        runs.append(_run(tmp_path / federate, algorithm, metrics, algorithm=name))
    page = ReadPage(compare([run.folder for run in runs]))
    cells = [row["personal accuracy"] for row in _rows(page, "method")]
    assert [cell for cell in cells if "*" in cell] == ["*90.00 %"]


def test_a_sentence_holds_each_against_the_best_of_the_others(tmp_path: Path) -> None:
    best, *others = contests(_study(tmp_path))[1].verdicts()
    assert best.startswith("fedavg +2.00 points over dispfl, the next best, ")
    assert others == [
        "dispfl -2.00 points over fedavg, the best, 95 % paired t interval -2.00 to -2.00, "
        "2 seeds (0-1): worse.",
        "alone -17.00 points over fedavg, the best, 95 % paired t interval -17.00 to -17.00, "
        "2 seeds (0-1): worse.",
    ]


def test_the_file_has_every_pair_both_ways(tmp_path: Path) -> None:
    study = _study(tmp_path)
    rows = list(csv.DictReader(StringIO(verdicts_table(contests(study[:-1])).to_csv(index=False))))
    assert len(rows) == 2 + 6
    (row,) = [r for r in rows if (r["method"], r["rival"]) == ("alone-s0", "dispfl")]
    difference = row.pop("difference")
    assert row == {
        **{"data": "Digits", "metric": "personal/accuracy", "method": "alone-s0"},
        **{"rival": "dispfl", "rival_metric": "personal/accuracy", "n": "1", "seeds": "0"},
        **{"missing": "alone-s0 lacks seed 1", "low": "", "high": ""},
        "verdict": "one seed shows no interval",
    }
    assert float(difference) == pytest.approx(-0.15)
    (row,) = [r for r in rows if (r["method"], r["rival"]) == ("dispfl", "alone-s0")]
    assert float(row["difference"]) == pytest.approx(0.15)


def test_a_comparison_tells_verdicts_and_writes_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = _study(tmp_path)
    page = ReadPage(compare([run.folder for run in runs], group=True))
    written = (runs[0].folder.parent / "comparison" / "comparison-verdicts.csv").read_text()
    assert written == verdicts_table(contests(runs)).to_csv(index=False)
    stated = "fedavg +2.00 points over dispfl, the next best"
    assert stated in page.texts["li"]
    assert "Digits: accuracy after local training, seed by seed" in page.texts["h2"]
    assert "The best rival is chosen on the same runs" in page.texts["p"]
    assert stated in capsys.readouterr().out
    final = page.table("run")
    moments = [
        f"accuracy after {text} (95 % interval)" for text in ("aggregation", "local training")
    ]
    assert [final["fedavg"][name][:5] for name in moments] == ["72.50", "82.50"]
    assert [final["dispfl"][name][:5] for name in moments] == ["70.50", "80.50"]
    assert [final["alone"][name][:5] for name in moments] == ["-", "65.50"]
    compare([run.folder for run in runs[:2]])
    assert not (runs[0].folder.parent / "comparison" / "comparison-verdicts.csv").exists()


def test_runs_of_one_moment_have_no_columns_of_moments(tmp_path: Path) -> None:
    runs = [_run(tmp_path, name, {**ALONE, "local/accuracy": (0.1, 0.2)}) for name in "ab"]
    headers = comparison_table(grouped(runs), "personal/accuracy").columns
    assert not any("after" in header for header in headers)
    assert "local accuracy" in headers
