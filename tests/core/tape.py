"""A recorder for a CPU, as strict as a CUDA graph: operators, their addresses and their numbers.

A step that is recorded leaves no trace. A replay runs its operators on the recorded tensors,
without the step's Python.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightfed.local.packed.steps.recorder import Body, Recorder
from tests.pretend import reads_host

Call = tuple[Any, Sequence[Any], dict[str, Any], Any]


class Forbidden(Exception):
    """A step does what a graph of a device cannot hold."""


class _Recording(TorchDispatchMode):
    """Notes operators, and what they overwrite.

    Attributes:
        calls: operators with their arguments and results.
        before: tensors that were there before the step, and copies of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.before: list[tuple[Tensor, Tensor]] = []
        self._own: set[int] = set()  # addresses of what the step has allocated, or is saved

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if reads_host(func, args) or func is torch.ops.aten.lift_fresh.default:
            raise Forbidden(f"{func} with the host")
        if any(isinstance(value, torch.Generator) for value in tree_leaves([args, given])):
            raise Forbidden(f"{func} draws")
        for tensor in written(func, args, given):
            if _place(tensor) not in self._own:
                self._own.add(_place(tensor))
                self.before.append((_whole(tensor), _whole(tensor).clone()))
        out = func(*args, **given)
        inputs = {_place(tensor) for tensor in tensors([args, given])}
        self._own |= {_place(tensor) for tensor in tensors(out)} - inputs
        self.calls.append((func, args, given, out))
        return out


class Tape(Recorder):
    """Keeps the operators of a step.

    Attributes:
        warm_steps: that ran as they are, to be recorded later.
        recorded: number of steps.
        replays: number of replays.
    """

    def __init__(self) -> None:
        self.warm_steps = self.recorded = self.replays = 0

    @override
    def warm(self) -> AbstractContextManager[None]:
        self.warm_steps += 1
        return nullcontext()

    @override
    def record(self, body: Body) -> Body:
        recording = _Recording()
        try:
            with recording:
                body()
        finally:
            for tensor, copy in recording.before:
                tensor.copy_(copy)
        self.recorded += 1

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                for call in recording.calls:
                    _again(*call)

        return replay


def _again(func: Any, args: Sequence[Any], given: dict[str, Any], out: Any) -> None:
    """Run an operator of the tape: its results go to where they were."""
    inputs = {_place(tensor) for tensor in tensors([args, given])}
    fresh = [_place(tensor) not in inputs for tensor in tensors(out)]
    if not any(fresh) and not any(True for _ in written(func, args, given)):
        return  # a view
    found = tensors(func(*args, **given))
    for new, old, is_fresh in zip(found, tensors(out), fresh, strict=True):
        if is_fresh:
            old.copy_(new)


def tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def written(func: Any, args: Sequence[Any], given: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operator changes."""
    if func is torch.ops.aten.native_batch_norm.default:  # its schema hides the statistics
        yield from tensors(args[3:5])
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors(args[place] if place < len(args) else given.get(argument.name))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _whole(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor is a view of."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0)
