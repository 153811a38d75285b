"""Runs on a GPU ask torch for the same bits, and runs on a CPU leave torch as it is."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator

from lightfed import trainer
from lightfed.trainer import FederatedTrainer

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fills = torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.setenv(VARIABLE, "")  # restored even if it was not set
    monkeypatch.delenv(VARIABLE)
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = fills


def made(**flags: Any) -> None:
    FederatedTrainer(accelerator="cpu", logger=False, enable_progress_bar=False, **flags)


def asked() -> tuple[bool, bool]:
    """Whether torch is asked for operators that repeat their bits, and only to warn of others."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def test_a_run_on_a_cpu_leaves_torch_as_it_is() -> None:
    made()
    assert asked() == (False, False)
    assert VARIABLE not in os.environ


def test_a_run_on_a_gpu_asks_for_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "CUDAAccelerator", CPUAccelerator)  # the CPU passes for a GPU
    made()
    assert asked() == (True, True)
    assert not torch.backends.cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ[VARIABLE] == ":4096:8"
    made(benchmark=True)
    assert torch.backends.cudnn.benchmark
    made(deterministic=False)  # what an earlier Trainer of this process has asked for ends
    assert asked() == (False, False)


def test_an_operator_without_an_order_is_named_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer, "CUDAAccelerator", CPUAccelerator)
    made()
    row = torch.zeros(4)
    with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
        row.put_(torch.tensor([0, 1]), torch.ones(2))
    assert row.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_what_the_user_gives_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "CUDAAccelerator", CPUAccelerator)
    made(deterministic=True)
    assert asked() == (True, False)
    made(deterministic="warn")
    assert asked() == (True, True)
