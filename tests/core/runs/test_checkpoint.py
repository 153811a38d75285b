"""What a checkpoint holds, which files it is, and what is refused as one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from lightfed.distributed.collectives import Ranks
from lightfed.runs import checkpoint
from lightfed.runs.checkpoint import CLIENTS, load, remove, save
from lightfed.utils.errors import UserError
from tests.promises.stopping.checkpoints import names_in, tags_of, value_of, write
from tests.small import CPU


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8])
def test_any_number_of_ranks_writes_what_one_reads(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "new" / "last.ckpt"
    write(path, 5.0, ranks=ranks)
    assert len(load(path)[CLIENTS]) == ranks
    assert value_of(path) == 5.0


def test_stateless_runs_write_no_shards(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 5.0, ranks=2, clients=None)
    assert load(path)[CLIENTS] == []
    assert names_in(tmp_path) == ["last.ckpt"]


def test_a_new_checkpoint_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for value, ranks in ((1.0, 3), (2.0, 2), (3.0, 1)):
        write(path, value, ranks=ranks)
    assert value_of(path) == 3.0
    assert tags_of(path) == 1
    assert names_in(tmp_path) == ["last.ckpt", "last.ckpt.shards"]


def test_what_was_mapped_survives_the_next_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1.0)
    rows = load(path)[CLIENTS][0]
    write(path, 2.0)
    assert rows[3][0].tolist() == [4.0] * 4


# An object that only code of the file could make.
CODE = {checkpoint.SHARDS: {"tag": "x", "ranks": 0}, "x": Path("/")}


def refused(path: Path, message: str) -> None:
    """Check that a checkpoint is refused in one line."""
    with pytest.raises(UserError, match=message) as caught:
        load(path)
    assert caught.value.key == "ckpt_path"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no file"),
        (Path.mkdir, "no file"),
        (Path.touch, "cannot be read"),
        (lambda path: path.write_text("epoch: 3\n" * 100), "cannot be read"),
        (partial(torch.save, CODE), "cannot be read"),
        (partial(torch.save, {"state_dict": {}}), "was not written by lightfed"),
        (partial(torch.save, torch.zeros(2)), "was not written by lightfed"),
    ],
    ids=["missing", "folder", "empty", "text", "code", "other program", "tensor"],
)
def test_what_is_no_checkpoint_is_refused(
    make: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    make(path)
    refused(path, message)


def test_a_checkpoint_of_another_version_is_refused_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1.0)
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "FORMAT", 5)
        write(path, 2.0)
    refused(path, "has format 5; this version of lightfed reads format 4")

    monkeypatch.setattr(checkpoint, "FORMAT", 5)
    assert value_of(path) == 2.0
    assert tags_of(path) == 1


def test_a_link_stands_for_the_checkpoint_it_points_to(tmp_path: Path) -> None:
    path = tmp_path / "epoch=1.ckpt"
    link = tmp_path / "last.ckpt"
    write(path, 1.0, ranks=2)
    link.symlink_to(path.name)
    assert value_of(link) == 1.0

    # A new checkpoint takes the place of the link, and not of its target.
    write(link, 2.0, ranks=2)
    assert value_of(link) == 2.0
    assert value_of(path) == 1.0


def test_removing_a_link_leaves_its_target(tmp_path: Path) -> None:
    path = tmp_path / "epoch=1.ckpt"
    link = tmp_path / "last.ckpt"
    write(path, 1.0)
    link.symlink_to(path.name)

    remove(link)
    assert value_of(path) == 1.0


def test_removing_a_checkpoint_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 2.0)

    remove(path)
    remove(path)
    assert names_in(tmp_path) == []


def test_hyper_parameters_are_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    content = {"hyper_parameters": {"path": tmp_path}, "hparams_name": "kwargs", "epoch": 3}
    save(content, path, Ranks(CPU))

    loaded = load(path)
    assert loaded["epoch"] == 3
    assert "hyper_parameters" not in loaded
    assert "hparams_name" not in loaded
