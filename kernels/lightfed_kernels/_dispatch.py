"""Where an operation runs: Triton for CUDA tensors, torch elsewhere. The only decision point."""

import os
from functools import cache
from importlib.util import find_spec
from typing import Literal

from torch import Tensor

Backend = Literal["triton", "torch"]


def backend(*tensors: Tensor) -> Backend:
    """The implementation for these tensors.

    `LIGHTFED_KERNELS` overrides the choice: `torch` runs the torch path on any device; `triton`
    runs the kernels on CPU tensors too, where Triton interprets them (`TRITON_INTERPRET=1`, set
    before Triton is imported).

    Raises:
        ValueError: an unknown value, or `triton` if the kernels cannot run.
    """
    choice = os.environ.get("LIGHTFED_KERNELS", "auto")
    cuda = all(tensor.is_cuda for tensor in tensors)
    if choice == "auto":
        return "triton" if cuda and _triton_is_there() else "torch"
    if choice == "torch":
        return "torch"
    if choice != "triton":
        raise ValueError(f"LIGHTFED_KERNELS: {choice!r} is not one of auto, triton, torch")
    if not _triton_is_there():
        raise ValueError("LIGHTFED_KERNELS=triton: Triton is not installed; use torch")
    if not cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "LIGHTFED_KERNELS=triton: these tensors are not on a CUDA device; set "
            "TRITON_INTERPRET=1 to interpret the kernels, or use auto"
        )
    return "triton"


def checking() -> bool:
    """Whether inputs are also checked on the device, which synchronises with it."""
    return os.environ.get("LIGHTFED_KERNELS_CHECK") == "1"


@cache
def _triton_is_there() -> bool:
    return find_spec("triton") is not None
