"""What the Trainer's flags may be: with two GPUs, and at the edges of what is allowed."""

from datetime import timedelta
from typing import Any

import pytest
import torch

from lightfed.engine.checks import check_devices
from lightfed.trainer import FederatedTrainer
from lightfed.utils.errors import UserError
from tests.small import CPU


def trainer(**flags: Any) -> FederatedTrainer:
    return FederatedTrainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, **flags
    )


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        (1, [0]),
        (-1, [0, 1]),
        ("2", [0, 1]),
        ("1,", [1]),
        ([1], [1]),
        ("auto", [0, 1]),
    ],
)
def test_gpus_are_counted_or_picked(devices: Any, indices: list[int]) -> None:
    for accelerator in ("gpu", "cuda", "auto"):
        gpus = trainer(accelerator=accelerator, devices=devices).strategy.parallel_devices
        assert gpus == [torch.device("cuda", index) for index in indices]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("accelerator", "devices", "key"),
    [
        ("gpu", 3, "trainer.devices"),
        ("cuda", -2, "trainer.devices"),
        ("gpu", [2], "trainer.devices"),
        ("cuda", "all", "trainer.devices"),
        ("cpu", 0, "trainer.devices"),
        ("cpu", "0,1", "trainer.devices"),
        ("gpu", [0, 0], "trainer.devices"),  # NCCL refuses two ranks on a GPU
        ("auto", "1, 1", "trainer.devices"),
        ("tpu", 1, "trainer.accelerator"),
    ],
)
def test_devices_that_are_not_there(accelerator: str, devices: Any, key: str) -> None:
    with pytest.raises(UserError) as caught:
        check_devices(accelerator, devices)
    assert caught.value.key == key


@pytest.mark.parametrize(("devices", "ranks"), [(1, 1), (64, 64), ("8", 8), ("auto", 1)])
def test_ranks_on_the_cpu_are_any_number(devices: Any, ranks: int) -> None:
    assert trainer(accelerator="cpu", devices=devices).strategy.parallel_devices == [CPU] * ranks


def test_ranks_on_the_cpu_share_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for accelerator in ("cpu", "auto"):
        with pytest.raises(UserError) as caught:
            check_devices(accelerator, 2, ranks_per_device=2)
        assert caught.value.key == "trainer.ranks_per_device"


@pytest.mark.usefixtures("two_gpus")
def test_ranks_share_a_gpu_that_is_there() -> None:
    check_devices("gpu", 2, ranks_per_device=4)
    with pytest.raises(UserError, match=r"^trainer\.devices: 3: .*; give "):
        check_devices("gpu", 3, ranks_per_device=4)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("limit_train_batches", float("nan")), ("limit_train_batches", 0.0),
        ("gradient_clip_val", float("nan")), ("gradient_clip_algorithm", "net"),
        ("max_time", timedelta(0)), ("max_time", {"moons": 1}), ("max_steps", 0),
    ],
)  # fmt: skip
def test_flags_that_are_refused(flag: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        trainer(accelerator="cpu", **{flag: value})
    assert caught.value.key == f"trainer.{flag}"
