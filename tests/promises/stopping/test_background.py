"""Checkpoints that are written while training goes on, and how often they are written."""

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.distributed.collectives import Ranks
from lightfed.runs import checkpoint
from lightfed.runs.checkpoint import CLIENTS, Writing, load
from lightfed.state.client_state import by_client
from lightfed.trainer import FederatedTrainer
from lightfed.utils.errors import DiskError, UserError
from lightfed.utils.memory import free_memory
from tests.core.engine.spy import Spy, data, federation, state_of
from tests.promises.stopping.test_suspend import SignalAt
from tests.small import CPU, fit

LAST = Path("run") / "checkpoints" / "last.ckpt"


def test_what_is_written_is_what_was_there_when_the_copy_was_made(tmp_path: Path) -> None:
    path, ranks = tmp_path / "last.ckpt", Ranks(CPU)
    store, server = torch.arange(20.0).view(4, 5), torch.zeros(3)

    def writing_now() -> Writing:
        rows = {"floats": [{"clients": torch.arange(4), "values": store[:]}]}
        content = {"state_dict": {"w": server}, CLIENTS: rows}
        return Writing(content, path, ranks)

    for value in (-1.0, -2.0):  # in memory that is used again
        store[2] = value
        server += 1
        before, ours = store.clone(), writing_now()
        assert ours.detach(ranks)
        store.zero_()
        server.zero_()
        ours.write(ranks)
        found = load(path)
        rows = {k: v for shard in found[CLIENTS] for k, v in by_client(shard).items()}
        assert torch.equal(torch.stack([rows[k]["floats"] for k in range(4)]), before)
        assert found["state_dict"]["w"].tolist() == [1.0] * 3
        store.copy_(before)


def test_copies_that_do_not_fit_are_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"floats": [{"clients": torch.arange(2), "values": torch.zeros(3, 5)[:2]}]}
    for free, fits in ((79.0, False), (80.0, True)):
        ours = Writing({CLIENTS: dict(rows)}, tmp_path / "x.ckpt", Ranks(CPU))
        monkeypatch.setattr(checkpoint, "free_memory", lambda free=free: free)
        assert ours.detach(Ranks(CPU)) is fits


