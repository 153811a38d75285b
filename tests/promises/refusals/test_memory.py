"""What cannot fit in memory is refused before it is allocated; so is a file that cannot be read."""

import os

import pytest

from lightfed.cli.command_line import main
from lightfed.data.datasets.vision import Digits
from lightfed.utils.errors import UserError
from lightfed.utils.memory import require_memory

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


def machine_of(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sysconf = {"SC_PHYS_PAGES": memory // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sysconf.__getitem__)
