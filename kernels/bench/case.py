"""A case: one operation on one shape, the codes that compete in it, and the right result."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightfed_kernels._rows import short
from lightfed_kernels.layout import padded
from lightfed_kernels.masks import unpack_mask
from torch import Tensor
from torch.nn.functional import pad

# The result of a call: a row, the named tensors of a row, or several of either.
Result = Tensor | Mapping[str, Tensor] | Sequence[Any]

Run = Callable[[], Result]

# Makes the call that is timed, from an input set. What it prepares is not timed. Every code gets
# input sets of its own, which it may overwrite.
Bind = Callable[[Any], Run]

# Names of codes.
OURS = "ours"
OFFICIAL = "official"
COMPILED = "compiled"

# The largest relative errors of sums of a few rows. Our code rounds once; a rival rounds at every
# addition, in the rows' dtype.
OUR_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float64: 1e-12}
RIVAL_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float64: 1e-12}


@dataclass(frozen=True)
class Case:
    """One operation on one shape.

    Attributes:
        operation: The public function.
        model: The name of the model that the rows belong to.
        shape: How many clients, receivers or senders, in words.
        dtype: The dtype of the rows.
        build: Makes an input set from a seed.
        reference: Makes the float64 result, or its leading part, from an input set.
        codes: The codes by name; `ours` and `official` are always there.
        floor_bytes: The bytes moved if every input is read once and every output written once.
        input_bytes: The memory of an input set and of what the codes make of it.
        read_bytes: The bytes moved if nothing is read from the cache; `floor_bytes` by default.
        exact: Whether our result has to be equal to the reference.
        rival_tolerance: The largest relative error of the others; by default that of the dtype.
    """

    operation: str
    model: str
    shape: str
    dtype: torch.dtype
    build: Callable[[int], Any]
    reference: Callable[[Any], Tensor]
    codes: Mapping[str, Bind]
    floor_bytes: int
    input_bytes: int
    read_bytes: int | None = None
    exact: bool = False
    rival_tolerance: float | None = None

    @property
    def title(self) -> str:
        """The case in words."""
        return f"{self.operation} {self.model} {self.shape} {short(self.dtype)}"

    def only(self, names: Collection[str]) -> "Case":
        """Return the case with only these codes."""
        kept = {name: code for name, code in self.codes.items() if name in names}
        return replace(self, codes=kept)

    def allowed(self, name: str) -> float:
        """Return the largest relative error that a code may have."""
        if name != OURS:
            if self.rival_tolerance is not None:
                return self.rival_tolerance
            return RIVAL_TOLERANCE[self.dtype]

        if self.exact:
            return 0.0
        if self.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1":
            return 1e-2  # Triton's interpreter cuts bfloat16 off, where a device rounds to nearest
        return OUR_TOLERANCE[self.dtype]


def flat(result: Result) -> Tensor:
    """Return a result as one vector, with every tensor padded as `Layout` pads it."""
    if isinstance(result, Tensor):
        padding = padded(result.numel()) - result.numel()
        return pad(result.reshape(-1), (0, padding))
    parts = result.values() if isinstance(result, Mapping) else result
    return torch.cat([flat(part) for part in parts])


def relative_error(result: Result, truth: Tensor) -> float:
    """Return |result - truth| / |truth| over the elements that `truth` has; NaN if any is NaN.

    Of integers it is the share that differs; likewise of a mask, be it words, booleans or floats.
    """
    truth = truth.reshape(-1)
    values = flat(result)
    if truth.dtype == torch.bool:
        values = unpack_mask(values) if values.dtype == torch.int32 else values != 0
    values = values[: truth.numel()].to(truth.device)
    if not truth.is_floating_point():
        return float((values != truth).double().mean())

    truth = truth.double()
    distance = float((values.double() - truth).norm())
    size = float(truth.norm())
    return distance / size if size > 0 else distance
