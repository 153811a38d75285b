"""The line of a round says what metrics.csv says of it, and a narrow terminal shows all of it."""

import csv
import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from rich.console import Console
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.engine.progress import RoundProgressBar
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from tests.small import fit, random_data

NUMBER = r"([\d.e+-]+)"


def run(bar: RoundProgressBar, folder: Path, *others: Callback, **flags: Any) -> None:
    groups = [ClientGroup(3, partial(MLP, hidden=(5,)))]
    federation = Federation(FedAvg(), groups, optimizer=partial(SGD, lr=0.3))
    flags |= {"callbacks": [bar, *others], "enable_progress_bar": True}
    fit(federation, random_data([9, 7, 8]), folder, **flags)


def logged(folder: Path, **flags: Any) -> list[str]:
    """Run a federation and return the lines of its log."""
    bar = RoundProgressBar(seconds=0.0)
    bar.console = Console(file=io.StringIO(), width=300)
    run(bar, folder, **flags)
    return bar.console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "run" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_line_says_what_the_table_says_of_its_round(tmp_path: Path) -> None:
    lines = logged(tmp_path, rounds=3)
    table = rows(tmp_path)
    assert len({row["train_loss"] for row in table}) == len(lines) == 3
    pattern = rf"round (\d)/3  loss {NUMBER}  global/accuracy {NUMBER}  personal/accuracy {NUMBER}"
    columns = ("round", "train_loss", "global/accuracy", "personal/accuracy")
    for line, row in zip(lines, table, strict=True):
        match = re.fullmatch(pattern, line)
        assert match is not None, line
        numbers = [float(number) for number in match.groups()]
        assert numbers == pytest.approx([float(row[name]) for name in columns], rel=1e-3)


def test_a_narrow_terminal_shows_times_and_figures_whole(tmp_path: Path) -> None:
    shown: list[str] = []

    class Look(Callback):
        @override
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            assert bar.progress is not None
            screen = Console(file=io.StringIO(), width=72)
            screen.print(bar.progress.get_renderable())
            shown.append(screen.file.getvalue())  # type: ignore[attr-defined]

    bar = RoundProgressBar()
    bar.console = Console(file=io.StringIO(), width=72, force_terminal=True)
    run(bar, tmp_path, Look(), rounds=2)
    text = " ".join(shown[-1].split())
    accuracies = rf"global/accuracy {NUMBER} personal/accuracy {NUMBER}"
    pattern = rf"round 2/2 \S+ wave 3/3 0:00:\d\d left 0:00:00 loss {NUMBER} {accuracies}"
    assert re.fullmatch(pattern, text), text
