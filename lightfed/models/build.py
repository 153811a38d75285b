"""Networks built from a configuration, and the data that they have to fit."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightfed.models.compiled import unwrapped
from lightfed.utils.errors import UserError, reason

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


def blank(data: DataSpec, *, samples: int) -> Tensor:
    """Return a batch of zeros for a model of these data, (samples, *input_shape).

    Raises:
        UserError: If samples are named columns: what needs such a batch needs one tensor a sample.
    """
    if data.task == "columns":
        raise UserError(
            key="model.algorithm",
            found="it needs a plain network, but the samples have named columns",
            fix="choose another one, such as FedAvg",
        )
    dtype = torch.int64 if data.task == "masked_lm" else torch.float32
    return torch.zeros(samples, *data.input_shape, dtype=dtype)


def build_network(
    factory: Callable[[], nn.Module], data: DataSpec, *, key: str, rate: float = 1.0
) -> nn.Module:
    """Build a configured network, which draws from torch's default generator.

    The number of classes, the shape of a sample and the width are passed to its constructor if that
    accepts them: as `num_classes`, `input_shape` and `rate`. Named columns have no classes and no
    shape.

    Args:
        factory: The constructor, or a partial with the configured arguments.
        data: The data.
        key: The key of the network, for errors.
        rate: The width of the network, as a share of the widest one.

    Raises:
        UserError: If the constructor rejects its arguments, or they contradict the data, or the
            network has a parameter without elements.
    """
    accepted = _linked(factory, data, rate)
    _check_no_contradiction(factory, accepted, key)
    try:
        network = factory(**accepted)
    except UserError as error:
        argument_key = f"{key}.init_args.{error.key}" if error.key else key
        raise UserError(argument_key, error.found, error.fix) from error
    except Exception as error:
        # An empty list and zero heads raise anything.
        raise UserError(
            key=_suspect(factory, key), found=reason(error), fix="correct its init_args"
        ) from error

    network = unwrapped(network, key)
    _check_sizes(network, key)
    return network


def constructor_arguments(
    factory: Callable[[], nn.Module], data: DataSpec, *, rate: float = 1.0
) -> dict[str, Any]:
    """Return the arguments that `build_network` gives to the constructor, by name.

    Args:
        factory: The constructor, or a partial with the configured arguments.
        data: The data.
        rate: The width of the network, as a share of the widest one.
    """
    return {**_configured(factory), **_linked(factory, data, rate)}


def _linked(factory: Callable[[], nn.Module], data: DataSpec, rate: float) -> dict[str, Any]:
    """Return the arguments that follow from the data and the group, if the constructor has them."""
    linked: dict[str, Any] = {"rate": rate}
    if data.task != "columns":
        linked["num_classes"] = data.num_classes
        linked["input_shape"] = data.input_shape
    return {name: value for name, value in linked.items() if name in parameters_of(factory)}


def _check_no_contradiction(
    factory: Callable[[], nn.Module], linked: Mapping[str, Any], key: str
) -> None:
    """Refuse configured arguments with other values than those linked from the data."""
    parameters = parameters_of(factory)
    configured = _configured(factory)
    for name, value in linked.items():
        written = configured.get(name)
        # A parser writes None for an argument without type and default, and else the default.
        is_left_out = written is None or _same(written, parameters[name].default)
        if not is_left_out and not _same(written, value):
            raise UserError(
                key=f"{key}.init_args.{name}",
                found=f"{written}, where the run has {value}",
                fix="leave it out: it is linked from the data (rate: from the group)",
            )


def _check_sizes(network: nn.Module, key: str) -> None:
    """Refuse tensors whose shape is not known yet, and parameters without elements."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if is_lazy(tensor):
            raise UserError(
                key=key,
                found=f"{name} is lazy: it has no shape before the first batch",
                fix="give its layer all of its sizes",
            )
    for name, parameter in network.named_parameters():
        if 0 in parameter.shape:
            raise UserError(
                key=key,
                found=f"{name} has the shape {tuple(parameter.shape)}",
                fix="give sizes above 0 in its init_args",
            )


def _suspect(factory: Callable[[], nn.Module], key: str) -> str:
    """Return the key of the only argument that is empty or 0; otherwise the network's key."""
    suspects = []
    for name, value in _configured(factory).items():
        is_size = not isinstance(value, bool | float | str)
        if is_size and value in (0, [], ()):
            suspects.append(name)
    if len(suspects) == 1:
        return f"{key}.init_args.{suspects[0]}"
    return key


def _configured(factory: Callable[[], nn.Module]) -> Mapping[str, Any]:
    """Return the arguments that a configuration has given to a network, by name."""
    return factory.keywords if isinstance(factory, partial) else {}


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; a configuration's list is equal to a tuple."""
    if isinstance(one, list):
        one = tuple(one)
    return bool(one == other)


def class_of(factory: Callable[[], nn.Module]) -> Any:
    """Return the class or function that a partial wraps, also one of jsonargparse's."""
    if not isinstance(factory, partial):
        return factory
    for candidate in (*factory.args, factory.func):
        if inspect.isclass(candidate):
            return candidate
    return class_of(factory.func)


def parameters_of(factory: Callable[[], nn.Module]) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a network's constructor, by name."""
    return inspect.signature(class_of(factory)).parameters
