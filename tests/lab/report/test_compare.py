"""Several runs side by side."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lightfed.lab.compare import main
from lightfed.lab.report.comparison import common_metric, compare
from lightfed.lab.report.figures import comparison_figures
from lightfed.lab.report.tables import comparison_table
from lightfed.lab.results.groups import grouped, singles
from lightfed.lab.results.paired import t_half_width
from lightfed.lab.results.run import read
from lightfed.utils.errors import UserError
from tests.lab.report.make_run import (
    CLIENTS,
    CONFIG,
    ENVIRONMENT,
    EVALUATIONS,
    rows_of,
    write_run,
)
from tests.lab.report.read_page import ReadPage

SCORES = {("x", 1): (0.25, 0.75), ("x", 2): (0.5, 0.875), ("y", 1): (0.5, 0.5)}


def _write(root: Path, name: str, seed: int, **changes: Any) -> Path:
    config = f"seed_everything: {seed}\nmodel: {{algorithm: {name}}}\nname: {name}-seed{seed}\n"
    scores = SCORES.get((name, seed), (0.1, 0.2))
    costs = {"bytes_up": (500, 500), "flops": (1e6, 1e6)}
    metrics = changes.pop("metrics", {"global/accuracy": scores} | costs)
    rounds = changes.pop("rounds", len(next(iter(metrics.values()))))
    stated = {"name": f"{name}-seed{seed}", "algorithm": name, "seed": seed, "rounds": rounds}
    files: dict[str, Any] = {
        "metrics": metrics,
        "environment": ENVIRONMENT | stated | changes.pop("stated", {}),
        "config": config,
    }
    return write_run(root / f"{name}-seed{seed}", **{**files, **changes})


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [_write(tmp_path, name, seed) for name, seed in SCORES]


def test_a_comparison_is_a_page_and_a_table(
    three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = compare(three, group=False)
    assert path == tmp_path / "comparison" / "comparison.html"
    row = ReadPage(path).table("run")["x, seed 2"]
    assert row["seed"] == "2"
    assert row["global accuracy"] == "87.50 %"
    assert (row["sent"], row["compute"]) == ("1.00 kB", "2.00 MFLOPs")
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("x, seed 1", "x, seed 2", "87.50 %"))
    assert "all runs: n 1, data Digits, clients 4, rounds 2" in printed
    assert printed.endswith(f"page: {path}\n")


def test_runs_of_an_experiment_share_a_row_with_their_interval(
    three: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    page = ReadPage(compare(three))
    rows = page.table("run")
    assert list(rows) == ["x", "y"]
    half = 100 * stats.t.ppf(0.975, 1) * np.std([0.75, 0.875], ddof=1) / np.sqrt(2)
    head = "global accuracy (95 % interval)"  # what follows the sign
    assert rows["x"][head] == f"81.25 \u00b1 {half:.2f} %"
    assert (rows["x"]["n"], rows["x"]["seed"]) == ("2", "1-2")
    assert rows["y"][head] == "50.00 %"
    assert "ean and 95 % t interval over 1 to 2 seeds" in page.texts["p"]
    assert f"81.25 +- {half:.2f} %" in capsys.readouterr().out


def test_runs_that_no_row_counts_are_named(
    three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = ReadPage(compare(three)).table("run")
    half = {"metrics": {"global/accuracy": (0.25, 0.25)}, "rounds": 3}
    again = _write(tmp_path / "again", "x", 2)
    page = ReadPage(compare([*three, again, _write(tmp_path, "x", 3, **half)]))
    assert page.table("run") == counted
    stated = capsys.readouterr().out
    for note in (
        "kipped because another run with the same seed is included: x-seed2",
        "kipped because they are not finished: x-seed3 (2 of 3 rounds)",
    ):
        assert note in page.texts["p"]
        assert note in stated


def test_a_pair_is_compared_beside_the_same_method_on_other_data(
    three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = "model: {algorithm: x}\ndata: {dataset: MNIST}\n"
    elsewhere = _write(tmp_path / "mnist", "x", 1, stated={"dataset": "MNIST"}, config=config)
    compare([*three, elsewhere])
    printed = capsys.readouterr().out
    assert "no verdict for x: data.dataset is Digits for x, MNIST for x" in printed
    assert "no verdict from one seed: y - x is -25.00 points" in printed


def test_a_run_that_failed_in_part_is_named(three: list[Path], tmp_path: Path) -> None:
    failed = {"global/accuracy": (0.1, 0.2), "participants": (5, 5), "excluded": (0, 2)}
    page = ReadPage(compare([*three, _write(tmp_path, "z", 1, metrics=failed)]))
    assert "essions skipped: z-seed1 (2 of 10)." in page.texts["p"]


def test_what_a_target_cost_is_a_mean_over_seeds_that_all_reached_it(tmp_path: Path) -> None:
    courses = {("x", 1): (0.5, 0.8, 0.9), ("x", 2): (0.5, 0.6, 0.8), ("y", 1): (0.9, 0.1, 0.1)}
    courses |= {("y", 2): (0.1, 0.7, 0.7)}
    spent = {"bytes_up": (100, 100, 100), "bytes_down": (0, 100, 100), "flops": (1e3, 1e3, 1e3)}
    runs = [
        _write(tmp_path, *k, metrics={"global/accuracy": v} | spent) for k, v in courses.items()
    ]
    rows = ReadPage(compare(runs, target=0.8)).table("run")
    names = ("rounds to 80.00 % global accuracy", "sent until then", "compute until then")
    assert [rows["x"][name] for name in names] == ["2.5", "400 B", "2.50 kFLOPs"]
    assert [rows["y"][name] for name in names] == ["reached by 1 of 2", "-", "-"]


def test_a_seed_whose_last_value_is_not_finite_is_not_in_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    courses = {("x", 1): (4, 3), ("x", 2): (4, "nan"), ("y", 1): (9, 8), ("y", 2): (9, 7)}
    courses |= {("z", 1): ("inf", "nan"), ("z", 2): ("nan", "inf")}
    runs = [_write(tmp_path, *k, metrics={"global/perplexity": v}) for k, v in courses.items()]
    rows = ReadPage(compare(runs)).table("run")
    head = "global perplexity (95 % interval)"
    assert rows["x"][head] == "3, 1 of 2 seeds"
    assert rows["y"][head].startswith("7.5 ")
    assert rows["z"][head] == "not finite"


def test_an_experiment_has_one_colour_in_every_figure(three: list[Path], tmp_path: Path) -> None:
    rows = grouped([read(folder) for folder in three])
    figures = comparison_figures(rows, "global/accuracy")
    assert [figure.name for figure in figures] == ["comparison", "comparison-clients"]
    for figure in figures:
        assert figure.series == {"x": 0, "y": 1}
    over_rounds, over_bytes = figures[0].charts
    mean = over_rounds.data[over_rounds.data["series"] == "x"]
    assert mean["y"].tolist() == pytest.approx([0.375, 0.8125])
    half = t_half_width(0.0625 * np.sqrt(2), 2)
    assert mean[["low", "high"]].iloc[-1].tolist() == pytest.approx([0.8125 - half, 1.0])
    assert over_bytes.data["x"].tolist() == pytest.approx([0.5, 1.0, 0.5, 1.0])
    assert "kB" in over_bytes.columns["x"].heading


def test_one_round_each_is_a_table_without_curves(tmp_path: Path) -> None:
    metrics = {"global/accuracy": (0.5,)}
    runs = [_write(tmp_path, name, 1, metrics=metrics) for name in ("x", "y")]
    page = ReadPage(compare(runs))
    assert "Learning curves" not in page.texts["h2"]
    assert page.table("run")["y"]["global accuracy"] == "50.00 %"


def test_the_page_of_a_comparison_escapes(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "name": "<b>&", "algorithm": "<b>&", "synthetic": True}
    runs = [_write(tmp_path, "x", 1), write_run(tmp_path / "evil", environment=environment)]
    page = ReadPage(compare(runs, output=tmp_path / "new" / "folder"))
    assert "b" not in page.tags
    assert "<b>&" in page.table("run")
    assert "Synthetic data: evil." in page.texts["p"]
    assert page.resources == []


def test_what_clients_keep_is_a_column_where_some_run_tells_it(
    three: list[Path], tmp_path: Path
) -> None:
    rows = [(*row, kept) for row, kept in zip(EVALUATIONS[-2:], (1000, 3000), strict=True)]
    stated = {"evaluations": rows, "client_columns": f"{CLIENTS},stored_bytes"}
    runs = [read(folder) for folder in (three[0], _write(tmp_path, "z", 1, **stated))]
    table = comparison_table(singles(runs), "global/accuracy")
    place = list(table.columns).index("stored / client")
    assert [row[place] for row in rows_of(table)] == ["-", "2.00 kB"]
    assert "stored / client" not in comparison_table(singles(runs[:1]), "global/accuracy").columns


def test_unfinished_runs_are_compared_if_there_are_no_others_and_say_so(tmp_path: Path) -> None:
    runs = [_write(tmp_path, name, 1, rounds=9) for name in "xy"]
    page = ReadPage(compare(runs))
    assert list(page.table("run")) == ["x (not finished)", "y (not finished)"]
    ended = {"finished": {"rounds": 2, "limits": {}}}  # stopped early
    stopped = [read(_write(tmp_path, "z", seed, rounds=9, stated=ended)) for seed in (1, 2)]
    assert [(row.label, len(row.runs)) for row in grouped(stopped)] == [("z", 2)]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [({"rounds": 2}, True), ({"rounds": 3}, False), ({"rounds": -1}, False), ({}, True)],
)
def test_a_run_without_a_word_of_its_end_is_judged_by_its_rounds(
    stated: dict[str, int], expected: bool, tmp_path: Path
) -> None:
    run = read(write_run(tmp_path / "run", metrics={"train_loss": (1, 1)}, environment=stated))
    assert run.finished is expected


OPTIMIZER = "model: {{algorithm: x, optimizer: {{class_path: torch.optim.{}, init_args: {}}}}}\n"


def test_another_optimizer_is_another_experiment_and_labels_name_it(tmp_path: Path) -> None:
    """The learning rate alone would tell them apart, but say nothing of the one without any."""
    chosen = ("ASPG", "{rho: 1}"), ("SGD", "{lr: 0.1}"), ("SGD", "{lr: 0.2}")
    runs = [
        read(_write(tmp_path / str(i), "x", seed, config=OPTIMIZER.format(*one)))
        for i, one in enumerate(chosen)
        for seed in (1, 2)
    ]
    assert [(row.label, len(row.runs)) for row in grouped(runs)] == [
        *(("x, ASPG", 2), ("x, SGD, lr 0.1", 2), ("x, SGD, lr 0.2", 2)),
    ]


def test_a_run_that_is_measured_more_often_is_of_the_same_experiment(tmp_path: Path) -> None:
    often = _write(tmp_path, "x", 1, metrics={"global/accuracy": (0.1, 0.2, 0.3)})
    seldom = _write(tmp_path, "x", 2, metrics={"global/accuracy": (0.3, "", 0.5)})
    with (seldom / "config.yaml").open("a") as file:
        file.write("trainer: {check_val_every_n_epoch: 2}\n")
    (row,) = grouped([read(often), read(seldom)])
    course = row.course("global/accuracy")
    assert course.index.tolist() == [1, 3]
    np.testing.assert_allclose(course["mean"], [0.2, 0.4])
    half = t_half_width(0.1 * np.sqrt(2), 2)
    np.testing.assert_allclose(course["high"], [0.2 + half, 0.4 + half])


def test_a_report_reads_what_the_run_wrote_that_it_is(tmp_path: Path) -> None:
    """The digest of the keys counts, whatever else is in the configuration."""
    stated = {"experiment": {"digest": "abc", "settings": {"model.optimizer.init_args.lr": "0.1"}}}
    runs = [read(_write(tmp_path, "x", seed, stated=stated)) for seed in (1, 2)]
    other = {"experiment": {"digest": "def", "settings": {"model.optimizer.init_args.lr": "0.2"}}}
    runs.append(read(_write(tmp_path, "x", 3, stated=other)))
    assert [(row.label, len(row.runs)) for row in grouped(runs)] == [
        ("x, lr 0.1", 2),
        ("x, lr 0.2", 1),
    ]


def test_without_a_configuration_a_run_is_an_experiment_by_itself(tmp_path: Path) -> None:
    runs = [
        read(write_run(tmp_path / name, config=None, environment={"algorithm": "x", "rounds": 3}))
        for name in ("fedavg-s1", "fedavg-s2")
    ]
    assert [row.label for row in grouped(runs)] == ["x, fedavg-s1", "x, fedavg-s2"]


def test_runs_that_nothing_tells_apart_are_named_by_their_paths(tmp_path: Path) -> None:
    runs = [_write(tmp_path / where, "x", s) for where, s in (("p", 1), ("q", 1), ("q", 2))]
    assert [row.label for row in singles([read(run) for run in runs])] == [
        *("x, seed 1, p/x-seed1", "x, seed 1, q/x-seed1", "x, seed 2"),
    ]


def test_the_metric_is_one_that_all_runs_measured(tmp_path: Path) -> None:
    both = {"personal/accuracy": (0.5,), "train_loss": (1.0,)}
    metrics = {
        "a": {"global/accuracy": (0.5,), **both},
        "b": both,
        "c": {"train_loss": (1.0,)},
        "d": {"global/f1": (1.0,)},
    }
    runs = {k: read(write_run(tmp_path / k, metrics=v)) for k, v in metrics.items()}
    assert common_metric([runs["a"], runs["b"]]) == "personal/accuracy"
    assert common_metric([runs["a"], runs["c"]]) == "train_loss"
    assert common_metric([runs["a"], runs["d"]]) == "global/accuracy"


def test_a_run_named_twice_is_one_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config=CONFIG)
    with pytest.raises(UserError, match="compare: a comparison of 1 run; name two or more"):
        compare([run, run.parent / "run" / ".." / "run"])


def test_a_pivot_has_a_column_for_each_partition_and_stars_the_best(tmp_path: Path) -> None:
    partition = "{partition: {class_path: Dirichlet, init_args: {alpha: %s}}}"
    config = f"model: {{algorithm: %s}}\ndata: {partition}\n"
    finals = {("A", 0.1): 0.5, ("B", 0.1): 0.6, ("A", 1.0): 0.9, ("B", 1.0): 0.8}
    runs = [
        _write(
            tmp_path,
            f"{name}{alpha}",
            seed,
            metrics={"global/accuracy": (0.1, 0.2, value + 0.02 * seed)},
            config=config % (name, alpha),
            stated={"algorithm": name},
        )
        for (name, alpha), value in finals.items()
        for seed in (0, 1)
    ]
    page = compare(runs, pivot="partition", columns=["global/accuracy"], std=True, tables=["latex"])
    rows = ReadPage(page).table("method")
    first, second = [head for head in rows["A"] if head != "method"]
    assert ("0.1" in first, "1.0" in second) == (True, True)
    assert rows["A"][first] == "51.00 ± 1.41 %"
    assert rows["B"][first] == "*61.00 ± 1.41 %"
    assert rows["A"][second].startswith("*91")
    text = (page.parent / "comparison-table.tex").read_text()
    assert r"\textbf{61.00" in text
    assert r"\toprule" in text
    with pytest.raises(UserError) as refused:
        compare(runs, pivot="optimizer")
    assert refused.value.key == "--pivot"
    with pytest.raises(UserError) as refused:
        compare(runs, columns=["global/f1"])
    assert refused.value.key == "--columns"


def _of_partition(root: Path, name: str, finals: dict[int, float], alpha: float = 0.5) -> list[str]:
    """A run for each seed, whose accuracy ends as given."""
    config = f"model: {{algorithm: {name}}}\ndata: {{partition: {{alpha: {alpha}}}}}\n"
    folders = [
        _write(
            root / f"{name}{alpha}",
            name,
            seed,
            metrics={"global/accuracy": (0.1, final), "seconds": (1.0, 2.0)},
            config=config,
        )
        for seed, final in finals.items()
    ]
    return [str(folder) for folder in folders]


def test_paired_seeds_of_two_experiments_get_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The interval is that of the differences of the seeds that both have."""
    a = _of_partition(tmp_path, "x", {0: 0.50, 1: 0.60, 2: 0.55, 7: 0.99})
    b = _of_partition(tmp_path, "y", {0: 0.70, 1: 0.82, 2: 0.74, 9: 0.01})
    output = tmp_path / "out"
    words = [*a, *b, "--output", str(output), "--table", "csv,latex,markdown"]
    assert main(words) == 0
    (mean, half) = (0.61 / 3, stats.t.ppf(0.975, 2) * np.std([0.2, 0.22, 0.19], ddof=1) / 3**0.5)
    answer = f"y is better than x: global accuracy +{100 * mean:.2f} points "
    answer += f"(+{100 * (mean - half):.2f} to +{100 * (mean + half):.2f}), 3 seeds (0-2)"
    printed = capsys.readouterr().out
    assert f"{answer}; 2 seeds are enough to detect a difference of this size\n" in printed

    page = ReadPage(output / "comparison.html")
    assert answer[1:] in page.texts["p"]
    rows = page.table("metric")
    head = "y - x (95 % paired t interval)"
    assert list(rows["global accuracy"]) == ["metric", "x", "y", head]
    assert rows["global accuracy"]["x"] == "55.00 %"
    for end in ("csv", "tex", "md"):
        assert (output / f"comparison-differences.{end}").is_file()


