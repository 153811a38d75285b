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

# Input set -> the call that is timed; the preparation here is not. Every code gets its own input
# sets, so it may overwrite them.
Bind = Callable[[Any], Run]

OURS, OFFICIAL, COMPILED = "ours", "official", "compiled"

# For sums of a few rows. Ours rounds once; a rival rounds at every addition, in the rows' dtype.
OUR_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float64: 1e-12}
RIVAL_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float64: 1e-12}


@dataclass(frozen=True)
class Case:
    """One operation on one shape.

    Attributes:
        operation: the public function.
        model: the name of the model that the rows belong to.
        shape: how many clients, receivers or senders, in words.
        build: seed -> an input set.
        reference: input set -> the float64 result, or its leading part.
        codes: name -> code; `ours` and `official` are always there.
        floor_bytes: every input element read once, every output element written once.
        input_bytes: memory of an input set and of what the codes make of it.
        read_bytes: what is moved if nothing is read from the cache; `floor_bytes` by default.
        exact: whether our result has to be equal to the reference.
        rival_tolerance: of the others' relative error; by default, that of the dtype.
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
        return f"{self.operation} {self.model} {self.shape} {short(self.dtype)}"

    def only(self, names: Collection[str]) -> "Case":
        return replace(self, codes={name: self.codes[name] for name in self.codes if name in names})

    def allowed(self, name: str) -> float:
        """The largest relative error of a code."""
        if name != OURS:
            own = self.rival_tolerance
            return RIVAL_TOLERANCE[self.dtype] if own is None else own
        if self.exact:
            return 0.0
        # Triton's interpreter cuts bfloat16 off where a device rounds to nearest.
        cut = self.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1"
        return 1e-2 if cut else OUR_TOLERANCE[self.dtype]


def flat(result: Result) -> Tensor:
    """A result as one vector, every tensor padded as `Layout` pads it."""
    if isinstance(result, Tensor):
        return pad(result.reshape(-1), (0, padded(result.numel()) - result.numel()))
    parts = result.values() if isinstance(result, Mapping) else result
    return torch.cat([flat(part) for part in parts])


def relative_error(result: Result, truth: Tensor) -> float:
    """|result - truth| / |truth| over the elements that `truth` has; NaN where a result has it.

    Of integers the share that differs; of a mask too, as words, booleans or floats.
    """
    found, truth = flat(result), truth.reshape(-1)
    if truth.dtype == torch.bool:
        found = unpack_mask(found) if found.dtype == torch.int32 else found != 0
    found = found[: truth.numel()].to(truth.device)
    if not truth.is_floating_point():
        return float((found != truth).double().mean())
    truth = truth.double()
    size, distance = float(truth.norm()), float((found.double() - truth).norm())
    return distance / size if size > 0 else distance
