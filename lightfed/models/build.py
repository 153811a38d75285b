"""Networks built from a configuration, and the data that they have to fit."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.memory import require_memory

Task = Literal["classification", "masked_lm"]


class DataSpec(Protocol):
    """Properties of the data, passed to a model's constructor if that accepts the argument."""

    @property
    def num_classes(self) -> int: ...

    @property
    def input_shape(self) -> tuple[int, ...]: ...

    @property
    def task(self) -> Task: ...


def blank(data: DataSpec, *, samples: int) -> Tensor:
    """A batch of zeros for a model of these data: (samples, *input_shape)."""
    dtype = torch.int64 if data.task == "masked_lm" else torch.float32
    return torch.zeros(samples, *data.input_shape, dtype=dtype)


def build_network(
    factory: Callable[[], nn.Module], data: DataSpec, *, key: str, rate: float = 1.0
) -> nn.Module:
    """Build a configured network; draws from torch's default generator.

    Class number, sample shape and `rate`, the width, are passed if accepted. `key` is for errors. A
    UserError if the constructor rejects its arguments, or they contradict the data.
    """
    given = {"num_classes": data.num_classes, "input_shape": data.input_shape, "rate": rate}
    taken = _accepted(factory, given, key)
    try:
        with _Fitting():
            built = factory(**taken)
    except UserError as error:
        named = f"{key}.init_args.{error.key}" if error.key else key
        raise UserError(named, error.found, error.fix) from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(key, reason(error), "correct its init_args") from error
    for name, parameter in built.named_parameters():
        empty = not is_lazy(parameter) and 0 in parameter.shape
        found = f"{name} has the shape {tuple(parameter.shape)}" if empty else ""
        require(not empty, key, found, "give sizes above 0 in its init_args")
    return built


class _Fitting(TorchFunctionMode):
    """Refuses a tensor that, with the earlier ones, is larger than memory, before it is allocated.

    Linux grants each of several layers that do not fit together.
    """

    _CREATE = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)

    def __init__(self) -> None:
        super().__init__()
        self._bytes = 0

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {} if kwargs is None else kwargs
        if func in self._CREATE:
            with suppress(RuntimeError, TypeError):  # its own error follows
                self._bytes += func(*args, **{**given, "device": "meta"}).nbytes
            require_memory(self._bytes, "", "parameters", "give smaller layers, or smaller samples")
        return func(*args, **given)


def _accepted(factory: Callable[[], nn.Module], given: dict[str, Any], key: str) -> dict[str, Any]:
    parameters = parameters_of(factory)
    taken = {name: value for name, value in given.items() if name in parameters}
    written = factory.keywords if isinstance(factory, partial) else {}
    for name, value in taken.items():
        if written.get(name) is None or _same(written[name], parameters[name].default):
            continue  # None: a parser's, for an argument without type and default
        found = f"{written[name]}, where the run has {value}"
        fix = "leave it out: it is linked from the data (rate: from the group)"
        require(_same(written[name], value), f"{key}.init_args.{name}", found, fix)
    return taken


def _same(one: Any, other: Any) -> bool:
    """Equality that treats a configuration's list as a tuple."""
    return (tuple(one) if isinstance(one, list) else one) == other


def class_of(factory: Callable[[], nn.Module]) -> Any:
    """The class or function wrapped by a partial, including jsonargparse's."""
    if isinstance(factory, partial):
        classes = [a for a in (*factory.args, factory.func) if inspect.isclass(a)]
        return classes[0] if classes else class_of(factory.func)
    return factory


def parameters_of(factory: Callable[[], nn.Module]) -> Mapping[str, inspect.Parameter]:
    """The arguments of a network's constructor, by name."""
    return inspect.signature(class_of(factory)).parameters
