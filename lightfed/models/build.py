"""Networks built from a configuration, and the data that they have to fit."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightfed.utils.errors import UserError, reason, require

Task = Literal["classification", "masked_lm", "regression", "columns"]


class DataSpec(Protocol):
    """Properties of the data, passed to a model's constructor if that accepts the argument."""

    @property
    def num_classes(self) -> int: ...

    @property
    def input_shape(self) -> tuple[int, ...]: ...

    @property
    def task(self) -> Task: ...

    def longest(self) -> Any: ...

    trainer: Any


def blank(data: DataSpec, *, samples: int) -> Tensor:
    """A batch of zeros for a model of these data: (samples, *input_shape).

    A UserError for samples of named columns: what needs such a batch needs one tensor a sample.
    """
    found = "it works on networks, and the samples are named columns"
    fix = "choose another one, such as FedAvg"
    require(data.task != "columns", "model.algorithm", found, fix)
    dtype = torch.int64 if data.task == "masked_lm" else torch.float32
    return torch.zeros(samples, *data.input_shape, dtype=dtype)


def build_network(
    factory: Callable[[], nn.Module], data: DataSpec, *, key: str, rate: float = 1.0
) -> nn.Module:
    """Build a configured network; draws from torch's default generator.

    Class number, sample shape and `rate`, the width, are passed if accepted; of named columns only
    `rate`. `key` is for errors. A UserError if the constructor rejects its arguments, or they
    contradict the data.
    """
    given: dict[str, Any] = {"rate": rate}
    if data.task != "columns":
        given |= {"num_classes": data.num_classes, "input_shape": data.input_shape}
    taken = _accepted(factory, given, key)
    try:
        built = factory(**taken)
    except UserError as error:
        named = f"{key}.init_args.{error.key}" if error.key else key
        raise UserError(named, error.found, error.fix) from error
    except Exception as error:  # an empty list and zero heads raise anything
        raise UserError(_suspect(factory, key), reason(error), "correct its init_args") from error
    for name, tensor in (*built.named_parameters(), *built.named_buffers()):
        found = f"{name} is lazy: it has no shape before the first batch"
        require(not is_lazy(tensor), key, found, "give its layer all of its sizes")
    for name, parameter in built.named_parameters():
        found = f"{name} has the shape {tuple(parameter.shape)}"
        require(0 not in parameter.shape, key, found, "give sizes above 0 in its init_args")
    return built


def _suspect(factory: Callable[[], nn.Module], key: str) -> str:
    """The key of the argument that is empty or zero, if there is only one; else the network's."""
    written = factory.keywords if isinstance(factory, partial) else {}
    nothing = [name for name, value in written.items() if value in (0, [], ()) and value != ""]
    named = [name for name in nothing if not isinstance(written[name], bool | float)]
    return f"{key}.init_args.{named[0]}" if len(named) == 1 else key


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
