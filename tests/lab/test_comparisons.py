"""`lightfed compare`: equal terms, rates tuned alike, and what is answered."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest

from lightfed.cli import known_runs
from lightfed.cli.command_line import main
from lightfed.cli.wanted import Wanted
from lightfed.lab import compare, contest, sweep
from lightfed.lab.contest import Grid, Method, check_terms
from lightfed.lab.results import verdicts
from lightfed.lab.results.groups import Group
from lightfed.lab.results.run import read
from lightfed.utils.code_files import digest_of_file
from lightfed.utils.errors import UserError
from tests.lab.pretended import Pretended
from tests.lab.reading import check_once
from tests.lab.report.make_run import ENVIRONMENT, write_run
from tests.promises.refusals.mistakes import edited

SMALL = {"model.algorithm": "FedAvg", "model.optimizer.init_args.lr": 0.1}
GROUPS = [{"count": 3, "model": {"class_path": "Conv", "init_args": {"hidden": [4]}}}]
BASE = edited({**SMALL, "model.clients": GROUPS})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Missing runs are run in this process, which is what takes the seconds."""

    def run(
        runs: Sequence[Wanted],
        *,
        jobs: int,
        to: TextIO | None = None,
        after: Callable[[Wanted], None],
    ) -> int:
        worst = 0
        for wanted in runs:
            try:
                main([*wanted.words, "--trainer.enable_page", "false"])
            except SystemExit as failed:
                worst = max(worst, int(failed.code or 0))
            else:
                after(wanted)
        return worst

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "check", check_once)
    monkeypatch.setattr(sweep, "run", run)
    (tmp_path / "run.yaml").write_text(BASE)
    return tmp_path


def wanted_of(file: str, *words: str) -> Wanted:
    return Wanted.of(["fit", "--config", file, *words])


