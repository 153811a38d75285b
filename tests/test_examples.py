"""The examples run as they are, in an empty folder; the how-to of sweeps, too."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from lightfed.cli import command_line
from tests.small import quiet

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    quiet()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    return tmp_path


def test_a_script_has_its_own_algorithm_data_and_loggers(folder: Path) -> None:
    names = runpy.run_path(str(EXAMPLES / "four_loggers.py"))
    assert names["trainer"].results.rounds["global/accuracy"][3] > 0.5
    (run,) = folder.glob("runs/*/index.html")
    assert "FedAvgM on flowers.csv" in run.read_text()
    assert list(folder.glob("logs/*/*/events.*"))
    (table,) = folder.glob("logs/*/*/metrics.csv")
    assert "global/accuracy" in table.read_text()
    for hyperparameters in folder.glob("logs/*/*/hparams.yaml"):
        assert "beta: 0.5" in hyperparameters.read_text()


def test_the_commands_of_the_how_tos_fit(folder: Path) -> None:
    """Their words are parsed; nothing is trained."""
    pages = [(page, page.read_text()) for page in sorted((ROOT / "docs/howto").glob("*.md"))]
    blocks = [block for _, text in pages for block in re.findall(r"```sh\n(.*?)```", text, re.S)]
    lines = [line for block in blocks for line in block.splitlines()]
    fits = [
        shlex.split(line, comments=True)[1:] for line in lines if line.startswith("lightfed fit")
    ]
    named = [
        found[1] for _, text in pages if (found := re.search(r"algorithm: (\{class_.*?\}\})", text))
    ]
    fits += [
        ["fit", "--config=lightfed:fedavg/digits", f"--model.algorithm={one}"] for one in named
    ]
    assert len(named) == 1
    assert len(fits) >= 5
    for words in fits:
        with pytest.raises(SystemExit, match="0"):
            command_line.main([*words, "--print_config"])


@pytest.mark.parametrize("page", sorted((ROOT / "docs/papers").glob("*.md")), ids=lambda p: p.stem)
def test_a_papers_page_names_files_that_exist(page: Path) -> None:
    text = page.read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| `[^`]+\.(yaml|sweep)`", line)]
    names = [name for row in rows for name in re.findall(r"`([^`]+\.(?:yaml|sweep))`", row)]
    assert len(names) >= 4
    folders = (ROOT / "configs" / page.stem, ROOT / "configs")
    assert [name for name in names if not any(list(at.glob(name)) for at in folders)] == []
