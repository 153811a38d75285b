"""`lightfed report`, `lightfed compare` of run folders, and what the package may import."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from lightfed.lab.compare import main as compare_runs
from lightfed.lab.report.command import main
from lightfed.lab.report.comparison import compare
from lightfed.utils.errors import UserError
from tests.lab.report.make_run import ENVIRONMENT, write_run


def _two(root: Path) -> list[str]:
    stated = [{**ENVIRONMENT, "name": name, "seed": seed} for seed, name in enumerate("pq")]
    return [str(write_run(root / run["name"], environment=run)) for run in stated]


def test_two_folders_are_compared_beside_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _two(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert compare_runs(["runs/p", "runs/q"]) == 0
    assert capsys.readouterr().out.endswith("page: runs/comparison/comparison.html\n")
    assert not (tmp_path / "runs" / "p" / "index.html").exists()


def test_compare_takes_all_runs_below_a_folder(tmp_path: Path) -> None:
    _two(tmp_path / "runs")
    (tmp_path / "runs" / "no run").mkdir()
    output = tmp_path / "there"
    assert compare_runs(["--group", "--output", str(output), str(tmp_path / "runs")]) == 0
    page = (output / "comparison.html").read_text()
    assert "Comparison of 2 runs" in page


def test_a_target_reaches_the_table(tmp_path: Path) -> None:
    _two(tmp_path)
    assert compare_runs([str(tmp_path), "--target", "0.625"]) == 0
    page = (tmp_path / "comparison" / "comparison.html").read_text()
    assert "to 62.50 % global accuracy" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "nowhere"], "report: there is no folder nowhere; name the folder of a run"),
        (["report", "empty"], "report: empty holds no metrics.csv; name the folder of a run"),
        (
            ["report", "p", "q"],
            "report: 2 folders, but a page shows one run; compare them: lightfed compare p q",
        ),
        (["compare", "p"], "compare: a comparison of 1 run; name two or more runs"),
        (["compare", "p", "nowhere"], "compare: there is no folder nowhere"),
        (["compare", "p", "a.yaml"], "compare: a.yaml is a configuration, and others are folders"),
        (
            ["compare", "a.yaml"],
            "compare: 1 configuration; name two or more configurations, or run folders",
        ),
        (["compare", "empty"], "compare: a comparison of 0 runs; skipped empty"),
        (["compare", "p", "q", "--seeds", "0-1"], "--seeds: the runs are there already; leave it"),
        (["compare", "p", "q", "--slurm"], "--slurm: the runs are there already; leave it out"),
        (["compare", "a.yaml", "a.yaml", "--std"], "--std: given for configurations; leave"),
        (["compare", "p", "q", "--json"], "--json: runs of 1 experiment; name the runs of two"),
        (["compare", "p", "q", "--metric", "x"], "--metric: x, which some runs do not have"),
        *(
            (["compare", "p", "q", "--target", value], f"--target: {value}; give an accuracy in 0")
            for value in ("80", "0", "nan")
        ),
    ],
)
def test_what_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    _two(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        {"report": main, "compare": compare_runs}[words[0]](words[1:])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], "the following arguments are required: RUN"),
        (["p", "--nope"], "unrecognized arguments: --nope"),
        (["p", "--format", "gif"], "argument --format: 'gif'"),
        (["p", "--target", "0.8"], "unrecognized arguments: --target"),
    ],
)
def test_a_wrong_command_line_is_one_line_too(
    words: list[str], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as caught:
        main(words)
    assert str(caught.value).startswith(f"report: {found}")
    assert str(caught.value).endswith("; see lightfed report --help")
    assert capsys.readouterr().err == ""


def test_a_report_imports_nothing_that_takes_long(tmp_path: Path) -> None:
    """An interval is of several runs; the page of one needs no quantiles."""
    folder = write_run(tmp_path / "run")
    heavy = ("torch", "lightning", "matplotlib.pyplot", "altair", "scipy.special", "jsonargparse")
    program = (
        "import sys; from lightfed.lab.report.command import main; "
        "slow = [m for m in sys.modules if m.startswith('matplotlib')]; main(sys.argv[1:]); "
        f"print(slow, [m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[] []"


def test_what_is_no_finished_run_is_skipped_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = _two(tmp_path)
    compare([Path(folder) for folder in folders])
    for name, header in (("started", "round,train_loss"), ("cut", "round,train_loss\n1,2.0\n2,")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(header)
    (tmp_path / "bare").mkdir()
    (tmp_path / "notes.txt").write_text("")
    capsys.readouterr()
    assert compare_runs([str(path) for path in sorted(tmp_path.iterdir())]) == 0
    printed = capsys.readouterr().out
    skipped = [line.split(":")[0] for line in printed.splitlines() if line.startswith("skipped")]
    names = ("bare", "notes.txt", "started")
    assert skipped == [f"skipped {tmp_path / name}" for name in names]
    assert "Skipped" in (tmp_path / "comparison" / "comparison.html").read_text()


def test_figures_and_tables_are_written_as_files(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert main([str(run), "--format", "svg,pdf,png", "--table", "csv,latex"]) == 0
    assert (run / "index.html").is_file()
    begins = {"svg": b"<svg", "pdf": b"%PDF", "png": b"\x89PNG"}
    for kind, begin in begins.items():
        for name in ("curves", "clients", "partition"):
            assert (run / "report" / f"{name}.{kind}").read_bytes().startswith(begin)
    assert r"65.00 \%" in (run / "report" / "final.tex").read_text()
    curves = pd.read_csv(run / "report" / "curves.csv")
    assert curves[curves["series"] == "global"]["accuracy"].dropna().tolist() == [0.5, 0.75] * 2


def test_the_clients_of_a_comparison_are_one_tidy_table(tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert compare_runs([*_two(tmp_path), "--output", str(output), "--table", "csv"]) == 0
    table = pd.read_csv(output / "clients.csv")
    assert list(table.columns[:4]) == ["run", "experiment", "method", "seed"]
    assert len(table) == 16
    courses = pd.read_csv(output / "comparison.csv")
    assert set(courses["chart"]) == {"Global accuracy", "Global accuracy vs. bytes sent"}
    printed = pd.read_csv(output / "comparison-table.csv")  # that of the page
    assert len(printed) == 1
    assert "%" in printed["global accuracy (95 % interval)"][0]
