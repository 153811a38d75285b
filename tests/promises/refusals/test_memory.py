"""What cannot fit in memory is refused before it is allocated; so is a file that cannot be read."""

import os
from pathlib import Path

import datasets
import pytest

from lightfed.cli.command_line import main
from lightfed.data.datasets.hub import Hub
from lightfed.data.datasets.vision import Digits
from lightfed.utils.errors import UserError
from lightfed.utils.memory import require_memory
from tests.data import tables

DELAY = ["--delay", '{"class_path": "Exponential", "init_args": {"mean": 1}}']


def test_the_estimate_is_compared_with_the_machine() -> None:
    require_memory(2**20, "key", "arrays", "lower it")
    with pytest.raises(UserError, match="2,048 GiB") as refused:
        require_memory(2.0**41, "key", "arrays", "lower it")
    assert refused.value.key == "key"


@pytest.mark.parametrize("flag", ["--servers", "--devices"])
def test_delays_of_a_simulation(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["latency", *DELAY, flag, "1000000000000"])
    assert left.value.code == UserError.status
    assert capsys.readouterr().err.startswith("lightfed: error: --servers: ")


def test_images() -> None:
    with pytest.raises(UserError) as refused:
        Digits(image_size=1_000_000)
    assert refused.value.key == "data.dataset.init_args.image_size"


@pytest.mark.parametrize("key", ["image_size", "length", "seconds"])
def test_samples_of_a_table(key: str, tmp_path: Path) -> None:
    size = 10_000_000 if key == "image_size" else 10**15
    with pytest.raises(UserError) as refused:
        Hub(str(tmp_path / "nowhere"), **{key: size})
    assert refused.value.key == f"data.dataset.init_args.{key}"


def machine_of(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sysconf = {"SC_PHYS_PAGES": memory // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sysconf.__getitem__)


def test_images_of_a_table_are_resized_many_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    data = Hub(str(tables.shades(tmp_path / "shades", each=10)), image_size=1000)
    machine_of(2**24, monkeypatch)  # five of the images
    with pytest.raises(UserError) as refused:
        data.load("train")
    assert refused.value.key == "data.dataset.init_args.image_size"
    assert not (tmp_path / "cache").exists()
