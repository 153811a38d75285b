"""With several ranks an error is still one line; all leave with status 2, and none hangs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightfed.cli.command_line import USAGE_ERROR, main
from lightfed.testing.ranks import kept_port
from tests.promises.refusals.mistakes import PARTITION, Case, edit

TWO_RANKS = ["--trainer.devices", "2"]
IMPOSSIBLE = edit(f"{PARTITION}.min_size", 1000, "")
LONELY = edit("model.clients", [{"count": 1, "model": {"class_path": "Conv"}}], "")
SECONDS = 120  # for what takes about ten

# Where Lightning would launch the ranks itself, and where a launcher such as torchrun has done so.
LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"}
LAUNCHER |= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"}


def _environment(**variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return inherited | {"OMP_NUM_THREADS": "1"} | variables


def gone(group: int) -> bool:
    """Whether a process group has ended, or ends soon."""
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.matrix
def test_ranks_that_lightning_launches_leave_together(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "lightfed", *IMPOSSIBLE.write(tmp_path), *TWO_RANKS]
    process = subprocess.Popen(
        words, cwd=tmp_path, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == USAGE_ERROR, errors
    assert len(errors.splitlines()) == 1, errors
    assert errors.startswith(f"lightfed: error: {PARTITION}.min_size: 1000 samples for each")
    assert gone(process.pid)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


@pytest.mark.parametrize(
    ("case", "line"),
    [
        (edit("model.fractoin", 0.5, ""), "model.fractoin: no such key"),
        (LONELY, "trainer.devices: 2 ranks for 1 clients; use at most one rank a client"),
        # Only the first rank makes folders: the second one has to hear of it.
        (
            edit("trainer.default_root_dir", "bad.yaml", ""),
            "trainer.default_root_dir: bad.yaml/bad",
        ),
    ],
    ids=["by the parser", "by every rank", "by one rank"],
)
def test_ranks_of_a_launcher_leave_with_the_same_status(
    case: Case, line: str, tmp_path: Path
) -> None:
    errors, statuses = _ranks(case.write(tmp_path), tmp_path)
    assert statuses == [USAGE_ERROR, USAGE_ERROR], errors
    assert len(errors[0].splitlines()) == 1, errors
    assert errors[0].startswith(f"lightfed: error: {line}")
    assert errors[1] == ""
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


def _ranks(words: list[str], folder: Path) -> tuple[list[str], list[int]]:
    """What two ranks of a launcher print to stderr, and their statuses."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "two-ranks"}
    with kept_port() as keeper:
        shared["MASTER_PORT"] = str(keeper.getsockname()[1])
        command = [sys.executable, "-m", "lightfed", *words, *TWO_RANKS]
        processes = [
            subprocess.Popen(
                command, cwd=folder, env=_environment(RANK=rank, LOCAL_RANK=rank, **shared),
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for rank in "01"
        ]  # fmt: skip
        errors = [process.communicate(timeout=SECONDS)[1] for process in processes]
    return errors, [process.returncode for process in processes]


def test_a_run_that_diverges_ends_all_ranks_and_leaves_what_it_has(tmp_path: Path) -> None:
    schedule = {"class_path": "StepLR", "init_args": {"step_size": 2, "gamma": 1e30}}
    edits = {"model.lr_schedule": schedule, "trainer.max_epochs": 4}
    errors, statuses = _ranks(Case("", "", edits).write(tmp_path), tmp_path)
    assert statuses == [USAGE_ERROR, USAGE_ERROR], errors
    said = [line for line in errors[0].splitlines() if line.startswith("lightfed: error")]
    assert len(said) == 1, errors
    assert said[0].startswith("lightfed: error: model.optimizer: 3 of 3 sessions of round 2 failed")
    assert "learning rate" in said[0]
    assert "lightfed: error" not in errors[1]
    run = tmp_path / "runs" / "bad"
    assert len((run / "metrics.csv").read_text().splitlines()) == 3
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == 1


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID", "NODE_RANK", "LOCAL_RANK"])
def test_other_ranks_are_silent(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as left:
        main(["report", "nowhere"])
    assert left.value.code == USAGE_ERROR
    assert capsys.readouterr().err == ""
