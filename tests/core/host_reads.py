"""Counts what would make the host wait for a device, while sessions and tests of clients run."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightfed.local.packed.evaluation import Tests
from lightfed.local.packed.session import PackedSession
from lightfed.local.session import LocalSession

# Numbers and sizes that the host needs of a tensor.
_OPERATORS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten.equal.default",
    "aten._unique2.default",
    "aten.unique_dim.default",
}
# Where there are bools, how many are true decides the shape.
_INDEXED = {"aten.index.Tensor", "aten.index_put_.default", "aten._index_put_impl_.default"}
_METHODS = ("tolist", "numpy", "cpu", "__array__")
# Lines whose tensors are on the host whatever the device.
_OF_THE_HOST = (
    "torch.randperm(len(index), generator=order).numpy()",
    "_fused_agrees(",  # once a process, on a CPU
)
_PATHS = (
    (PackedSession, "train"),
    (LocalSession, "train"),
    (LocalSession, "evaluate"),
    (Tests, "run"),
)


class _Watch(TorchDispatchMode):
    """Notes operators that read; also below other modes."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if reads_host(func, args):
            self._note(str(func))
        return func(*args, **(kwargs or {}))


def reads_host(func: Any, args: Sequence[Any]) -> bool:
    """Whether the host needs a number or a size of what an operator is given."""
    return str(func) in _OPERATORS or (str(func) in _INDEXED and _by_bools(args[1]))


def _by_bools(indices: Sequence[Tensor | None]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """The reads inside of sessions and of tests of clients: what is read, and the line that does.

    Every tensor counts as one on a device.
    """
    found: list[str] = []

    def note(what: str) -> None:
        frames = traceback.extract_stack()
        if any(line in (f.line or "") for f in frames for line in _OF_THE_HOST):
            return
        if any("/lightfed_kernels/" in f.filename for f in frames):
            return  # what a CPU runs; on a card it is a kernel
        at = [f for f in frames if "/lightfed/" in f.filename][-1]
        found.append(f"{what} at {at.filename.rsplit('/lightfed/')[-1]}:{at.lineno} {at.line}")

    @contextmanager
    def watching() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, _Watch(note):
            for name in _METHODS:
                patch.setattr(Tensor, name, _noted(name, note))
            yield

    with within_sessions(watching):
        yield found


@contextmanager
def within_sessions(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter a context wherever a session or a test of clients runs."""

    def wrapped(genuine: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **settings: Any) -> Any:
            with context():
                return genuine(*args, **settings)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for kind, name in _PATHS:
            patch.setattr(kind, name, wrapped(getattr(kind, name)))
        yield


def _noted(name: str, note: Callable[[str], None]) -> Callable[..., Any]:
    genuine = getattr(torch.Tensor, name)

    def call(self: Tensor, *args: Any, **settings: Any) -> Any:
        note(name)
        return genuine(self, *args, **settings)

    return call
