"""`lightfed compare --until decided`: batches of seeds, and what is refused."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightfed.cli.command_line import main
from lightfed.lab import sweep
from lightfed.lab.results.sequential import Design
from lightfed.lab.until import design_of
from lightfed.utils.errors import UserError
from tests.docs.test_json import check
from tests.lab.pretended import Pretended
from tests.lab.reading import check_once, read_all
from tests.lab.test_comparisons import BASE

COMMAND = ["compare", "run.yaml", "run.yaml", "--set-b", "model.local_epochs=2"]
COMMAND += ["--metric", "train_loss", "--until", "decided"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "check", check_once)
    (tmp_path / "run.yaml").write_text(BASE)
    return tmp_path


def pretend(monkeypatch: pytest.MonkeyPatch, gains: Sequence[float]) -> Pretended:
    pretended = Pretended({2: gains})
    monkeypatch.setattr(sweep, "run", pretended.run)
    return pretended


def command(words: Sequence[str], output: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The status of a command, and what it prints."""
    output.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    printed = output.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


CLEAR = [1.0 + 0.1 * (seed % 3) for seed in range(20)]
NONE = [(-1.0) ** seed for seed in range(20)]


def test_a_clear_case_ends_at_the_first_look_and_is_not_run_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = pretend(monkeypatch, CLEAR)
    status, out, _ = command(COMMAND, capsys)
    assert status == 0
    assert pretended.seeds == [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4]]
    (line,) = [line for line in out.splitlines() if "is better than" in line]
    assert "FedAvg (local_epochs=2) is better than FedAvg: train loss -1.08" in line
    assert "decided at look 1 of 5, p below 0.001 where 0.018 is needed" in line
    assert "looks after 5, 8, 12, 16 and 20 seeds, fixed in advance" in out
    assert "Pocock-like function of Lan and DeMets (1983)" in out
    page = (folder / "runs" / "compare" / "comparison.html").read_text()
    assert "decided at look 1 of 5" in page
    assert "fixed in advance" in page

    command([*COMMAND, "--table", "latex,csv,markdown", "--format", "pdf"], capsys)
    place = folder / "runs" / "compare"
    for name in ("claims", "comparison-table"):
        assert r"\toprule" in (place / f"{name}.tex").read_text()
        assert (place / f"{name}.md").is_file()
    heads, row = (place / "claims.csv").read_text().splitlines()
    assert heads == "method,against FedAvg,difference,p"
    # The interval is that of all looks.
    assert row.startswith('FedAvg (local_epochs=2),better,"-1.08 (')
    assert "below 0.001" in row
    assert line.split("train loss ")[1].split(",")[0] in row

    # Further runs that are there, such as those of a comparison of fixed seeds, change nothing.
    pretended.gains[2] = [-gain for gain in CLEAR]
    command([*COMMAND[:-2], "--seeds", "0-9"], capsys)
    assert len(pretended.seeds) == 2
    status, again, _ = command(COMMAND, capsys)
    assert again == out
    assert len(pretended.seeds) == 2


def test_a_null_case_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = pretend(monkeypatch, NONE)
    status, out, err = command([*COMMAND, "--json"], capsys)
    assert status == 0
    found = json.loads(out)
    check(found, "compare")
    assert [sorted(set(seeds)) for seeds in pretended.seeds] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    # The looks are said before the first run.
    assert err.startswith("looks after 5, 8, 12, 16 and 20 seeds, fixed in advance; ")
    assert "look 1 of 5: -0.2 (" in err
    assert "it goes on" in err

    assert found["verdict"] == "not shown"
    assert found["seeds"] == list(range(8))
    sequential = found["sequential"]
    assert (sequential["look"], sequential["ended"]) == (2, "futile")
    assert sequential["looks"] == [5, 8, 12, 16, 20]
    assert sequential["predictive"] < sequential["futility"] == 0.2
    assert sequential["boundaries"] == list(Design((5, 8, 12, 16, 20)).boundaries())
    assert 0.05 < sequential["overall_p"] <= 1.0
    # The interval of all looks is wider than that of one.
    row = found["rows"]["train_loss"]
    assert sequential["low"] < row["low"] < row["high"] < sequential["high"]
    assert found["excluded"]["gain"] == pytest.approx(-sequential["low"])

    _, out, _ = command(COMMAND, capsys)
    (line,) = [line for line in out.splitlines() if line.startswith("no difference is shown")]
    assert "given up at look 2 of 5, p 1.000 where 0.012 is needed" in line
    assert "a gain above" in line


def test_the_last_look_ends_and_own_looks_and_seeds_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = pretend(monkeypatch, [0.0, 0.0, 0.0, 0.1, 0.12, 0.1, -0.5])
    words = [*COMMAND, "--looks", "2,4", "--seeds", "3-6", "--json"]
    status, out, _ = command(words, capsys)
    assert status == 0
    assert pretended.seeds == [[3, 3, 4, 4], [5, 5, 6, 6]]
    found = json.loads(out)["sequential"]
    assert (found["looks"], found["look"], found["ended"]) == ([2, 4], 2, "last look")
    assert found["predictive"] is None