def test_one_common_seed_has_no_verdict_but_a_number_of_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = _of_partition(tmp_path, "x", {0: 0.50, 1: 0.60})
    b = _of_partition(tmp_path, "y", {0: 0.53})
    assert main([*a, *b]) == 0
    # 5 seeds: sqrt(5) |difference| / spread is the sum of the two quantiles.
    most = 3.0 * 5**0.5 / (stats.t.ppf(0.975, 4) + stats.t.ppf(0.8, 4))
    said = "no verdict from one seed: y - x is +3.00 points global accuracy in seed 0; 5 seeds "
    said += "would be needed to detect a difference of this size if its standard deviation over "
    said += f"seeds is {most:.2f} points, and more if it is larger"
    assert said in capsys.readouterr().out


def test_unequal_terms_have_no_verdict_unless_permitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = _of_partition(tmp_path, "x", {0: 0.50, 1: 0.60})
    runs += _of_partition(tmp_path, "y", {0: 0.70, 1: 0.82}, alpha=0.1)
    key = "data.partition.alpha"
    assert main(runs) == 0
    printed = capsys.readouterr().out
    line = f"no verdict for y: {key} is 0.5 for x, 0.1 for y; --differ {key} permits it"
    assert line in printed
    assert "better than" not in printed
    with pytest.raises(UserError, match=key):
        main([*runs, "--json"])

    assert main([*runs, "--differ", "data.partition"]) == 0
    printed = capsys.readouterr().out
    assert "y is better than x" in printed
    assert f"{key} differs: 0.5 for x, 0.1 for y" in printed


