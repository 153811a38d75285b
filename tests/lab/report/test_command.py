"""`lightfed report`, and what the package may import."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

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
    assert main(["runs/p", "runs/q"]) == 0
    assert capsys.readouterr().out.endswith("page: runs/comparison/comparison.html\n")
    assert not (tmp_path / "runs" / "p" / "index.html").exists()


def test_compare_takes_all_runs_below_a_folder(tmp_path: Path) -> None:
    _two(tmp_path / "runs")
    (tmp_path / "runs" / "no run").mkdir()
    output = tmp_path / "there"
    assert main(["--compare", "--group", "--output", str(output), str(tmp_path / "runs")]) == 0
    page = (output / "comparison.html").read_text()
    assert "Comparison of 2 runs" in page


def test_a_target_reaches_the_table(tmp_path: Path) -> None:
    _two(tmp_path)
    assert main(["--compare", str(tmp_path), "--target", "0.625"]) == 0
    page = (tmp_path / "comparison" / "comparison.html").read_text()
    assert "to 62.50 % global accuracy" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "report: there is no folder nowhere; name the folder of a run"),
        (["empty"], "report: empty holds no metrics.csv; name the folder of a run"),
        (["p", "nowhere"], "report: there is no folder nowhere"),
        (["--compare", "empty"], "report: a comparison of 0 runs; skipped empty"),
        (["p", "q", "--target", "80"], "--target: 80; give an accuracy in 0..1, such as 0.8"),
        (["p", "q", "--target", "0"], "--target: 0; give an accuracy in 0..1, such as 0.8"),
        (["p", "q", "--target", "nan"], "--target: nan; give an accuracy in 0..1, such as 0.8"),
    ],
)
def test_what_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    _two(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        main(words)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], "the following arguments are required: RUN"),
        (["p", "--nope"], "unrecognized arguments: --nope"),
        (["p", "--format", "gif"], "argument --format: 'gif'"),
        (["p", "--target", "high"], "argument --target: invalid float value: 'high'"),
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


def test_a_report_needs_no_torch_and_no_global_pyplot(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    program = (
        "import sys; from lightfed.lab.report.command import main; "
        "slow = [m for m in sys.modules if m.startswith('matplotlib')]; main(sys.argv[1:]); "
        "print(slow, [m for m in ('torch', 'matplotlib.pyplot', 'lightning') if m in sys.modules])"
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
    assert main([str(path) for path in sorted(tmp_path.iterdir())]) == 0
    printed = capsys.readouterr().out
    skipped = [line.split(":")[0] for line in printed.splitlines() if line.startswith("skipped")]
    names = ("bare", "notes.txt", "started")
    assert skipped == [f"skipped {tmp_path / name}" for name in names]
    assert "Skipped" in (tmp_path / "comparison" / "comparison.html").read_text()


def test_the_only_run_of_many_folders_gets_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare").mkdir()
    run = write_run(tmp_path / "run")
    assert main([str(tmp_path / "bare"), str(run)]) == 0
    assert f"page: {run / 'index.html'}" in capsys.readouterr().out


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
    assert main([*_two(tmp_path), "--output", str(output), "--table", "csv"]) == 0
    table = pd.read_csv(output / "clients.csv")
    assert list(table.columns[:4]) == ["run", "experiment", "method", "seed"]
    assert len(table) == 16
    courses = pd.read_csv(output / "comparison.csv")
    assert set(courses["chart"]) == {"Global accuracy", "Global accuracy for the bytes sent"}
    printed = pd.read_csv(output / "comparison-table.csv")  # that of the page
    assert len(printed) == 1
    assert "%" in printed["global accuracy (95 % interval)"][0]
