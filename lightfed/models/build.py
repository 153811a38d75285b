"""Networks built from a configuration, and the data that they have to fit."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lightfed.utils.errors import UserError, require

Task = Literal["classification", "masked_lm"]


class DataSpec(Protocol):
    """Properties of the data that a model needs.

    Passed to its constructor if that accepts the argument.
    """

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

    Args:
        factory: as jsonargparse makes it, or any function.
        data: number of classes and shape of a sample, passed if accepted.
        key: configuration key for errors.
        rate: width, passed if accepted.

    Raises:
        UserError: the constructor rejects its arguments, or they contradict the data.
    """
    given = {"num_classes": data.num_classes, "input_shape": data.input_shape, "rate": rate}
    taken = _accepted(factory, given, key)
    try:
        return factory(**taken)
    except UserError as error:
        raise UserError(f"{key}.init_args.{error.key}", error.found, error.fix) from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(key, str(error), "correct its init_args") from error


def _accepted(factory: Callable[[], nn.Module], given: dict[str, Any], key: str) -> dict[str, Any]:
    parameters = parameters_of(factory)
    taken = {name: value for name, value in given.items() if name in parameters}
    written = factory.keywords if isinstance(factory, partial) else {}
    for name, value in taken.items():
        if name not in written or _same(written[name], parameters[name].default):
            continue
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
