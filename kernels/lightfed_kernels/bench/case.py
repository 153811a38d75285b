"""A case: one operation on one shape, the codes that compete in it, and what is true."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightfed_kernels.layout import ALIGNMENT
from lightfed_kernels.masks import unpack_mask

# What a call returns: rows, or the named tensors of a row, or several of either.
Result = Tensor | Mapping[str, Tensor] | Sequence[Any]

Run = Callable[[], Result]

OURS, OFFICIAL, COMPILED = "ours", "official", "compiled"


@dataclass(frozen=True)
class Contender:
    """One way to compute a case.

    Attributes:
        bind: prepares an input set in the form this code wants (not timed) and returns the call.
            What a call overwrites is cloned here, so that no contender sees another's.
        tolerance: of the error, where it is not the case's.
    """

    bind: Callable[[Any], Run]
    tolerance: float | None = None


@dataclass(frozen=True)
class Case:
    """One operation on one shape.

    Attributes:
        operation: the public function.
        model: whose rows.
        shape: in words: how many clients, receivers, tensors.
        clients: the requested number of clients; 1 where there is only one.
        build: seed -> an input set.
        reference: input set -> the float64 result, or its leading part.
        contenders: name -> code; `ours` and `official` are always there.
        floor_bytes: every input element read once, every output element written once.
        read_bytes: what is moved if nothing is read from the cache, where that is more.
        input_bytes: memory of an input set, all contenders' forms included.
        tolerance: of our relative error.
        rival_tolerance: of the others', which may accumulate in the dtype of the rows.
    """

    operation: str
    model: str
    shape: str
    clients: int
    dtype: torch.dtype
    build: Callable[[int], Any]
    reference: Callable[[Any], Tensor]
    contenders: Mapping[str, Contender]
    floor_bytes: int
    input_bytes: int
    read_bytes: int | None = None
    tolerance: float = 1e-5
    rival_tolerance: float = 1e-5

    @property
    def title(self) -> str:
        return f"{self.operation} {self.model} {self.shape} {short(self.dtype)}"

    def only(self, contenders: Collection[str]) -> "Case":
        chosen = {name: code for name, code in self.contenders.items() if name in contenders}
        return replace(self, contenders=chosen)

    def error(self, result: Result, truth: Tensor) -> float:
        """The relative error of a result, or of a mask the share of wrong elements."""
        return relative_error(flat(result), truth)

    def allowed(self, contender: str) -> float:
        own = self.contenders[contender].tolerance
        if own is not None:
            return own
        return self.tolerance if contender == OURS else self.rival_tolerance


def flat(result: Result) -> Tensor:
    """A result as one vector; named tensors become the row that `Layout` makes of them."""
    if isinstance(result, Tensor):
        return result.reshape(-1)
    if isinstance(result, Mapping):
        return torch.cat([_padded(tensor) for tensor in result.values()])
    return torch.cat([flat(part) for part in result])


def _padded(tensor: Tensor) -> Tensor:
    return pad(tensor.reshape(-1), (0, -tensor.numel() % ALIGNMENT))


def relative_error(result: Tensor, truth: Tensor) -> float:
    """|result - truth| / |truth| over the elements that `truth` has; NaN where it should not be.

    Of integers the share that differs; of a mask too, whatever form the result has it in.
    """
    result, truth = result.reshape(-1), truth.reshape(-1)
    if truth.dtype == torch.bool:
        result = unpack_mask(result) if result.dtype == torch.int32 else result != 0
    result = result[: truth.numel()].to(truth.device)
    if not truth.is_floating_point():
        return float((result != truth).double().mean())
    truth = truth.double()
    size = float(truth.norm())
    distance = float((result.double() - truth).norm())
    return distance / size if size > 0 else distance


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
