"""A damaged last.ckpt does not end a run's life: the checkpoint before it is beside it.

What is whole, but not a checkpoint of this run, is refused in one line.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightfed.cli.command_line import main
from lightfed.runs.checkpoint import BEFORE, LAST, SHARDS, load, shard_folder
from lightfed.utils.errors import UserError
from tests.promises.refusals.mistakes import edited
from tests.promises.stopping.checkpoints import names_in, value_of, write

FIT = ["fit", "--config", "run.yaml"]
RUNS = ("run", "longer")
OF_TIME = ("seconds", "wire_bytes")
# Clients that keep their rows: a checkpoint has shards.
RUN = {
    "model.algorithm": "Standalone",
    "trainer.max_epochs": 3,
    "trainer.enable_page": False,
    "model.optimizer.init_args.momentum": 0.9,
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three rounds."""
    folder = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "run.yaml").write_text(edited(RUN))
        main(FIT)
        main([*FIT, "--trainer.name", "longer", "--trainer.max_epochs", "5"])
    return folder


@pytest.fixture
def folder(straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in which the test works."""
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(run: Path) -> list[list[str]]:
    """The rows of metrics.csv without what is of the machine."""
    head, *rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    places = [place for place, name in enumerate(head) if name not in OF_TIME]
    return [[row[place] for place in places] for row in [head, *rows]]


def last_of(folder: Path) -> Path:
    return folder / "runs" / "run" / "checkpoints" / LAST


def spoil(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def spoil_main(last: Path) -> None:
    last.write_bytes(last.read_bytes()[:-20])


def spoil_shard(last: Path) -> None:
    tag = torch.load(last, weights_only=True)[SHARDS]["tag"]
    shard = shard_folder(last) / tag / "rank0.pt"
    shard.write_bytes(shard.read_bytes()[:-20])


def lose_shard(last: Path) -> None:
    tag = torch.load(last, weights_only=True)[SHARDS]["tag"]
    (shard_folder(last) / tag / "rank0.pt").unlink()


def empty_main(last: Path) -> None:
    last.write_bytes(b"")


@pytest.mark.parametrize("damage", [spoil_main, spoil_shard, lose_shard, empty_main])
def test_a_run_goes_on_from_the_one_before_with_the_same_bits(
    damage: Callable[[Path], None], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last = last_of(folder)
    assert names_in(last.parent) == [BEFORE, LAST, f"{LAST}.shards"]
    damage(last)
    main([*FIT, "--ckpt_path", str(last), "--trainer.max_epochs", "5"])
    (line,) = [r.getMessage() for r in caplog.records if "cannot be read" in r.getMessage()]
    assert f"{BEFORE} is loaded instead, after 2 rounds" in line
    assert table(folder / "runs" / "run") == table(folder / "runs" / "longer")
    for name in (LAST, BEFORE):
        ours, theirs = (
            load(folder / "runs" / run / "checkpoints" / name) for run in ("run", "longer")
        )
        assert ours["global_step"] == theirs["global_step"]
    rows = [load(folder / "runs" / r / "checkpoints" / LAST)["lightfed_clients"] for r in RUNS]
    for ours, theirs in zip(*rows, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            for one, other in zip(ours[name], theirs[name], strict=True):
                assert torch.equal(one["values"], other["values"])


def test_the_damaged_one_never_takes_the_place_of_the_one_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that dies while it writes its first checkpoint still has the one that it began from."""
    last = last_of(folder)
    spoil_main(last)
    before = last.with_name(BEFORE).read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(SystemExit):
            main([*FIT, "--ckpt_path", str(last), "--trainer.max_epochs", "5"])
    assert last.with_name(BEFORE).read_bytes() == before


def test_without_one_before_it_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = last_of(folder)
    last.with_name(BEFORE).unlink()
    spoil_main(last)
    status, line = refused(last, capsys)
    assert (status, "last.ckpt cannot be read" in line) == (2, True)


def test_if_both_are_damaged_the_last_one_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = last_of(folder)
    spoil_main(last)
    spoil_main(last.with_name(BEFORE))
    assert f"{LAST} cannot be read" in refused(last, capsys)[1]


def test_a_test_of_a_damaged_checkpoint_uses_the_one_before(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last = last_of(folder)
    spoil_main(last)
    main(["test", "--config", "run.yaml", "--ckpt_path", str(last)])
    assert "is loaded instead, after 2 rounds" in caplog.text
    assert last.with_name(BEFORE).is_file()


def test_the_one_before_keeps_its_shards(tmp_path: Path) -> None:
    path = tmp_path / LAST
    for value, ranks in ((1.0, 3), (2.0, 2), (3.0, 1)):
        write(path, value, ranks=ranks, keeps=True)
    assert (value_of(path), value_of(path.with_name(BEFORE))) == (3.0, 2.0)


def test_a_file_system_without_links_gets_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / LAST
    for value in (1.0, 2.0):
        write(path, value, keeps=True)
    assert (value_of(path), value_of(path.with_name(BEFORE))) == (2.0, 1.0)


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*FIT, "--ckpt_path", str(path), "--trainer.max_epochs", "5"])
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1, errors
    assert errors.startswith("lightfed: error: ckpt_path: ")
    return ended.value.code, errors


def no_number(content: dict[str, Any]) -> None:
    content["state_dict"]["algorithm.model.floats"][0] = float("nan")


def other_shape(content: dict[str, Any]) -> None:
    content["state_dict"]["algorithm.model.floats"] = torch.zeros(3)