def value_of(word: str) -> str:
    """The last part of a key, with its value."""
    key, _, value = word.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--data.dataset.init_args.image_size=16"], "data.dataset.init_args.image_size"),
        (["--data.partition.init_args.alpha=0.1"], "data.partition.init_args.alpha"),
        (["--data.partition=Iid"], "data.partition.class_path"),
        (["--data.personal_test=split"], "data.personal_test"),
        (["--data.train_fraction=0.5"], "data.train_fraction"),
        (["--model.evaluate_at=trained"], "model.evaluate_at"),
        (["--model.evaluate=[global]"], "model.evaluate"),
        (["--model.eval_clients=2"], "model.eval_clients"),
        (["--trainer.limit_val_batches=1"], "trainer.limit_val_batches"),
        (["--model.clients.0.count=4"], "clients"),
    ],
)
def test_unequal_terms_are_refused_with_both_values(
    words: list[str], key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [word for own in words for word in ("--set-b", own.removeprefix("--"))]
    with pytest.raises(SystemExit) as ended:
        main(["compare", "run.yaml", "run.yaml", *sets, "--seeds", "0-1"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lightfed: error: {key}")
    assert " for FedAvg, " in line
    assert line.split(";")[0].endswith(f" for FedAvg ({', '.join(value_of(w) for w in words)})")
    assert not (folder / "runs").exists()


def test_the_moment_of_an_algorithm_counts_where_none_is_given(folder: Path) -> None:
    own, other = wanted_of("run.yaml"), wanted_of("run.yaml", "--model.algorithm=Standalone")
    with pytest.raises(UserError) as refused:
        check_terms({"A": own, "B": other}, [])
    assert refused.value.key == "model.evaluate_at"


def test_another_seed_needs_no_second_reading(folder: Path) -> None:
    wanted, read_again = wanted_of("run.yaml").at(3), wanted_of("run.yaml", "--model.seed=3")
    assert wanted._replace(options={}) == read_again._replace(options={})
    assert wanted.identity == read_again.identity != wanted_of("run.yaml").identity


def test_a_permitted_difference_is_said(folder: Path) -> None:
    own, other = wanted_of("run.yaml"), wanted_of("run.yaml", "--data.partition.alpha=0.1")
    (said,) = check_terms({"A": own, "B": other}, ["data.partition"])
    assert "0.5 for A, 0.1 for B" in said
    assert check_terms({"A": own, "B": wanted_of("run.yaml", "--model.local_epochs=2")}, []) == []


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--set", "model.seed=3"], "model.seed"),
        (["--set", "model.fraction"], "--set"),
        (["--seeds", "3"], "compare"),
        (["--tune", "model.optimizer.lr=.1"], "--tune"),
        (["--tune", "model.optimizer.lr=.1,.2", "--tune-seed", "1"], "--tune-seed"),
        (["--target", "personal/accuracy=0.5"], "--target"),
        (["--target", "personal/loss>=0.5"], "--target"),
        (["--target", "personal/accuracy>=x"], "--target"),
        (["--metric", "personal/f1"], "--metric"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(
    words: list[str], key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--metric" in words:
        words = [*words, "--set", "trainer.max_epochs=1"]
    with pytest.raises(SystemExit) as ended:
        main(["compare", "run.yaml", "run.yaml", "--seeds", "0-1", *words])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"lightfed: error: {key}: ")


def test_a_point_is_on_the_edge_if_one_of_its_values_is() -> None:
    grid = Grid({"a": ["1", "2", "3"], "b": ["1", "2", "3", "4"]}, [100])
    inner = [point for i, point in enumerate(grid.points) if not grid.on_edge(i)]
    assert inner == [("--a=2", "--b=2"), ("--a=2", "--b=3")]


def test_a_comparison_for_a_program(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--seeds", "0-2", "--metric", "train_loss", "--set", "trainer.max_epochs=1"]
    words += ["--tune", "model.optimizer.lr=1e-5,.3", "--set-b", "model.local_epochs=4"]
    with pytest.raises(SystemExit) as ended:
        main(["compare", "run.yaml", "run.yaml", *words, "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seeds"] == [0, 1, 2]
    assert [row["chosen"] for row in found["search"]] == [".3 (edge of the grid)"] * 2
    assert found["verdict"] == "better"
    row = found["rows"]["train_loss"]
    assert row["difference"] == pytest.approx(row["b"] - row["a"])
    assert row["low"] < row["difference"] < row["high"] < 0
    assert found["rows"]["bytes"]["difference"] == 0.0
    ratio = found["rows"]["FLOPs"]["b"] / found["rows"]["FLOPs"]["a"]
    assert ratio == pytest.approx(4.0)
    runs = sorted(p.parent.name for p in (folder / "runs").glob("*/metrics.csv"))
    assert len(runs) == 2 * 2 + 2 * 3
    with pytest.raises(SystemExit):  # nothing is missing: the same table, and a page
        main(["compare", "run.yaml", "run.yaml", *words, "--target", "train_loss<=2.5"])
    out = capsys.readouterr().out
    assert "FedAvg (local_epochs=4) is better than FedAvg: train loss" in out
    assert "rounds to 2.5 train loss" in out
    assert len(list((folder / "runs").glob("*/metrics.csv"))) == len(runs)
    assert (
        "FedAvg (local_epochs=4) is better"
        in (folder / "runs" / "compare" / "comparison.html").read_text()
    )


def test_a_comparison_that_is_there_needs_no_parser_until_a_run_is_missing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(folder / "run.yaml")
    read_commands: list[Sequence[str]] = []

    def check(commands: Sequence[Sequence[str]]) -> list[Wanted | UserError]:
        read_commands.extend(commands)
        files = {file: str(digest_of_file(file))}
        return [Wanted.of(list(words))._replace(files=files) for words in commands]

    def compared(*words: str) -> tuple[dict[str, Any], int]:
        """The answer, and how many commands were read for it."""
        read_commands.clear()
        sides = ["run.yaml", "run.yaml", "--set-b", "model.local_epochs=2", "--json"]
        short = ["--set", "trainer.max_epochs=1", "--tune", "model.optimizer.lr=.1,.3"]
        short += ["--metric", "train_loss"]
        with pytest.raises(SystemExit) as ended:
            main(["compare", *sides, *short, *words])
        assert ended.value.code == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer, len(read_commands)

    monkeypatch.setattr(sweep, "check", check)
    pretended = Pretended({2: [0.5] * 101})  # seed 100 is that of the search
    monkeypatch.setattr(sweep, "run", pretended.run)
    # The imports of a process change its environment. A command would be a new process.
    monkeypatch.setattr(known_runs, "circumstances", dict)
    answer, commands = compared("--seeds", "0-1")
    assert commands == 4
    assert compared("--seeds", "0-1") == (answer, 0)
    assert len(pretended.seeds) == 2  # the search, and what is compared

    # Another seed is not there, so all is read before it is trained.
    assert compared("--seeds", "0-2")[1] == 4
    assert compared("--seeds", "0-2")[1] == 0

    Path(file).write_text(edited({**SMALL, "model.clients": GROUPS, "data.batch_size": 7}))
    assert compared("--seeds", "0-1")[1] == 4


def test_a_search_chooses_by_samples_that_are_not_of_the_test(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--seeds", "0-1", "--metric", "personal/accuracy", "--set", "trainer.max_epochs=1"]
    words += ["--tune", "model.optimizer.lr=.01,.3"]
    with pytest.raises(SystemExit):
        main(["compare", "run.yaml", "run.yaml", *words])
    out = capsys.readouterr().out
    assert "on seed 100, by personal/accuracy on validation samples" in " ".join(out.split())

    runs = [read(path.parent) for path in (folder / "runs").glob("*/metrics.csv")]
    assert {run.settings["data.validation"] for run in runs} == {"0.1"}
    assert all(run.chosen_by("personal/accuracy").startswith("validation/") for run in runs)

    # A configuration that says something itself is followed.
    (folder / "run.yaml").write_text(
        edited({**SMALL, "model.clients": GROUPS, "data.validation": 0})
    )
    with pytest.raises(SystemExit):
        main(["compare", "run.yaml", "run.yaml", *words])
    out = capsys.readouterr().out
    assert "by personal/accuracy on test samples" in " ".join(out.split())


def test_an_inert_change_is_identical_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "run.yaml", "run.yaml", "--seeds", "0-1", "--set", "trainer.max_epochs=1"]
    words += ["--set-b", "model.max_failed_clients=1"]
    with pytest.raises(SystemExit):
        main(words)
    assert "identical runs: " in capsys.readouterr().out
    assert len(list((folder / "runs").glob("*/metrics.csv"))) == 4
    with pytest.raises(SystemExit):
        main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["p"]) == ("identical runs", 1.0)


def test_a_rate_that_fails_is_not_chosen_and_a_compared_run_that_fails_ends_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "run.yaml", "run.yaml", "--seeds", "0-1", "--set", "trainer.max_epochs=1"]
    words += ["model.max_failed_clients=0"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--tune", "model.optimizer.lr=.1,1e30", "--json"])
    assert ended.value.code == 0
    (row, _) = json.loads(capsys.readouterr().out)["search"]
    assert row["1e30"] == contest.FAILED
    assert row["chosen"].startswith(".1")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*words, "--set-b", "model.optimizer.lr=1e30"])
    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == (
        "lightfed: error: runs: failed: FedAvg (lr=1e30) in seeds 0-1; "
        "change what fails; finished runs are kept"
    )


def test_a_search_does_not_repeat_a_run_that_has_diverged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, rate = "--trainer.max_epochs=1", "--model.optimizer.lr=1e30"
    # As in every search, clients keep a tenth of their samples.
    known = wanted_of("run.yaml", short, rate, "--data.validation=0.1", "--model.seed=100").diverged
    known.parent.mkdir(parents=True)
    known.touch()
    words = ["--seeds", "0-1", "--set", short.lstrip("-"), "--tune", "model.optimizer.lr=.1,1e30"]
    with pytest.raises(SystemExit) as ended:
        main(["compare", "run.yaml", "run.yaml", *words, "--tune-seed", "100-101", "--json"])
    assert ended.value.code == 0
    out, errors = capsys.readouterr()
    assert json.loads(out)["search"][0]["1e30"] == contest.FAILED  # one of two seeds is enough
    assert errors.startswith("3 of 4 runs are missing")


def test_what_is_missing_is_submitted(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sweep, "submit", lambda *a, **k: seen.append(a) or 0)
    words = ["compare", "run.yaml", "run.yaml", "--set-b", "model.local_epochs=2", "--slurm"]
    monkeypatch.setattr(sys, "argv", ["lightfed", *words])
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    ((file, lines, _),) = seen
    assert list(lines) == list(range(1, 11))
    assert len(file.read_text().splitlines()) == 10
    assert "lightfed compare run.yaml" in capsys.readouterr().out


def test_a_seed_that_diverged_decides_nothing(tmp_path: Path) -> None:
    def group(name: str, finals: Sequence[Any]) -> Group:
        folders = [
            write_run(
                tmp_path / f"{name}{seed}",
                metrics={"global/accuracy": (0.1, final)},
                environment={**ENVIRONMENT, "seed": seed, "rounds": 2},
                evaluations=None,
                counts=None,
            )
            for seed, final in enumerate(finals)
        ]
        return Group(name, tuple(read(folder) for folder in folders))

    a, b = group("a", (0.5, 0.51, 0.5)), group("b", (0.8, 0.8, "nan"))
    assert "is shown: global accuracy" in (said := verdicts.verdict(a, b, "global/accuracy"))
    assert "1 seed without a finite value" in said
    better = verdicts.verdict(a, group("c", (0.8, 0.8, 0.8)), "global/accuracy")
    assert better.startswith("c is better than a: global accuracy +29.67 points")


def test_a_cost_to_a_target_is_that_of_the_round_that_reached_it(tmp_path: Path) -> None:
    def group(name: str, course: tuple[float, float]) -> Group:
        folders = [
            write_run(
                tmp_path / f"{name}{seed}",
                metrics={"global/accuracy": course},
                environment={**ENVIRONMENT, "seed": seed, "rounds": 2},
                evaluations=None,
                counts=None,
            )
            for seed in (0, 1)
        ]
        return Group(name, tuple(read(folder) for folder in folders))

    slow, fast, never = (
        group("slow", (0.1, 0.7)),
        group("fast", (0.6, 0.7)),
        group("no", (0.1, 0.2)),
    )
    target, column = ("global/accuracy", 0.5), "rounds to target"
    rounds = {name: verdicts.finals_of(g, column, target) for name, g in (("s", slow), ("f", fast))}
    assert rounds["s"][0] > rounds["f"][0]
    assert verdicts.answer_of(slow, fast, column, target)[1] == "better"
    found, answer = verdicts.answer_of(never, fast, column, target)
    assert (answer, verdicts.gain_text(found, column)) == ("not shown", "no seed has both values")


def reaching(folder: Path, name: str, finals: Sequence[float]) -> Group:
    """A method with a run for each seed, whose accuracy ends as given."""
    folders = [
        write_run(
            folder / f"{name}{seed}",
            metrics={"global/accuracy": (0.1, final), "seconds": (1.0, 1.0 + seed)},
            environment={**ENVIRONMENT, "seed": seed, "rounds": 2},
            evaluations=None,
            counts=None,
        )
        for seed, final in enumerate(finals)
    ]
    return Group(name, tuple(read(folder) for folder in folders))


def test_a_cost_to_a_target_has_a_mean_only_where_all_seeds_reach_it(tmp_path: Path) -> None:
    """The mean of the one seed that reached it would be compared with that of all three."""
    a = reaching(tmp_path, "a", (0.6, 0.7, 0.8))
    b = reaching(tmp_path, "b", (0.2, 0.9, 0.2))
    rows = {row.name: row for row in verdicts.rows_of(a, b, ("global/accuracy", 0.5))}
    row = rows["seconds to target"]
    title, of_a, of_b, difference = row.cells
    assert title == "seconds to 50.00 % global accuracy"
    assert (of_a, of_b, difference) == ("3.00 s", "reached by 1 of 3", "-")
    assert row.values["reached"] == {"a": 3, "b": 1, "of": 3}
    assert row.values["a"] == 3.0
    assert [row.values[key] for key in ("b", "difference", "low", "high")] == [None] * 4

    nobody = verdicts.rows_of(b, b, ("global/accuracy", 0.95))
    (rounds,) = [row for row in nobody if row.name == "rounds to target"]
    assert rounds.cells[1:] == ("reached by 0 of 3", "reached by 0 of 3", "-")


def test_a_metric_has_a_mean_only_where_all_seeds_have_a_finite_value(tmp_path: Path) -> None:
    a = reaching(tmp_path, "a", (0.6, 0.7, 0.8))
    b = reaching(tmp_path, "b", (0.6, float("inf"), 0.8))
    rows = {row.name: row for row in verdicts.rows_of(a, b)}
    assert rows["global/accuracy"].cells[1:] == ("70.00 %", "finite in 2 of 3 seeds", "-")


@pytest.mark.parametrize(
    ("own", "names"),
    [
        (((), ("model.algorithm=FedProx",)), ("FedAvg", "FedProx")),
        (((), ("model.local_epochs=2",)), ("FedAvg", "FedAvg (local_epochs=2)")),
        (((), ()), ("FedAvg A", "FedAvg B")),
    ],
)
def test_methods_are_named_by_what_tells_them_apart(
    own: tuple[tuple[str, ...], ...], names: tuple[str, str], folder: Path
) -> None:
    sides = [("fit", "--config", "run.yaml", *(f"--{word}" for word in words)) for words in own]
    assert compare.names_of(sides, own) == list(names)


def test_runs_of_a_search_are_left_out_of_reports(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "run.yaml", "run.yaml", "--seeds", "0-1", "--set", "trainer.max_epochs=1"]
    words += ["--set-b", "model.local_epochs=2", "--tune", "model.optimizer.lr=.1,.2"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--table", "latex,csv,markdown", "--format", "pdf"])
    assert ended.value.code == 0
    place = folder / "runs" / "compare"
    assert "FedAvg (local" in (place / "comparison-table.md").read_text()
    assert (place / "comparison-table.tex").is_file()
    assert (place / "comparison-table.csv").is_file()
    assert list(place.glob("*.pdf"))

    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["compare", "runs", "--table", "csv"])
    assert ended.value.code == 0
    assert "skipped 4 runs of a search" in capsys.readouterr().out
    clients = (folder / "runs" / "comparison" / "clients.csv").read_text()
    assert ",100," not in clients


def test_methods_of_equal_commands_share_their_runs(folder: Path) -> None:
    words = ("fit", "--config", "run.yaml", "--trainer.max_epochs=1")
    held = contest.hold(
        [Method("a", words), Method("b", words)], [0, 1], contest.Way(jobs=None, slurm=False)
    )
    assert len(list((folder / "runs").glob("*/metrics.csv"))) == 2
    rows = {row.name: row for row in verdicts.rows_of(*held.groups)}
    assert rows["train_loss"].difference.mean == 0.0
