"""Values that are missing, or have another form, in files whose checksums are right."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightfed.algorithms.standalone import Standalone
from lightfed.engine.federation import Federation
from lightfed.runs import journal, run_lock
from lightfed.runs.checkpoint import SHARDS, shard_folder
from lightfed.utils.errors import UserError
from tests.engine.spy import data, federation, lr_schedule
from tests.small import fit

LOOP = ("loops", "fit_loop")
GONE = object()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds whose clients keep their rows."""
    folder = tmp_path_factory.mktemp("finished")
    fit(scheduled(), data(), folder, rounds=2)
    return folder


def scheduled() -> Federation:
    return federation(algorithm=Standalone(), lr_schedule=lr_schedule)


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "runs")


def last_of(folder: Path) -> Path:
    return folder / "run" / "checkpoints" / "last.ckpt"


def resumed(folder: Path) -> UserError:
    """Why the run does not go on, and leaves all files alone."""
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(UserError) as refused:
        fit(scheduled(), data(), folder, rounds=3, ckpt_path=last_of(folder))
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    return refused.value


def edit(path: Path, keys: tuple[Any, ...], value: Any) -> None:
    content = part = torch.load(path, weights_only=True)
    for key in keys[:-1]:
        part = part[key]
    if value is GONE:
        del part[keys[-1]]
    else:
        part[keys[-1]] = value
    torch.save(content, path)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("epoch",), "text"),
        (("global_step",), GONE),
        (("loops",), GONE),
        ((*LOOP, "epoch_progress", "current", "processed"), "text"),
        ((*LOOP, "epoch_loop.state_dict", "server_steps"), -3),
        (("state_dict",), "text"),
        (("lightfed_fingerprint",), GONE),
        (("lightfed_round_metrics",), {"loss": "text"}),
        (("lightfed_ledger",), torch.zeros(7, 3)),
        (("lightfed_fruitless_rounds",), "text"),
        (("lightfed_lr",), "text"),
        (("lightfed_round_tests",), {"trained": [{"client": 0}]}),
        ((SHARDS, "ranks"), 10**9),
        ((SHARDS, "ranks"), "text"),
        ((SHARDS, "tags"), GONE),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named(keys: tuple[Any, ...], value: Any, folder: Path) -> None:
    edit(last_of(folder), keys, value)
    error = resumed(folder)
    assert error.key == "ckpt_path"
    assert "cannot be read" in error.found
    assert "\n" not in str(error)


@pytest.mark.parametrize("value", [GONE, "text", [], [{"clients": torch.tensor([0])}]])
def test_damaged_rows_are_named(value: Any, folder: Path) -> None:
    shards = shard_folder(last_of(folder)).glob("*/rank0.pt")
    shard = max(shards, key=lambda path: path.stat().st_mtime_ns)
    edit(shard, ("floats",), value)
    assert resumed(folder).key == "ckpt_path"


@pytest.mark.parametrize("name", ["metrics.csv", "clients.csv"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: bytes(range(128, 256)),
        lambda text: text.partition(b"\n")[2],
        lambda text: text.replace(b"\n1,", b"\nx,"),
    ],
    ids=["binary", "no header", "text"],
)
def test_a_damaged_table_is_named(
    name: str, damage: Callable[[bytes], bytes], folder: Path
) -> None:
    path = folder / "run" / name
    path.write_bytes(damage(path.read_bytes()))
    assert resumed(folder).key == str(path)


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"token": 5}', '{"job": "x", "restarts": "y"}'])
def test_a_damaged_owner_is_nobody(text: str, tmp_path: Path) -> None:
    (tmp_path / ".owner").write_text(text)
    run_lock.take(tmp_path, None)
    run_lock.check(tmp_path)


def test_the_journal_is_one_of_them(folder: Path) -> None:
    """A journal without its round: its sessions are trained again."""
    last = last_of(folder)
    torch.save({SHARDS: {"tags": [], "ranks": 0, "format": 3}}, last.with_name(journal.FILE))
    fit(scheduled(), data(), folder, rounds=3, ckpt_path=last)
