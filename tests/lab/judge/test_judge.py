"""`lightfed judge`: what is refused, what is compared, and what it says."""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest

from lightfed.cli.wanted import Wanted
from lightfed.lab import sweep
from lightfed.lab.judge import command as judge_command
from lightfed.lab.judge import conformity
from lightfed.lab.judge.budget import ENDED
from lightfed.lab.judge.conformity import NotConforming
from tests.docs.test_json import check
from tests.lab.reading import check_once
from tests.lab.report.make_run import write_run
from tests.lab.test_until import command

METHODS = "tests.lab.judge.methods"
ALIKE = f"{METHODS}.Alike"
COMMAND = ["judge", ALIKE]


class Pretended:
    """Runs that are written at once instead of being trained.

    Attributes:
        batches: The names of the methods and the seeds of each batch.
        gains: What `Alike` gains over others, by seed.
        status: The status of every further batch, if it is not 0: nothing is run.
    """

    def __init__(self, gains: Sequence[float]) -> None:
        self.batches: list[list[tuple[str, int]]] = []
        self.gains = gains
        self.status = 0

    def run(
        self,
        runs: Sequence[Wanted],
        *,
        jobs: int,
        to: TextIO | None = None,
        after: Callable[[Wanted], None] | None = None,
    ) -> int:
        """Stand for `sweep.run`."""
        if self.status:
            return self.status
        batch = []
        for wanted in runs:
            seed = wanted.values["model.seed"]
            method = str(wanted.values["model.algorithm.class_path"])
            rate = wanted.values["model.optimizer.init_args.lr"]
            batch.append((method.rpartition(".")[2], seed))
            # The same for each seed of the search, but for the rate: .3 is the best.
            accuracy = 0.8 + 0.001 * (seed % 7) - 0.1 * abs(rate - 0.3)
            if "Alike" in method and seed < len(self.gains):
                accuracy += self.gains[seed]
            environment = {
                "name": wanted.name,
                "config": wanted.digest,
                "algorithm": method.rpartition(".")[2],
                "dataset": "Digits",
                "clients": 20,
                "groups": {"0": 20},
                "rounds": 1,
                "seed": seed,
                "finished": {"rounds": 1, "limits": dict(wanted.limits)},
                "experiment": {"digest": method, "settings": {"model.algorithm": method}},
            }
            metrics = {
                "train_loss": (1 - accuracy,),
                "global/accuracy": (accuracy,),
                "validation/global/accuracy": (accuracy,),
                "bytes_up": (1,),
                "bytes_down": (1,),
            }
            write_run(
                wanted.root / f"{wanted.name}-{wanted.digest[:8]}-{seed}",
                metrics=metrics,
                environment=environment,
                config=None,
                evaluations=None,
                counts=None,
            )
        self.batches.append(batch)
        return 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "check", check_once)
    return tmp_path


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kit passes at once; the classes that it was asked for."""
    asked: list[str] = []
    monkeypatch.setattr(conformity, "check_conformity", lambda one, log: asked.append(one.path))
    return asked


def pretend(monkeypatch: pytest.MonkeyPatch, gains: Sequence[float]) -> Pretended:
    pretended = Pretended(gains)
    monkeypatch.setattr(sweep, "run", pretended.run)
    return pretended


CLEAR = [0.03 + 0.001 * (seed % 3) for seed in range(20)]
NONE = [0.01 * (-1.0) ** seed for seed in range(20)]


def test_a_clear_gain_is_found_and_runs_are_kept(
    folder: Path,
    passing: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretended = pretend(monkeypatch, CLEAR)
    status, out, err = command([*COMMAND, "--json"], capsys)
    assert status == 0
    # The budget is said before anything is run.
    assert err.startswith("budget: 10 CPU minutes; on digits a search of 4 runs and at most 20 ")

    found = json.loads(out)
    check(found, "judge")
    assert found["verdict"] == "better"
    assert found["candidate"]["class"] == ALIKE
    assert found["against"]["class"] == "lightfed.algorithms.fedavg.FedAvg"
    assert found["conformance"] == {"passed": True, "ranks": [1, 2], "fault": None}
    (comparison,) = found["comparisons"]
    assert comparison["on"] == "digits"
    assert comparison["seeds"] == [0, 1, 2, 3, 4]
    assert comparison["sequential"]["ended"] == "decided"
    assert comparison["rows"]["global/accuracy"]["difference"] == pytest.approx(0.0308)
    assert [row["chosen"] for row in comparison["search"]] == ["0.3", "0.3"]
    search, compared = pretended.batches
    assert len(search) == 2 * 4
    assert {seed for _, seed in search} == {100}
    assert len(compared) == 2 * 5

    place = folder / "runs" / "judge" / "Alike-against-FedAvg"
    assert json.loads((place / "judge.json").read_text()) == found
    page = (place / "comparison.html").read_text()
    assert "Alike is better than FedAvg: global accuracy +3.08 points" in page
    assert "the same bits on 1 and 2 ranks" in page

    # Again, with nothing to run, and with files for a paper.
    words = [*COMMAND, "--table", "latex,csv,markdown", "--format", "pdf,svg"]
    status, out, _ = command(words, capsys)
    assert status == 0
    assert len(pretended.batches) == 2
    assert passing == [ALIKE]
    assert "decided at look 1 of 5" in out
    assert "page: runs/judge/Alike-against-FedAvg/comparison.html" in out
    for name in ("claims", "comparison-table", "comparison-differences", "search"):
        assert r"\toprule" in (place / f"{name}.tex").read_text()
        assert (place / f"{name}.csv").is_file()
        assert (place / f"{name}.md").is_file()
    # Of the compared seeds alone.
    (heads, *finals) = (place / "comparison-table.csv").read_text().splitlines()
    assert heads.startswith("run,n,seed,")
    assert [row.split(",")[1:3] for row in finals] == [["5", "0-4"], ["5", "0-4"]]
    rows = (place / "claims.csv").read_text().splitlines()
    assert rows[0] == "data,Alike against FedAvg,difference,p"
    assert rows[1].startswith('digits,better,"+3.08 points (')

    # On seeds that nothing was chosen by.
    status, out, _ = command([*COMMAND, "--seeds", "1000-1004", "--json"], capsys)
    assert json.loads(out)["comparisons"][0]["seeds"] == [1000, 1001, 1002]
    assert {seed for _, seed in pretended.batches.pop()} == {1000, 1001, 1002}

    # Another challenger of the same rival.
    status, out, _ = command(["judge", f"{METHODS}.OfRanks", "--json"], capsys)
    assert status == 0
    names = {name for batch in pretended.batches[2:] for name, _ in batch}
    assert names == {"OfRanks"}
    assert json.loads(out)["verdict"] == "identical runs"


def test_other_code_is_another_candidate(
    folder: Path,
    passing: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretended = pretend(monkeypatch, CLEAR)
    monkeypatch.syspath_prepend(str(folder))
    source = f"from {METHODS} import Alike\n\nclass AlikeAgain(Alike):\n    pass\n"
    (folder / "own_method.py").write_text(source)
    command(["judge", "own_method.AlikeAgain"], capsys)
    before = len(pretended.batches)
    command(["judge", "own_method.AlikeAgain"], capsys)
    assert len(pretended.batches) == before
    (folder / "own_method.py").write_text(f"{source}    beta = 0.5\n")
    command(["judge", "own_method.AlikeAgain"], capsys)
    assert passing == ["own_method.AlikeAgain"] * 2
    names = {name for batch in pretended.batches[before:] for name, _ in batch}
    assert names == {"AlikeAgain"}


def test_a_null_case_is_given_up_and_says_what_is_excluded(
    folder: Path,
    passing: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend(monkeypatch, NONE)
    status, out, _ = command([*COMMAND, "--against", "FedProx0"], capsys)
    assert status == 2
    status, out, _ = command(COMMAND, capsys)
    assert status == 0
    (line,) = [line for line in out.splitlines() if line.startswith("no difference is shown")]
    assert "given up at look 2 of 5" in line
    assert "a gain above" in line
    assert "0.0 of 10 CPU minutes" in out


def test_several_data_sets_share_the_error(
    folder: Path,
    passing: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend(monkeypatch, CLEAR)
    (folder / "data" / "FashionMNIST" / "raw").mkdir(parents=True)
    words = [*COMMAND, "--on", "digits,fashion", "--root", "data"]
    status, out, _ = command([*words, "--json"], capsys)
    assert status == 0
    found = json.loads(out)
    check(found, "judge")
    assert [comparison["on"] for comparison in found["comparisons"]] == ["digits", "fashion"]
    assert [c["sequential"]["level"] for c in found["comparisons"]] == [0.025, 0.025]

    _, out, _ = command(words, capsys)
    flat = " ".join(out.split())
    assert "2 data sets, corrected together by Bonferroni" in flat
    assert "on digits: Alike is better than FedAvg" in flat
    assert "on fashion: Alike is better than FedAvg" in flat


def test_a_budget_that_ends_leaves_what_is_known(
    folder: Path,
    passing: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After the first look every further run would cost too much."""
    pretended = pretend(monkeypatch, [0.01 * (-1.0) ** seed + 0.004 for seed in range(20)])
    spent = [0.0]
    monkeypatch.setattr(judge_command.Budget, "spent", property(lambda self: spent[0]))
    run = pretended.run

    def costly(runs: Sequence[Wanted], **options: Any) -> int:
        spent[0] += 20.0 * len(runs)
        return run(runs, **options)

    monkeypatch.setattr(sweep, "run", costly)
    status, out, _ = command([*COMMAND, "--json", "--minutes", "7"], capsys)
    assert status == 0
    found = json.loads(out)
    (comparison,) = found["comparisons"]
    assert comparison["sequential"]["ended"] == "budget"
    assert comparison["sequential"]["look"] == 1
    assert comparison["verdict"] == found["verdict"] == "not shown"
    assert found["minutes"] == {"budget": 7.0, "spent": 6.0}

    # With what is kept, another budget goes on from there.
    status, out, _ = command([*COMMAND, "--minutes", "7"], capsys)
    assert "the budget ended after look 1 of 5" not in out

    # It ended during the search, or before the first look.
    spent[0] = 0.0
    words = ["judge", f"{METHODS}.OfRanks", "--minutes", "1"]
    status, _, err = command(words, capsys)
    assert status == 2
    line = err.splitlines()[-1]
    assert "--minutes: 1, which ended before the first look; give more" in line
    pretended.status = ENDED
    status, _, err = command(["judge", f"{METHODS}.Raising", "--minutes", "3"], capsys)
    assert status == 2
    assert "--minutes: 3, which ended before the first look" in err.splitlines()[-1]


