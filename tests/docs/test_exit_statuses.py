"""Every status of the table in docs/scripts.md is provoked, in this process."""

import errno
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from typing_extensions import override

from lightfed.cli import command_line
from lightfed.lab import sweep
from lightfed.lab.judge import conformity
from lightfed.lab.runner import Outcome
from tests.lab.reading import check_once
from tests.small import quiet

PAGE = Path(__file__).parents[2] / "docs" / "scripts.md"
CONFIGURATION = """
trainer: {max_epochs: 3, accelerator: cpu, enable_page: false, enable_progress_bar: false}
model:
  algorithm: FedAvg
  clients: [{count: 2, model: {class_path: lightfed.networks.MLP, init_args: {hidden: [4]}}}]
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
data: {dataset: Digits, partition: Iid, batch_size: 256}
"""


class Signalled(Callback):
    """Sends this process a signal in the first round."""

    def __init__(self, number: int) -> None:
        self.number = number

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            os.kill(os.getpid(), self.number)


class Exits(Callback):
    """Is code of a user's that ends the process."""

    def __init__(self, status: int) -> None:
        self.status = status

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        sys.exit(self.status)


class FullDisk:
    """Is a standard output that takes nothing."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fileno(self) -> int:
        return self._file.fileno()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    quiet()
    Path("mine.yaml").write_text(CONFIGURATION)
    # A process that ends ignores Ctrl-C; this one goes on.
    monkeypatch.setattr(command_line, "signal", lambda *_: None)
    return tmp_path


def status_of_program(program: Callable[[], object]) -> Any:
    """The status with which a process ends that runs this."""
    with pytest.raises(SystemExit) as ended:
        command_line.run_program(program)
    return ended.value.code


def status(*words: str) -> Any:
    return status_of_program(partial(command_line.main, list(words)))


def fit(callback: str, **arguments: int) -> Any:
    given = ", ".join(f'"{name}": {value}' for name, value in arguments.items())
    path = f"{__name__}.{callback}"
    callbacks = f'[{{"class_path": "{path}", "init_args": {{{given}}}}}]'
    return status("fit", "--config=mine.yaml", f"--trainer.callbacks={callbacks}")


def success() -> Any:
    return status("partition", "--config=mine.yaml", "--json")


def full_disk() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", FullDisk(Path("stdout")))
        return status("--version")


def refusal() -> Any:
    return status("fit", "--config=mine.yaml", "--model.fraction=2")


def no_conformance() -> Any:
    def fail(candidate: Any, log: Path) -> None:
        raise conformity.NotConforming("conformance", "rows have different bits", "see the log")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conformity, "check_conformity", fail)
        return status("judge", "tests.lab.judge.methods.Alike")


def ctrl_c() -> Any:
    def stopped() -> None:
        raise KeyboardInterrupt

    return status_of_program(stopped)


# What provokes each status of the table, by its first cell.
CAUSES: dict[str, Callable[[], Any]] = {
    "0": success,
    "1": full_disk,
    "2": refusal,
    "3": no_conformance,
    "130": ctrl_c,
    "138": partial(fit, "Signalled", number=signal.SIGUSR1.value),
    "143": partial(fit, "Signalled", number=signal.SIGTERM.value),
    "another": partial(fit, "Exits", status=7),
}


def documented() -> list[str]:
    """The first cells of the table."""
    table = PAGE.read_text().partition("## Exit statuses")[2].partition("## ")[0]
    cells = re.findall(r"^\| (\w+) \|", table, re.MULTILINE)
    return [cell for cell in cells if cell != "status"]


def test_the_table_has_every_status_that_is_provoked_here() -> None:
    assert documented() == list(CAUSES)


@pytest.mark.parametrize("listed", CAUSES)
def test_a_status_means_what_the_table_says(
    listed: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = CAUSES[listed]()
    assert found == (7 if listed == "another" else int(listed))

    printed = capsys.readouterr()
    if listed in ("1", "2", "3"):
        *_, line = errors = printed.err.splitlines()
        assert line.startswith("lightfed: error: ")
        # `judge` says its budget first.
        assert len(errors) == (2 if listed == "3" else 1)
    if listed in ("130", "138", "143"):
        assert "lightfed: stopped by SIG" in printed.err
    if listed in ("138", "143"):
        assert (here / "runs" / "mine" / "checkpoints" / "last.ckpt").exists()
        assert printed.out == ""


def test_code_that_exits_with_0_has_not_succeeded(here: Path) -> None:
    assert fit("Exits", status=0) == 2


def test_a_sweep_has_the_greatest_status_of_its_runs(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine.sweep").write_text(
        "".join(f"fit --config mine.yaml --trainer.name r{n}\n" for n in range(2))
    )
    monkeypatch.setattr(sweep, "check", check_once)
    monkeypatch.setattr(
        sweep,
        "run_all",
        lambda runs, jobs: (Outcome(run, n + 1, 1.0, "") for n, run in enumerate(runs)),
    )
    assert status("sweep", "mine.sweep") == 2
