"""The implementations that a contract is tested on."""

import os

import pytest
import torch
from lightfed_kernels._rows import interpreter_fault

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not interpreter_fault()
NOT_INTERPRETED = interpreter_fault() or "kernels are compiled here"

# name -> (LIGHTFED_KERNELS, device)
BACKENDS = {"torch": ("torch", "cpu"), "interpreter": ("triton", "cpu"), "cuda": ("auto", "cuda")}


_compiled = pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
KERNELS = [
    pytest.param("interpreter", marks=_compiled),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=["torch", *KERNELS])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device of a test's tensors; the operations run on the backend under test."""
    choice, device = BACKENDS[request.param]
    monkeypatch.setenv("LIGHTFED_KERNELS", choice)
    return torch.device(device)