def test_free_memory_is_that_of_the_machine_or_of_the_job(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    assert free_memory(proc, groups) == float("inf")
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   500 kB\nHuge: 0\n")
    assert free_memory(proc, groups) == 500 * 1024
    (proc / "self" / "cgroup").write_text("0::/slurm/job\n")
    for name, limit in (("slurm/job", "max"), ("slurm", "4000")):
        (groups / name).mkdir(parents=True, exist_ok=True)
        (groups / name / "memory.max").write_text(f"{limit}\n")
        (groups / name / "memory.current").write_text("3000\n")
        (groups / name / "memory.stat").write_text("anon 2500\ninactive_file 400\n")
    assert free_memory(proc, groups) == 1400


def test_a_session_trains_while_the_checkpoint_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, waited = threading.Event(), list[bool]()
    write = checkpoint.write_atomically

    def slow(path: Path, content: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            waited.append(trained.wait(timeout=20))
        write(path, content)

    monkeypatch.setattr(checkpoint, "write_atomically", slow)
    spy = Spy(on_train_batch_end=lambda trainer: trainer.current_epoch and trained.set())
    fit(federation(), data(), tmp_path, rounds=2, callbacks=[spy])
    assert waited == [True, True]  # after each of the rounds
    assert load(tmp_path / LAST)["global_step"] == 2


def rounds_on_disk(trainer: FederatedTrainer) -> int:
    trainer.strategy.checkpoints.finish()
    assert trainer.last_checkpoint is not None
    return int(load(trainer.last_checkpoint.path)["global_step"])


def test_checkpoints_come_every_few_rounds_and_after_the_last(tmp_path: Path) -> None:
    spy = Spy(on_train_epoch_start=rounds_on_disk)
    fit(federation(), data(), tmp_path, rounds=5, callbacks=[spy], checkpoint_every=2)
    assert spy.seen == [0, 0, 2, 2, 4]
    assert load(tmp_path / LAST)["global_step"] == 5


def full_from(count: int, write: Callable[[Path, Any], None]) -> Callable[[Path, Any], None]:
    """A disk that is full from a file on."""
    written = 0

    def refuse(path: Path, content: Any) -> None:
        nonlocal written
        written += 1
        if written >= count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content)

    return refuse


@pytest.mark.parametrize(
    ("after", "rounds", "every", "trained"),
    [("the next checkpoint", 9, 1, 2), ("the next round", 9, 2, 3), ("the end", 2, 2, 2)],
)
def test_a_disk_that_is_full_in_the_background_ends_the_run_in_one_line(
    after: str,
    rounds: int,
    every: int,
    trained: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "write_atomically", full_from(2, checkpoint.write_atomically))

    def until_it_failed(trainer: FederatedTrainer) -> None:
        checkpoints = trainer.strategy.checkpoints
        while after == "the next round" and trainer.current_epoch == 2 and not checkpoints.failed:
            time.sleep(0.001)

    spy = Spy(on_train_epoch_start=until_it_failed)
    flags = {"checkpoint_every": every, "callbacks": [spy]}
    with pytest.raises(DiskError, match=r"last\.ckpt is complete$") as caught:
        fit(federation(), data(), tmp_path, rounds=rounds, **flags)
    assert "No space left on device" in caught.value.found
    assert load(tmp_path / LAST)["global_step"] == 0
    assert spy.calls.count("on_train_epoch_start") <= trained


def test_a_signal_in_a_round_whose_start_is_not_on_disk_leaves_its_end(tmp_path: Path) -> None:
    straight, other = federation(), federation()
    fit(straight, data(), tmp_path / "straight", rounds=4)
    folder, flags = tmp_path / "other", {"rounds": 4, "checkpoint_every": 3}
    with pytest.raises(SystemExit) as left:
        fit(federation(), data(), folder, callbacks=[SignalAt(4)], **flags)  # in the second round
    assert left.value.code == 128 + signal.SIGUSR1
    assert load(folder / LAST)["global_step"] == 2
    fit(other, data(), folder, ckpt_path=str(folder / LAST), **flags)
    assert state_of(other) == state_of(straight)


@pytest.mark.parametrize("number", [3, 4])  # a shard, a main file: of the first round's end
def test_a_kill_in_the_background_loses_what_was_being_written(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path, **flags: Any) -> dict[str, Any]:
        model = federation(algorithm=LGFedAvg(global_layers=1), fraction=0.5)
        fit(model, data(), folder, rounds=3, **flags)
        return state_of(model)

    whole, seen = torch.save, 0

    def torn(content: Any, file: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == number:  # what a kill leaves on the disk
            assert threading.current_thread() is not threading.main_thread()
            file.write(b"half")
            file.flush()
            folders = [tmp_path / name / LAST.parent for name in ("straight", "killed")]
            shutil.copytree(*folders)  # no other thread writes there
            file.seek(0)
        whole(content, file)

    monkeypatch.setattr(torch, "save", torn)
    straight = run(tmp_path / "straight")
    left = tmp_path / "killed" / LAST
    assert load(left)["global_step"] == 0
    assert list((tmp_path / "killed").rglob("*.part"))
    assert run(tmp_path / "killed", ckpt_path=str(left)) == straight


@pytest.mark.parametrize(
    "flags",
    [
        {"checkpoint_every": 0},
        {"checkpoint_every": 2, "enable_checkpointing": False},
        {"checkpoint_every": 2, "callbacks": ModelCheckpoint(save_last=True)},
    ],
)
def test_intervals_without_effect_are_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        FederatedTrainer(accelerator="cpu", **flags)
    assert caught.value.key == "trainer.checkpoint_every"
