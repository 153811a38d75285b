"""The tutorial's files and commands, in order, in an empty folder."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightfed.cli import command_line

TEXT = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()


def test_the_tutorial_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # as the command does
    blocks = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
    for language, block in blocks:
        named = re.match(r"# (mine\.\w+)\n", block)
        if named:
            Path(named[1]).write_text(block)
        elif language == "sh":
            for line in block.splitlines():
                run(shlex.split(line)[1:])
        else:
            names: dict[str, Any] = {}
            exec(block, names)
            data = names["data"]
            data.prepare(clients=4, seed=0, device=torch.device("cpu"))
            assert len(data.partition_.train(0)) > 0
    assert "page: runs/mine/index.html" in capsys.readouterr().out
    assert len(Path("runs/mine/metrics.csv").read_text().splitlines()) == 4
    assert list(Path("tensorboard").rglob("events.*"))


def run(words: list[str]) -> None:
    """A command that is expected to succeed."""
    if words[0] == "fit":  # the last command makes a page
        words = [*words, "--trainer.limit_train_batches=1", "--trainer.enable_page=false"]
    if words[0] in ("configs", "report"):
        with pytest.raises(SystemExit, match="0"):
            command_line.main(words)
    else:
        command_line.main(words)
