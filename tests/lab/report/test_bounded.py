"""Names with characters that no name needs, and folders that claim too much."""

import io
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from lightfed.cli.command_line import run_program
from lightfed.lab.drawing import files
from lightfed.lab.drawing.summary import new_console, print_line, print_table
from lightfed.lab.report.command import main
from lightfed.lab.results.run import MOST_COLUMNS, MOST_GROUPS, read
from lightfed.lab.studies import latency
from lightfed.utils.errors import UserError
from lightfed.utils.plain_text import all_plain, plain
from tests.lab.report.make_run import ENVIRONMENT, METRICS, write_run

# A bell, a change of direction, a private character, an end of a paragraph.
ODD = "one\x07two\u202ethree\ue000four\u2029five"
PLAIN = "onetwothreefour five"


def test_plain_texts_stay_and_others_lose_what_no_name_needs() -> None:
    for text in ("", "conv 3x3", "Größe", "精度", "1 ± 2", "a\u0301"):
        assert plain(text) == text
    assert plain(ODD) == PLAIN
    assert plain("a\tb\nc") == "a b c"
    assert all_plain({ODD: [ODD, 3, (ODD, None)]}) == {PLAIN: [PLAIN, 3, [PLAIN, None]]}


def odd_run(folder: Path) -> Path:
    groups = {ODD: 2, "b": 2}
    stated = {**ENVIRONMENT, "name": ODD, "algorithm": ODD, "dataset": ODD, "groups": groups}
    metrics = {name.replace("/a", f"/{ODD}"): v for name, v in METRICS.items()}
    rows = [
        (1, 0, ODD, 30, 0.7, 1.0, 250, 500, 1e9),
        (1, 1, ODD, 20, 0.5, 1.0, 250, 500, 1e9),
        (1, 2, "b", 10, 0.6, 1.0, 250, 500, 1e9),
        (1, 3, "b", 5, 0.4, 1.0, 250, 500, 1e9),
    ]
    return write_run(folder, environment=stated, metrics=metrics, evaluations=rows)


def is_plain(text: str) -> bool:
    return not {"\x07", "\u202e", "\ue000", "\u2029"} & set(text)


def test_pages_pictures_tables_and_the_terminal_are_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = odd_run(tmp_path / "odd")
    assert main([str(folder), "--format", "svg", "--table", "csv,latex"]) == 0
    assert is_plain(capsys.readouterr().out)
    written = [p for p in folder.rglob("*") if p.suffix in (".html", ".svg", ".csv", ".tex")]
    ours = [path for path in written if path.parent != folder or path.suffix == ".html"]
    assert len(ours) > 5
    for path in ours:
        text = path.read_text("utf-8")
        assert is_plain(text), path
        assert "\\u202e" not in text


def test_a_table_and_a_line_of_the_terminal_are_plain() -> None:
    console = new_console()
    console.file = io.StringIO()
    print_line(console, f"{ODD}\x1b[2J")
    print_table(console, pd.DataFrame({ODD: [f"{ODD}\x1b[2J"]}))
    assert is_plain(console.file.getvalue())
    assert "\x1b" not in console.file.getvalue()


def test_a_line_of_an_error_is_plain() -> None:
    assert is_plain(UserError("key", f"{ODD}\x1b[2J", "fix").line)
    assert "\x1b" not in UserError("key", "\x1b[2J", "fix").line


def test_a_table_of_figures_is_plain() -> None:
    assert files.table_text(pd.DataFrame({ODD: [ODD]}), "csv") == f"{PLAIN}\n{PLAIN}\n"


def test_too_many_columns_are_one_line(tmp_path: Path) -> None:
    metrics = METRICS | {f"personal/m{i}": (1, 1, 1) for i in range(MOST_COLUMNS)}
    with pytest.raises(UserError, match=f"columns, and reports show at most {MOST_COLUMNS}"):
        read(write_run(tmp_path / "wide", metrics=metrics))


def test_too_many_groups_are_one_line(tmp_path: Path) -> None:
    groups = {f"g{i}": 1 for i in range(MOST_GROUPS + 1)}
    with pytest.raises(UserError, match=f"at most {MOST_GROUPS}"):
        read(write_run(tmp_path / "wide", environment=ENVIRONMENT | {"groups": groups}))


@pytest.mark.parametrize(
    "words",
    [
        ["--servers", "1000000000"],
        ["--devices", "1000000000"],
        ["--servers", "10000", "--devices", "10000"],
        ["--waits", str([1] * 2000)],
    ],
)
def test_a_latency_of_too_many_is_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_program(partial(latency.main, ["--delay", "Exponential", "--delay.mean", "1", *words]))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lightfed: error: {words[0]}: ")
