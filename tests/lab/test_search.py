"""Searches of `compare`, `study` and `sweep`: draws, early stops, and ranges that are extended."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest
import yaml  # type: ignore[import-untyped]

from lightfed.cli.command_line import main
from lightfed.cli.wanted import Wanted
from lightfed.lab import sweep
from lightfed.lab.grid import Grid
from lightfed.lab.ranges import Range, drawn
from lightfed.lab.results.run import read
from lightfed.lab.runner import Outcome
from lightfed.lab.search import HALVINGS, going_on_of, pause_of
from tests.docs.test_json import check
from tests.lab.reading import check_once, read_all
from tests.lab.report.make_run import write_run
from tests.lab.test_comparisons import BASE
from tests.lab.test_until import command

ROUNDS = 8
LR = "model.optimizer.lr"
COLUMN = "personal/accuracy"
COMMAND = ["compare", "run.yaml", "run.yaml", "--set", f"trainer.max_epochs={ROUNDS}"]
COMMAND += ["--set-b", "model.local_epochs=2", "--metric", COLUMN, "--seeds", "0-1"]
DRAWN = [*COMMAND, "--tune", f"{LR}=log(0.01, 1)", "--trials", "8"]


class Trained:
    """Stands for training: runs are written at once.

    A run has its accuracy on validation samples at `peak` of its rate, and on test samples
    elsewhere, so that a choice by test samples would be noticed.

    Attributes:
        peaks: The best rate of methods by their local epochs.
        asked: Each run in the order in which it was asked for: local epochs, rate, seed, and the
            round after which it pauses.
        failing: Whether a run of a rate fails.
    """

    def __init__(self, peaks: dict[int, float]) -> None:
        self.peaks = peaks
        self.asked: list[tuple[int, float, int, int | None]] = []
        self.failing: Callable[[float], bool] = lambda rate: False

    def accuracy(self, epochs: int, rate: float, rounds: int, seed: int) -> float:
        distance = math.log10(rate / self.peaks[epochs])
        return 0.8 - 0.1 * distance**2 - 0.2 / rounds - 0.001 * seed

    def run(
        self,
        runs: Sequence[Wanted],
        *,
        jobs: int,
        to: TextIO | None = None,
        after: Callable[[Wanted], None] | None = None,
    ) -> int:
        """Stand for `sweep.run`."""
        status = 0
        for wanted in runs:
            rate = float(wanted.values["model.optimizer.init_args.lr"])
            epochs = wanted.values["model.local_epochs"]
            seed = wanted.values["model.seed"]
            self.asked.append((epochs, rate, seed, wanted.pause))
            if self.failing(rate):
                status = 2
                continue
            self._write(wanted, epochs, rate, seed)
            if after is not None:
                after(wanted)
        return status

    def _write(self, wanted: Wanted, epochs: int, rate: float, seed: int) -> None:
        rounds = wanted.pause or ROUNDS
        numbers = range(1, rounds + 1)
        on_validation = [self.accuracy(epochs, rate, number, seed) for number in numbers]
        environment = {
            "name": wanted.name,
            "config": wanted.digest,
            "algorithm": "FedAvg",
            "dataset": "Digits",
            "clients": 3,
            "groups": {"0": 3},
            "rounds": ROUNDS,
            "seed": seed,
            "experiment": {
                "digest": f"{epochs}/{rate}",
                "settings": {"data.validation": str(wanted.values["data.validation"])},
            },
        }
        if wanted.pause is None:
            environment["finished"] = {"rounds": ROUNDS, "limits": dict(wanted.limits)}
        folder = wanted.root / f"{wanted.name}-{wanted.digest}"
        shutil.rmtree(folder, ignore_errors=True)
        write_run(
            folder,
            metrics={
                "train_loss": [1.0] * rounds,
                COLUMN: [0.5 + 0.1 * rate] * rounds,
                f"validation/{COLUMN}": on_validation,
                "bytes_up": [1] * rounds,
                "bytes_down": [1] * rounds,
            },
            environment=environment,
            config=None,
            evaluations=None,
            counts=None,
        )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "check", check_once)
    (tmp_path / "run.yaml").write_text(BASE)
    return tmp_path


def trained(monkeypatch: pytest.MonkeyPatch, one: float, two: float) -> Trained:
    """Methods with one and two local epochs, whose best rates these are."""
    found = Trained({1: one, 2: two})
    monkeypatch.setattr(sweep, "run", found.run)
    return found


def rates(number: int) -> list[float]:
    return [float(point[LR]) for point in drawn({LR: Range("log", 0.01, 1)}, number, 0)]


def test_all_methods_try_the_same_trials_and_hopeless_ones_are_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = trained(monkeypatch, 0.1, 0.2)
    status, out, _ = command([*DRAWN, "--json"], capsys)
    assert status == 0
    found = json.loads(out)
    check(found, "compare")

    # Both methods have the same eight rates up to round 2 of 8; the better four of each go on to
    # round 4, and two to the end. Then both are compared, each with its best rate.
    by_pause: dict[int | None, list[tuple[int, float, int]]] = {}
    for epochs, rate, seed, pause in pretended.asked:
        by_pause.setdefault(pause, []).append((epochs, rate, seed))
    assert by_pause[2] == [(epochs, rate, 100) for epochs in (1, 2) for rate in rates(8)]
    for pause, going_on in ((4, 4), (None, 2)):
        expected = []
        for epochs in (1, 2):
            best = sorted(rates(8), key=lambda rate: -pretended.accuracy(epochs, rate, 2, 100))
            kept = best[:going_on]
            expected += [(epochs, rate, 100) for rate in rates(8) if rate in kept]
        assert [run for run in by_pause[pause] if run[2] == 100] == expected

    chosen = {}
    for epochs in (1, 2):
        chosen[epochs] = max(rates(8), key=lambda rate: pretended.accuracy(epochs, rate, 8, 100))
    compared = [(epochs, chosen[epochs], seed) for seed in (0, 1) for epochs in (1, 2)]
    assert [run for run in by_pause[None] if run[2] != 100] == compared

    assert len(found["trials"]) == 2 * 8
    for trial in found["trials"]:
        epochs = 2 if "local_epochs=2" in trial["method"] else 1
        rate = float(trial["values"][LR])
        assert rate == rates(8)[trial["trial"] - 1]
        assert trial["chosen"] == (rate == chosen[epochs])
        rounds = trial["rounds"] or ROUNDS
        assert trial["value"] == pytest.approx(pretended.accuracy(epochs, rate, rounds, 100))
        assert trial["state"] == ("finished" if trial["rounds"] is None else "stopped")
        assert not trial["extended"]
    stops = [trial["rounds"] for trial in found["trials"]]
    assert [stops.count(rounds) for rounds in (2, 4, None)] == [2 * 4, 2 * 2, 2 * 2]

    # All of it is there, so nothing is run again; and the page shows every trial.
    before = len(pretended.asked)
    status, out, _ = command([*DRAWN, "--table", "markdown"], capsys)
    assert status == 0
    assert len(pretended.asked) == before
    flat = " ".join(out.split())
    assert f"{LR}: the same values for each method, on seed 100, by {COLUMN} on validation" in flat
    assert "10 % of each client's training samples" in flat
    assert (
        f"{LR} from log(0.01, 1): 8 trials, drawn as points of a Sobol sequence by seed 0" in flat
    )
    assert "after rounds 2 and 4 of 8 the better half of a method's trials goes on" in flat
    place = folder / "runs" / "compare"
    table = (place / "search.md").read_text()
    assert table.splitlines()[0] == f"| trial | {LR} | FedAvg | FedAvg (local_epochs=2) |"
    assert table.count("stopped after round 2") == 2 * 4
    assert table.count("stopped after round 4") == 2 * 2
    assert table.count(", chosen") == 2
    page = (place / "comparison.html").read_text()
    assert page.count("stopped after round 2") == 2 * 4
    assert "drawn as points of a Sobol sequence by seed 0" in page

    # Runs that were stopped are kept, and are those of a search.
    stopped = [read(path.parent) for path in (folder / "runs").glob("*/metrics.csv")]
    unfinished = [run for run in stopped if not run.finished]
    assert len(unfinished) == 2 * 6
    assert all(run.of_search for run in unfinished)


def test_the_rule_is_the_same_with_more_rounds_than_a_run_has_evaluations(folder: Path) -> None:
    def pauses(*words: str) -> list[int | None]:
        wanted = Wanted.of(["fit", "--config=run.yaml", *words])
        return [pause_of(wanted, part) for part in HALVINGS]

    every = "--trainer.check_val_every_n_epoch"
    assert pauses("--trainer.max_epochs=12") == [3, 6]
    assert pauses("--trainer.max_epochs=13") == [4, 7]
    assert pauses("--trainer.max_epochs=2") == [1, 1]
    assert pauses("--trainer.max_epochs=1") == [None, None]
    assert pauses("--trainer.max_epochs=12", f"{every}=5") == [5, 10]
    assert pauses("--trainer.max_epochs=12", f"{every}=12") == [None, None]
    assert pauses("--trainer.max_epochs=-1", "--trainer.max_steps=9") == [None, None]
    assert pauses("--trainer.max_epochs=12", "--trainer.max_time=00:00:00:05") == [None, None]
    assert [going_on_of(12, halving) for halving in (1, 2)] == [6, 3]
    assert [going_on_of(5, halving) for halving in (1, 2)] == [3, 2]
    assert [going_on_of(2, halving) for halving in (1, 2)] == [1, 1]


def test_a_range_is_extended_once_for_all_where_its_end_wins(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = trained(monkeypatch, 0.1, 500.0)
    status, out, _ = command([*DRAWN, "--json"], capsys)
    assert status == 0
    found = json.loads(out)
    check(found, "compare")
    further = [trial for trial in found["trials"] if trial["extended"]]
    assert [trial["trial"] for trial in further] == [9, 9, 10, 10, 11, 11, 12, 12]
    for first, second in zip(further[::2], further[1::2], strict=True):
        assert first["values"] == second["values"]
        assert 1 <= float(first["values"][LR]) <= 100

    # The largest of all rates wins again. The range is not extended a second time.
    chosen = {trial["method"]: trial for trial in found["trials"] if trial["chosen"]}
    assert not chosen["FedAvg"]["extended"]
    other = chosen["FedAvg (local_epochs=2)"]
    largest = max(float(trial["values"][LR]) for trial in found["trials"])
    assert float(other["values"][LR]) == largest > 1
    assert max(rate for _, rate, _, _ in pretended.asked) == largest

    before = len(pretended.asked)
    status, out, _ = command(DRAWN, capsys)
    assert len(pretended.asked) == before
    flat = " ".join(out.split())
    top = f"{max(rates(8)):g}"
    assert f"{LR} = {top} was the largest value that FedAvg (local_epochs=2) tried" in flat
    assert "the range was extended once above 1, to 100, by 4 trials more for each method" in flat
    assert "(edge of what was tried)" in flat
    assert "9, beyond a range" in out


def test_a_range_is_not_extended_where_another_value_was_as_good(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With few validation samples many trials are equal, and the first of them is chosen."""
    pretended = trained(monkeypatch, 0.1, 0.1)
    monkeypatch.setattr(pretended, "accuracy", lambda epochs, rate, rounds, seed: 0.5)
    words = [*COMMAND, "--tune", f"{LR}=log(0.01, 1)", "--trials", "2", "--json"]
    status, out, _ = command(words, capsys)
    assert status == 0
    trials = json.loads(out)["trials"]
    assert len(trials) == 2 * 2
    assert [trial["trial"] for trial in trials if trial["chosen"]] == [1, 1]