def test_identical_runs_end_at_the_first_look(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = pretend(monkeypatch, [0.0] * 20)
    _, out, _ = command([*COMMAND, "--json"], capsys)
    found = json.loads(out)
    assert len(pretended.seeds) == 1
    assert (found["verdict"], found["sequential"]["ended"]) == ("identical runs", "identical runs")
    _, out, _ = command(COMMAND, capsys)
    assert "identical runs: FedAvg (local_epochs=2) and FedAvg have the same metrics" in out
    assert "nan" not in out


def test_a_method_that_failed_in_some_seeds_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = pretend(monkeypatch, CLEAR)
    pretended.failing = (1, 3)
    status, out, err = command(COMMAND, capsys)
    assert status == 2
    assert out == ""
    line = err.splitlines()[-1]
    assert line.startswith("lightfed: error: runs: failed: FedAvg (local_epochs=2) in seeds ")
    assert "seeds 1 3;" in line

    # What has finished is kept.
    pretended.failing = ()
    command(COMMAND, capsys)
    assert pretended.seeds[1] == [1, 3]


def test_a_seed_without_a_finite_value_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, [*CLEAR[:2], float("nan"), *CLEAR[3:]])
    status, _, err = command(COMMAND, capsys)
    assert status == 2
    line = err.splitlines()[-1]
    assert "--until: no finite train_loss: FedAvg (local_epochs=2) in seed 2;" in line


def test_a_metric_that_no_run_has_ends_a_sequential_comparison_after_its_first_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = pretend(monkeypatch, CLEAR)
    words = ["global/f1" if word == "train_loss" else word for word in COMMAND]
    for _ in range(2):
        status, out, err = command(words, capsys)
        assert (status, out) == (2, "")
        line = err.splitlines()[-1]
        assert line.startswith("lightfed: error: --metric: global/f1, which some runs do not have")
        # The second time, no run is needed to find that out.
        assert len(list((folder / "runs").glob("*/metrics.csv"))) == 1
    assert len(pretended.seeds) == 1


def test_a_batch_is_submitted_for_each_look(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends after it; given again, it takes the look and submits the next batch."""
    pretended = pretend(monkeypatch, NONE)
    batches: list[int] = []

    def submit(file: Path, lines: Sequence[int], further: Any, *, jobs: int | None) -> int:
        batches.append(len(lines))
        wanted = read_all(file.read_text().splitlines())
        pretended.run(wanted, jobs=1)  # as the array does, after this command
        return 0

    monkeypatch.setattr(sweep, "submit", submit)
    words = [*COMMAND, "--slurm"]
    monkeypatch.setattr(sys, "argv", ["lightfed", *words])
    for number in (10, 6):
        status, out, _ = command(words, capsys)
        assert status == 0
        assert batches[-1] == number
        assert out.startswith("when the array has ended: lightfed compare run.yaml")
    _, out, _ = command(words, capsys)
    assert "given up at look 2 of 5" in out
    assert batches == [10, 6]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--most", "20", "--looks", "5,8,12"], "--looks: 5,8,12, and --most is 20; end with 20"),
        (["--looks", "1,5"], "--looks: 1,5; begin with 2 seeds or more"),
        (["--looks", "5,5,8"], "--looks: 5,5,8; give ascending numbers"),
        (["--looks", "5;8"], "argument --looks: '5;8' is not like 5,8,12,16,20"),
        (["--most", "1"], "--most: 1 seed; give 2 or more: one has no spread"),
        (["--most", "101"], "--most: 101 seeds; give at most 100"),
        (["--most", "10", "--seeds", "0-4"], "--seeds: 5 seeds, and the last look has 10"),
    ],
)
def test_looks_that_do_not_fit_are_refused(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = command([*COMMAND, *words], capsys)
    assert status == 2
    (line,) = err.splitlines()
    assert said in line
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    "words", [["--table", "latex"], ["--format", "pdf"], ["--output", "somewhere"]]
)
def test_files_are_not_silently_left_out_beside_json(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = command([*COMMAND, "--json", *words], capsys)
    assert status == 2
    (line,) = err.splitlines()
    assert f"{words[0]}: given beside --json, with which no page and no files" in line
    if words[0] != "--output":
        status, _, err = command(["study", "quickstart", "--markdown", *words], capsys)
        assert status == 2
        assert f"{words[0]}: given beside --markdown" in err


def test_options_of_looks_need_until_and_configurations(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = command([*COMMAND[:-2], "--most", "20"], capsys)
    assert status == 2
    assert "--most: given without --until decided; " in err

    (folder / "runs").mkdir()
    status, _, err = command(["compare", "runs", "--until", "decided"], capsys)
    assert status == 2
    (line,) = err.splitlines()
    assert line.startswith("lightfed: error: --until: the runs are there already; leave it out")


def test_the_seeds_of_a_design() -> None:
    found = design_of("decided", None, None, None)
    assert found == (Design((5, 8, 12, 16, 20)), list(range(20)))
    found = design_of("decided", None, None, [7, 8, 9, 3])
    assert found == (Design((3, 4)), [7, 8, 9, 3])
    assert design_of(None, None, None, [1]) is None
    with pytest.raises(UserError, match="at most 100"):
        design_of("decided", None, [5, 1000], None)
