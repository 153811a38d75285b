"""What a command printed is printed again only while nothing has changed that it depends on."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightfed.cli.known_output import said_again
from tests.lab.report.make_run import write_run

# A command that reads a run and writes a page, in a process without torch, as `lightfed` begins.
PROGRAM = """
import os, sys
from pathlib import Path
from lightfed.cli.known_output import said_again

runs = []

def command():
    runs.append(1)
    table = Path("runs/a/metrics.csv").read_text()
    Path("runs/compare").mkdir(exist_ok=True)
    Path("runs/compare/new").write_text(table)
    os.replace("runs/compare/new", "runs/compare/page")
    print("the table is", table, "without a line end", end="")
    exec(sys.argv[1])
    return int(sys.argv[2])

status = said_again(["compare", *sys.argv[3:]], Path("runs"), command)
print("", status, "ran" if runs else "said again")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "metrics.csv").write_text("1")
    return tmp_path


def said(*words: str, also: str = "", status: int = 0) -> str:
    command = [sys.executable, "-c", PROGRAM, also, str(status), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def write_other_table(runs: Path) -> None:
    (runs / "a" / "metrics.csv").write_text("2")


def add_table(runs: Path) -> None:
    (runs / "a" / "clients.csv").write_text("")


def add_run(runs: Path) -> None:
    (runs / "b").mkdir()


def train_beside(runs: Path) -> None:
    (runs / "c" / "checkpoint").write_text("")


def edit_page(runs: Path) -> None:
    (runs / "compare" / "page").write_text("edited")


def remove_page(runs: Path) -> None:
    (runs / "compare" / "page").unlink()


def damage_what_is_kept(runs: Path) -> None:
    (kept,) = (runs / ".known").iterdir()
    content = json.loads(kept.read_text())
    content["content"]["printed"] = "something else"
    kept.write_text(json.dumps(content))


def cut_what_is_kept(runs: Path) -> None:
    (kept,) = (runs / ".known").iterdir()
    kept.write_text(kept.read_text()[:40])


@pytest.mark.parametrize(
    "change",
    [
        write_other_table,
        add_table,
        add_run,
        train_beside,
        edit_page,
        remove_page,
        damage_what_is_kept,
        cut_what_is_kept,
    ],
)
def test_nothing_is_said_again_after_a_change(change: Callable[[Path], None], folder: Path) -> None:
    (folder / "runs" / "c").mkdir()
    first = said()
    assert first == "the table is 1 without a line end 0 ran\n"
    assert said() == first.replace("ran", "said again")

    change(folder / "runs")
    table = (folder / "runs" / "a" / "metrics.csv").read_text()
    assert said() == f"the table is {table} without a line end 0 ran\n"
    assert said().endswith("0 said again\n")
    assert (folder / "runs" / "compare" / "page").read_text() == table


def test_other_words_and_another_environment_are_another_question(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said("a").endswith("ran\n")
    assert said("b").endswith("ran\n")
    assert said("b").endswith("said again\n")
    assert said("a").endswith("ran\n")  # the page was that of the other one

    monkeypatch.setenv("COLUMNS", "77")  # tables are as wide as the terminal
    assert said("a").endswith("ran\n")
    monkeypatch.setenv("SETTING", "1")
    assert said("a").endswith("ran\n")
    assert said("a").endswith("said again\n")


@pytest.mark.parametrize(
    ("also", "status"),
    [
        ("", 1),
        ("print('a warning', file=sys.stderr)", 0),
        ("sys.modules['torch'] = sys", 0),
        ("Path('runs/a/metrics.csv').write_text('3')", 0),
        ("Path('runs/compare/page').unlink()", 0),
        ("Path('runs/large').write_bytes(bytes(5_000_000)); Path('runs/large').read_bytes()", 0),
    ],
    ids=["failed", "warned", "worked", "changed what it read", "left no page", "large file"],
)
def test_what_is_not_the_whole_answer_is_not_kept(also: str, status: int, folder: Path) -> None:
    assert said(also=also, status=status).endswith(f"{status} ran\n")
    assert said(also=also, status=status).endswith(f"{status} ran\n")


def test_without_a_folder_of_runs_and_in_a_process_with_torch_a_command_just_runs(
    tmp_path: Path,
) -> None:
    assert said_again(["compare"], tmp_path, lambda: 3) == 3
    assert said_again(["compare"], tmp_path / "none", lambda: 4) == 4
    assert not list(tmp_path.iterdir())


def test_a_comparison_is_answered_again_without_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a command does that has nothing to do is not worth the seconds of an import."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name)
    program = (
        "import sys; from lightfed.lab.compare_command import main; status = main(sys.argv[1:]); "
        "print(status, [m for m in ('pandas', 'scipy', 'rich', 'torch') if m in sys.modules])"
    )

    def compared() -> list[str]:
        command = [sys.executable, "-c", program, "runs/a", "runs/b"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    *answer, last = compared()
    assert last.startswith("0 ['pandas', ")
    assert compared() == [*answer, "0 []"]

    page = tmp_path / "runs" / "comparison" / "comparison.html"
    page.unlink()
    *again, last = compared()
    assert again == answer
    assert last.startswith("0 ['pandas', ")
    assert page.is_file()

    table = tmp_path / "runs" / "b" / "metrics.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines[:-1], ""]))
    assert compared()[:-1] != answer