def test_a_range_that_cannot_be_extended_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fraction above 1 is refused by every command, so nothing is run with it."""
    pretended = trained(monkeypatch, 0.1, 0.1)
    monkeypatch.setattr(
        pretended, "accuracy", lambda epochs, rate, rounds, seed: 0.5 + next(rising)
    )
    rising = iter(0.0001 * number for number in range(1000))
    words = [*COMMAND, "--tune", "model.fraction=uniform(0.5, 1)", "--trials", "2"]
    status, out, _ = command([*words, "--no-stop-early"], capsys)
    assert status == 0
    flat = " ".join(out.split())
    assert "model.fraction was not extended above 1: " in flat
    assert all(pause is None for *_, pause in pretended.asked)
    assert len(pretended.asked) == 2 * 2 + 2 * 2


def test_a_trial_that_fails_is_no_choice_and_nobody_waits_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = trained(monkeypatch, 10.0, 10.0)
    pretended.failing = lambda rate: rate > 0.3
    status, out, _ = command([*DRAWN, "--tune-seed", "100-101", "--json"], capsys)
    assert status == 0
    found = json.loads(out)
    check(found, "compare")
    for trial in found["trials"]:
        has_failed = float(trial["values"][LR]) > 0.3
        assert (trial["state"] == "failed") == has_failed
        assert (trial["value"] is None) == has_failed
    chosen = {float(trial["values"][LR]) for trial in found["trials"] if trial["chosen"]}
    assert chosen == {max(rate for rate in rates(8) if rate <= 0.3)}
    # The largest rate that was tried has failed, so the best one is not at the end of the range.
    assert not any(trial["extended"] for trial in found["trials"])

    pretended.failing = lambda rate: True
    shutil.rmtree(folder / "runs")
    status, _, err = command(DRAWN, capsys)
    assert status == 2
    assert f"--tune: no finite {COLUMN} of FedAvg; give other values" in err


def test_lists_are_tried_whole_unless_asked_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = trained(monkeypatch, 0.1, 0.1)
    words = [*COMMAND, "--tune", f"{LR}=.01,.1,.3,1"]
    status, out, _ = command([*words, "--json"], capsys)
    assert status == 0
    found = json.loads(out)
    check(found, "compare")
    assert all(pause is None for *_, pause in pretended.asked)
    assert [row["chosen"] for row in found["search"]] == [".1", ".1"]
    assert {trial["state"] for trial in found["trials"]} == {"finished"}
    assert len(found["trials"]) == 2 * 4

    shutil.rmtree(folder / "runs")
    pretended.asked.clear()
    status, out, _ = command([*words, "--stop-early", "--json"], capsys)
    stops = [trial["rounds"] for trial in json.loads(out)["trials"]]
    assert [stops.count(rounds) for rounds in (2, 4, None)] == [2 * 2, 2 * 1, 2 * 1]


def test_points_beyond_a_range_are_none_of_the_search() -> None:
    grid = Grid({"n": Range("int", 1, 4), "k": ["a", "b"]}, [100], trials=8)
    assert grid.points_beyond("n", "below") == []
    above = grid.points_beyond("n", "above")
    assert 0 < len(above) <= 4
    for number, letter in above:
        assert 5 <= int(number.partition("=")[2]) <= 8
        assert letter in ("--k=a", "--k=b")


def test_a_search_on_a_cluster_is_submitted_halving_by_halving(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = trained(monkeypatch, 0.1, 0.2)
    batches: list[list[str]] = []

    def submit(file: Path, lines: Sequence[int], further: Any, *, jobs: int | None) -> int:
        batches.append(file.read_text().splitlines())
        wanted = read_all(batches[-1])
        pretended.run(wanted, jobs=1)  # as the array does, after this command
        return 0

    monkeypatch.setattr(sweep, "submit", submit)
    words = [*DRAWN, "--slurm"]
    monkeypatch.setattr(sys, "argv", ["lightfed", *words])
    for number in (16, 8, 4, 4):
        status, _, _ = command(words, capsys)
        assert status == 0
        assert len(batches[-1]) == number
    assert all("--pause_after=2 " in line for line in batches[0])
    assert all("--pause_after=4 " in line for line in batches[1])
    assert not any("pause_after" in line for line in [*batches[2], *batches[3]])
    status, out, _ = command(words, capsys)
    assert "page: " in out
    assert len(batches) == 4


LINE = f"fit --config run.yaml --trainer.max_epochs={ROUNDS}"
LIST = f"""
{LINE} --trainer.name=one --model.seed=0
{LINE} --trainer.name=one --model.seed=1
{LINE} --trainer.name=two --model.seed=0 --model.local_epochs=2
"""
SWEEP = ["sweep", "mine.sweep", "--tune", f"{LR}=log(0.01, 1)", "--trials", "8"]


def outcomes_of(pretended: Trained) -> Any:
    """Stand for the runs of a sweep, which are written at once."""

    def run_all(runs: Sequence[Wanted], jobs: int) -> Any:
        for wanted in runs:
            if wanted.finished() is not None:
                yield Outcome(wanted, 0, 0.0, "")
                continue
            status = pretended.run([wanted], jobs=1)
            yield Outcome(wanted, status, 1.0, "it failed" if status else "")

    return run_all


def test_every_line_of_a_sweep_gets_its_best_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = Trained({1: 0.1, 2: 0.2})
    monkeypatch.setattr(sweep, "run_all", outcomes_of(pretended))
    (folder / "mine.sweep").write_text(LIST)
    status, out, _ = command([*SWEEP, "--json"], capsys)
    assert status == 0
    found = json.loads(out)
    check(found, "sweep")

    # The first two lines differ in the seed alone: they share a search.
    assert len(found["trials"]) == 2 * 8
    searched = {trial["method"] for trial in found["trials"]}
    assert searched == {"mine.sweep, line 2", "mine.sweep, line 4"}
    chosen = {
        trial["method"][-1]: trial["values"][LR] for trial in found["trials"] if trial["chosen"]
    }
    for row, line in zip(found["runs"], "224", strict=True):
        assert row["state"] == "finished"
        assert row["command"].endswith(f"--{LR}={chosen[line]}")
        assert "--data.validation=0.1" in row["command"]
    compared = [run for run in pretended.asked if run[2] != 100]
    assert [(epochs, seed) for epochs, _, seed, _ in compared] == [(1, 0), (1, 1), (2, 0)]

    # All is finished: nothing is run again, and the search is shown.
    before = len(pretended.asked)
    status, out, _ = command(SWEEP, capsys)
    assert status == 0
    assert len(pretended.asked) == before
    flat = " ".join(out.split())
    assert f"{LR} from log(0.01, 1): 8 trials" in flat
    assert "10 % of each client's training samples" in flat
    assert out.count("stopped after round 2") == 2 * 4
    assert out.count("was finished") == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tune-seed", "1"], "--tune-seed: 1, the seed of mine.sweep, line 3; give another"),
        (["--line", "2"], "--tune: given beside --line; "),
        (["--metric", "global/f1"], "--metric: global/f1, which some runs do not have"),
    ],
)
def test_a_tuned_sweep_that_cannot_be_made_is_refused(
    words: list[str],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretended = Trained({1: 0.1, 2: 0.2})
    monkeypatch.setattr(sweep, "run_all", outcomes_of(pretended))
    (folder / "mine.sweep").write_text(LIST)
    status, _, err = command([*SWEEP, *words], capsys)
    assert status == 2
    assert said in err.splitlines()[-1]
    assert len(pretended.asked) <= 1


def test_options_of_a_search_need_one_in_a_sweep(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.sweep").write_text(LIST)
    for words in (["--trials", "3"], ["--metric", COLUMN]):
        status, _, err = command(["sweep", "mine.sweep", *words], capsys)
        assert status == 2
        assert f"lightfed: error: {words[0]}: given without --tune; " in err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trials", "12"], "--trials: given without --tune"),
        (["--trials-seed", "1"], "--trials-seed: given without --tune"),
        (["--stop-early"], "--stop-early: given without --tune"),
        (["--tune-seed", "7"], "--tune-seed: given without --tune"),
        (["--tune", f"{LR}=.1,.2", "--trials", "3"], "--trials: 3, and every value is listed"),
        (
            ["--tune", f"{LR}=.1,.2", "--trials-seed", "3"],
            "--trials-seed: 3, and every value is listed",
        ),
        (["--tune", f"{LR}=log(.1,1)", "--trials", "1"], "--trials: 1; give 2 or more"),
        (["--tune", f"{LR}=log(0,1)"], f"--tune: {LR}=log(0,1); give positive numbers"),
        (["--tune", f"{LR}=log(.1,1)", "--tune-seed", "1"], "--tune-seed: a compared seed"),
        (["--tune", "model.lr_rate=log(.1,1)"], "model.lr_rate"),
    ],
)
def test_a_search_that_cannot_be_made_is_refused_before_any_run(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = command([*COMMAND, *words], capsys)
    assert status == 2
    assert said in err.splitlines()[0]
    assert not (folder / "runs").exists()


STUDY: dict[str, Any] = {
    "title": "two lengths of local training",
    "common": "run.yaml",
    "methods": {
        "one": {"trainer.max_epochs": ROUNDS},
        "two": {"trainer.max_epochs": ROUNDS, "model.local_epochs": 2},
    },
    "seeds": "0-1",
    "metric": COLUMN,
    "columns": [COLUMN],
    "tune": {LR: "log(0.01, 1)"},
    "trials": 8,
    "claims": [{"better": "two", "than": "one", "metric": COLUMN}],
}


def test_a_study_searches_in_the_same_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = trained(monkeypatch, 0.1, 500.0)
    (folder / "own").mkdir()
    (folder / "run.yaml").rename(folder / "own" / "run.yaml")
    (folder / "own" / "lengths.yaml").write_text(yaml.safe_dump(STUDY, sort_keys=False))
    status, out, _ = command(["study", "own/lengths.yaml", "--json"], capsys)
    assert status == 0
    found = json.loads(out)
    check(found, "study")
    (case,) = found["cases"]
    assert len(case["trials"]) == 2 * (8 + 4)
    assert sum(trial["chosen"] for trial in case["trials"]) == 2

    before = len(pretended.asked)
    status, out, _ = command(["study", "own/lengths.yaml", "--markdown"], capsys)
    assert status == 0
    assert len(pretended.asked) == before
    assert f"| trial | {LR} | one | two |" in out
    assert "the range was extended once above 1, to 100" in out
    assert "after rounds 2 and 4 of 8 the better half" in out
    assert "stopped after round 2 |" in out


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"tune": {LR: "log(0, 1)"}}, "lengths.yaml: tune"),
        ({"tune": {LR: 0.1}}, f"lengths.yaml: tune: {LR}"),
        ({"tune": [0.1]}, "lengths.yaml: tune"),
        ({"tune": {LR: [0.1, 0.3]}}, "lengths.yaml: trials"),
        ({"trials": "many"}, "lengths.yaml: trials"),
        ({"trials": True}, "lengths.yaml: trials"),
        ({"trials": 1}, "lengths.yaml: trials"),
        ({"trials_seed": 0.5}, "lengths.yaml: trials_seed"),
        ({"stop_early": 1}, "lengths.yaml: stop_early"),
        ({"validation": 1.0}, "lengths.yaml: validation"),
        ({"validation": "a tenth"}, "lengths.yaml: validation"),
        ({"validation": None}, "lengths.yaml: validation"),
    ],
)
def test_a_search_of_a_study_that_cannot_be_made_is_refused(
    change: dict[str, Any], key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "lengths.yaml").write_text(yaml.safe_dump({**STUDY, **change}, sort_keys=False))
    status, _, err = command(["study", "lengths.yaml"], capsys)
    assert status == 2
    (line,) = err.splitlines()
    assert line.startswith(f"lightfed: error: {key}: ")


def test_a_trial_that_is_stopped_goes_on_with_the_bits_of_one_that_was_not(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real runs: the winner of the halvings has the metrics of the same run without a pause."""

    def run(
        runs: Sequence[Wanted],
        *,
        jobs: int,
        to: TextIO | None = None,
        after: Callable[[Wanted], None],
    ) -> int:
        for wanted in runs:
            main([*wanted.resumed(), "--trainer.enable_page", "false"])
            after(wanted)
        return 0

    monkeypatch.setattr(sweep, "run", run)
    # Both sides are the same method, so that every run is trained once.
    words = ["compare", "run.yaml", "run.yaml"]
    words += ["--set", "trainer.max_epochs=4", "--seeds", "0-1", "--metric", COLUMN]
    words += ["--tune", f"{LR}=log(0.001, 0.5)", "--trials", "4", "--trials-seed", "1", "--json"]
    status, out, _ = command(words, capsys)
    assert status == 0
    trials = json.loads(out)["trials"]
    stops = [trial["rounds"] for trial in trials if not trial["extended"]]
    assert [stops.count(rounds) for rounds in (1, 2, None)] == [4, 2, 2]

    chosen = next(trial for trial in trials if trial["chosen"])
    rate = chosen["values"][LR]
    words = ["fit", "--config=run.yaml", "--trainer.default_root_dir=whole"]
    words += ["--trainer.max_epochs=4", "--trainer.enable_page=false", "--model.seed=100"]
    main([*words, f"--model.optimizer.lr={rate}", "--data.validation=0.1"])
    (whole,) = (folder / "whole").glob("*/metrics.csv")
    assert read(whole.parent).final(f"validation/{COLUMN}") == chosen["value"]
    assert read(whole.parent).after(f"validation/{COLUMN}", 1) != chosen["value"]
