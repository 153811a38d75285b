"""What happens around a run: its files vanish or cannot be written, its process is killed."""

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from typing_extensions import override

from lightfed.lab.report import page
from lightfed.runs.run_folder import RunFolder
from lightfed.trainer import FederatedTrainer
from lightfed.utils.errors import DiskError, UserError
from tests.core.engine.spy import data, federation
from tests.small import fit

TABLES = ("metrics", "clients", "timings")


class Strikes(Callback):
    """Does something before the third round, when all of the second one is on disk."""

    def __init__(self, strike: Callable[[Path], object]) -> None:
        self._strike = strike

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            trainer.strategy.checkpoints.finish()
            self._strike(trainer.run_logger.folder)


def run(folder: Path, *callbacks: Callback, rounds: int = 3, **flags: Any) -> FederatedTrainer:
    return fit(federation(), data(), folder, rounds=rounds, callbacks=list(callbacks), **flags)


def rounds_in(folder: Path) -> dict[str, list[str]]:
    """The first column of every table, without its repetitions."""
    texts = {name: (folder / f"{name}.csv").read_text().splitlines() for name in TABLES}
    return {name: list(dict.fromkeys(x.split(",")[0] for x in t)) for name, t in texts.items()}


def exits(status: object) -> Callable[..., None]:
    def leave(*_: object) -> None:
        sys.exit(status)  # type: ignore[arg-type]

    return leave


def test_an_exit_with_an_error_keeps_its_status(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as left:
        run(tmp_path, Strikes(exits(3)))
    assert left.value.code == 3


@pytest.mark.parametrize("keeps", [True, False])
def test_a_folder_that_is_removed_ends_the_run(keeps: bool, tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="was removed") as ended:
        run(tmp_path, Strikes(shutil.rmtree), enable_checkpointing=keeps)
    assert (ended.value.key, ended.value.status) == ("trainer.default_root_dir", 1)
    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES])
def test_an_error_in_the_folder_of_the_run_is_one_line(error: int, tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(error, os.strerror(error), str(folder / "metrics.csv"))

    with pytest.raises(DiskError, match=os.strerror(error)):
        run(tmp_path, Strikes(refuse))
    assert rounds_in(tmp_path / "run")["metrics"] == ["round", "1", "2"]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_is_removed_is_begun_again(name: str, tmp_path: Path) -> None:
    """With a first line; metrics.csv with all rounds, which the run remembers."""
    every = ["round", "1", "2", "3"]
    run(tmp_path / "a", Strikes(lambda folder: (folder / f"{name}.csv").unlink()))
    kept = rounds_in(tmp_path / "a" / "run")
    others = {other: kept[other] for other in TABLES if other != name}
    assert others == dict.fromkeys(others, every)
    assert kept[name] == (every if name == "metrics" else ["round", *kept[name][1:]])
    assert "3" in kept[name]
    run(tmp_path / "b", rounds=2)
    (tmp_path / "b" / "run" / f"{name}.csv").unlink()
    run(tmp_path / "b", ckpt_path="last")
    assert rounds_in(tmp_path / "b" / "run")[name][-1] == "3"


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refused(*_: object, **__: object) -> None:
    raise UserError("report", "index.html cannot be written", "free space")


@pytest.mark.parametrize("what", ["the page", "the record", "standard output"])
def test_a_full_disk_after_the_last_round_is_a_warning(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "the page":
        monkeypatch.setattr(page, "build", refused)
    elif what == "the record":
        monkeypatch.setattr(RunFolder, "finish", full)
    else:
        monkeypatch.setattr(sys, "stdout", os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))
    with caplog.at_level(logging.WARNING):
        run(tmp_path, enable_page=what != "the record")
    assert "training has finished after 3 rounds" in caplog.text


def test_a_command_whose_output_is_full_says_so() -> None:
    with open("/dev/full", "w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "lightfed", "--version"],
            stdout=output, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("lightfed: error: stdout: ")


def test_a_start_removes_what_a_killed_writer_has_left(tmp_path: Path) -> None:
    run(tmp_path, rounds=1)
    folder = tmp_path / "run"
    for name in (".index.html.123.part", "models/server.safetensors.0123abcd.part", "my.part"):
        (folder / name).touch()
    run(tmp_path, rounds=2, ckpt_path="last")
    assert [path.name for path in folder.rglob("*.part")] == ["my.part"]