def test_each_partition_has_its_own_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finals = {0: 0.50, 1: 0.60}
    runs = []
    for alpha in (0.5, 0.1):
        for place, name in enumerate("xyz"):
            shifted = {seed: final + 0.1 * place + 0.001 * seed for seed, final in finals.items()}
            runs += _of_partition(tmp_path, name, shifted, alpha)
    assert main(runs) == 0
    lines = capsys.readouterr().out.splitlines()
    answers = [
        line.partition(": global")[0]
        for line in lines
        if "2 seeds (0-1)" in line and "than" in line
    ]
    for alpha in (0.5, 0.1):
        of_alpha = [answer for answer in answers if str(alpha) in answer.partition(":")[0]]
        assert [answer.partition(": ")[2] for answer in of_alpha] == [
            "y is better than x",
            "z is better than x",
        ]


def test_a_comparison_of_folders_for_a_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = _of_partition(tmp_path, "x", {0: 0.50, 1: 0.60})
    b = _of_partition(tmp_path, "y", {0: 0.70, 1: 0.82})
    assert main([*a, *b, "--json", "--target", "global/accuracy>=0.55"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["names"] == {"a": "x", "b": "y"}
    assert found["a"].split() == a
    assert found["verdict"] == "better"
    assert found["seeds"] == [0, 1]
    assert found["rows"]["global/accuracy"]["difference"] == pytest.approx(0.21)
    assert found["rows"]["rounds to target"]["reached"] == {"a": 1, "b": 2, "of": 2}
    assert not (tmp_path / "comparison").exists()