def other_type(content: dict[str, Any]) -> None:
    values = content["state_dict"]["algorithm.model.floats"]
    content["state_dict"]["algorithm.model.floats"] = values.double()


def no_tensor(content: dict[str, Any]) -> None:
    content["state_dict"]["algorithm.model.floats"] = "x"


def other_names(content: dict[str, Any]) -> None:
    content["state_dict"]["more"] = torch.zeros(1)


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    def edit(content: dict[str, Any]) -> None:
        for name in path[:-1]:
            content = content[name]
        del content[path[-1]]

    return edit


def given(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    def edit(content: dict[str, Any]) -> None:
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    return edit


# What is wrong with a checkpoint that can be read, and what its line names.
WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "shards that are a text": (given("x", SHARDS), "was not written by lightfed"),
    "shards without a number": (without(SHARDS, "ranks"), "names its shards by"),
    "shards without a tag": (without(SHARDS, "tag"), "names its shards by"),
    "a tag that is a path": (given("../../x", SHARDS, "tag"), "names its shards by"),
    "shards of less than nobody": (given(-1, SHARDS, "ranks"), "names its shards by"),
    "a billion shards": (given(10**9, SHARDS, "ranks"), "1000000000 are named"),
    "no state": (without("state_dict"), "lacks state_dict"),
    "a state that is a list": (given([1], "state_dict"), "has a list as state_dict"),
    "no loops": (without("loops"), "has only weights"),
    "loops without a fit": (without("loops", "fit_loop"), "cannot be restored"),
    "loops of texts": (given("x", "loops", "fit_loop"), "cannot be restored"),
    "no fingerprint": (without("lightfed_fingerprint"), "lacks lightfed_fingerprint"),
    "no bytes": (without("lightfed_bytes"), "lacks lightfed_bytes"),
    "no FLOPs": (without("lightfed_flops"), "lacks lightfed_flops"),
    "few clients' FLOPs": (given(torch.zeros(1), "lightfed_flops"), "cannot be restored"),
    "bytes that are rounded": (given(torch.zeros(4, 2), "lightfed_bytes"), "cannot be restored"),
    "no metrics": (without("lightfed_round_metrics"), "lacks lightfed_round_metrics"),
    "no version": (without("pytorch-lightning_version"), "lacks pytorch-lightning_version"),
    "a version in words": (given("x", "pytorch-lightning_version"), "has 'x' as"),
    "no epoch": (without("epoch"), "lacks epoch"),
    "tests of texts": (given({"trained": ["x"]}, "lightfed_round_tests"), "cannot be restored"),
    "a shape": (other_shape, "as [3] torch.float32, this run's is"),
    "a type": (other_type, "torch.float64, this run's is"),
    "no tensor": (no_tensor, "has a str as algorithm.model.floats"),
    "other names": (other_names, "differ in more"),
    "no number": (no_number, "has values that are not numbers"),
}


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a model of the server, of two rounds."""
    folder = tmp_path_factory.mktemp("averaged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "run.yaml").write_text(edited({"trainer.max_epochs": 2}))
        main(FIT)
    return folder


@pytest.mark.parametrize("name", WRONG)
def test_a_checkpoint_without_its_parts_is_one_line(
    name: str, averaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(averaged)
    content = torch.load(last_of(averaged), weights_only=True)
    edit, found = WRONG[name]
    edit(content)
    torch.save(content, tmp_path / "given.ckpt")
    before = names_in(averaged / "runs")
    status, line = refused(tmp_path / "given.ckpt", capsys)
    assert status == 2
    assert found in line
    assert str(tmp_path) in line or "given.ckpt" in line
    assert names_in(averaged / "runs") == before


def test_weights_alone_can_be_tested(
    averaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(averaged)
    content = torch.load(last_of(averaged), weights_only=True)
    del content["loops"]
    torch.save(content, tmp_path / "weights.ckpt")
    main(["test", "--config", "run.yaml", "--ckpt_path", str(tmp_path / "weights.ckpt")])


def test_a_part_is_damaged_where_it_is_not_all_there(tmp_path: Path) -> None:
    write(tmp_path / LAST, 1.0, ranks=3)
    (shard_folder(tmp_path / LAST) / f"{1:012x}" / "rank1.pt").unlink()
    with pytest.raises(UserError, match=r"rank1\.pt cannot be read \(no such file; 3 are named\)"):
        load(tmp_path / LAST)
    assert json.dumps(names_in(tmp_path)) == '["last.ckpt", "last.ckpt.shards"]'


def test_a_run_that_goes_on_under_another_torch_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "runs" / "run" / "environment.json"
    recorded = json.loads(path.read_text())
    ours = recorded["torch"]
    path.write_text(json.dumps(recorded | {"torch": "1.13.0+cpu"}))
    words = [*FIT, "--ckpt_path", str(last_of(folder)), "--trainer.max_epochs"]
    main([*words, "4"])
    assert f"ran on torch 1.13.0+cpu, this is {ours}" in caplog.text
    recorded = json.loads(path.read_text())
    assert (recorded["torch"], recorded["earlier_torch"]) == (ours, "1.13.0+cpu")
    path.write_text(json.dumps(recorded | {"torch": "1.14.0"}))
    main([*words, "5"])
    assert json.loads(path.read_text())["earlier_torch"] == "1.13.0+cpu, 1.14.0"


def test_a_run_that_goes_on_under_the_same_torch_says_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    main([*FIT, "--ckpt_path", str(last_of(folder)), "--trainer.max_epochs", "4"])
    assert "torch" not in caplog.text
    assert "earlier_torch" not in json.loads((folder / "runs/run/environment.json").read_text())