def test_a_method_that_fails_in_the_kit_gets_no_verdict(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = pretend(monkeypatch, CLEAR)

    def fail(candidate: Any, log: Path) -> None:
        raise NotConforming("conformance of Alike", "rows have different bits", "see the log")

    monkeypatch.setattr(conformity, "check_conformity", fail)
    status, out, err = command([*COMMAND, "--json"], capsys)
    assert status == 3
    assert err.splitlines()[-1].startswith("lightfed: error: conformance of Alike: rows have ")
    found = json.loads(out)
    check(found, "judge")
    assert (found["verdict"], found["comparisons"]) == (None, [])
    fault = "rows have different bits"
    assert found["conformance"] == {"passed": False, "ranks": [1, 2], "fault": fault}
    assert pretended.batches == []
    status, out, _ = command(COMMAND, capsys)
    assert (status, out) == (3, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.Method"], "judge: there is no module 'nowhere'; give MODULE.Class"),
        ([f"{METHODS}.Alikee"], "has no 'Alikee'; name Alike or OfRanks or "),
        ([f"{METHODS}.Plain"], f"judge: {METHODS}.Plain is no lightfed.Algorithm; "),
        ([f"{METHODS}.Needing"], f"{METHODS}.Needing needs beta and gamma; give each a default"),
        ([f"{METHODS}.Unfinished"], f"{METHODS}.Unfinished has no round; write round"),
        (["FedAwg"], "judge: lightfed has no method 'FedAwg'; did you mean FedAvg?"),
        (["broken_method.Method"], "judge: ZeroDivisionError: division by zero"),
        (["lacking_method.Method"], "judge: ModuleNotFoundError: No module named 'absent_one'"),
        (["leaving_method.Method"], "judge: SystemExit: 0"),
        (["a-b.Method"], "judge: 'a-b.Method' is no path of a class"),
        (["FedAvg"], "--against: the method that is judged; name another one"),
        ([ALIKE, "--against", "QFFL"], "--against: QFFL needs q"),
        ([ALIKE, "--on", "letters"], "--on: no data set 'letters'; name digits or fashion"),
        ([ALIKE, "--on", "fashion"], "--on: fashion reads files, and --root is not given; name "),
        ([ALIKE, "--on", "fashion", "--root", "x"], "--root: there is no x/FashionMNIST/raw"),
        ([ALIKE, "--root", "x"], "--root: given, and digits needs no files; leave it out"),
        ([ALIKE, "--minutes", "0.2"], "--minutes: 0.2, and the first look needs about 0.6"),
        ([ALIKE, "--minutes", "soon"], "argument --minutes: 'soon' is no number of minutes"),
        ([ALIKE, "--minutes", "nan"], "argument --minutes: 'nan' is no number of minutes"),
        ([ALIKE, "--most", "1"], "--most: 1 seed; give 2 or more: one has no spread"),
        ([ALIKE, "--most", "101"], "--most: 101 seeds; give at most 100"),
        ([ALIKE, "--most", "9", "--seeds", "7-9"], "--seeds: 3 seeds, and the last look has 9"),
        ([ALIKE, "--seeds", "99-118"], "--tune-seed: a compared seed; give another"),
        ([ALIKE, "--tune-seed", "0"], "--tune-seed: a compared seed; give another"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_one_line(
    words: list[str],
    said: str,
    folder: Path,
    passing: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretended = pretend(monkeypatch, CLEAR)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "broken_method.py").write_text("1 / 0\n")
    (folder / "lacking_method.py").write_text("import absent_one\n")
    (folder / "leaving_method.py").write_text("import sys\n\nsys.exit(0)\n")
    status, out, err = command(["judge", *words], capsys)
    assert (status, out) == (2, "")
    errors = [line for line in err.splitlines() if not line.startswith("budget: ")]
    (line,) = errors
    assert line.startswith("lightfed: error: ")
    assert said in line
    assert pretended.batches == []


def test_the_commands_of_the_page_have_these_options() -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto" / "judge.md").read_text()
    commands = re.findall(r"lightfed judge (mine\.[^\n`#>]+)", page)
    assert len(commands) >= 6
    for words in commands:
        asked = judge_command._parser().parse_args(shlex.split(words))
        assert asked.method.startswith("mine.")
    for status in ("0", "2", "3"):
        assert f"| {status} | " in page


def test_a_namesake_is_told_apart(
    folder: Path,
    passing: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend(monkeypatch, CLEAR)
    status, out, _ = command(["judge", f"{METHODS}.Namesake", "--json"], capsys)
    assert status == 0
    found = json.loads(out)
    assert found["candidate"]["name"] == f"{METHODS}.Namesake"
    assert found["against"]["name"] == "lightfed.algorithms.fedavg.FedAvg"
