"""Reads all samples of a data set of torch into columns of tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import data as torch_data

from lightfed.data.dataset import Columns, Samples
from lightfed.utils.errors import UserError, reason
from lightfed.utils.rng import seeded

# The first samples are read twice, to find random transforms.
_READ_TWICE = 32


@seeded(0)
def read_columns(source: Any, key: str) -> tuple[Columns, bool]:
    """Read all samples of a data set.

    What it draws from global random state meanwhile is always the same.

    Args:
        source: The data set.
        key: Its key, for errors.

    Returns:
        The samples as columns, and whether they are pairs of an input and a target.

    Raises:
        UserError: If the data set is empty, if its samples differ in their form or cannot be made
            into tensors, or if a sample changes when it is read again.
    """
    if not hasattr(source, "__len__"):
        raise UserError(key=key, found="it has no length", fix="give a map-style data set")
    if len(source) == 0:
        raise UserError(key=key, found="it is empty", fix="give samples")

    samples: list[dict[str, Tensor]] = []
    first_form: dict[str, Any] = {}
    for number in range(len(source)):
        original, sample = _read_sample(source, number, key)
        # Numbers of a column that begins with floats are floats.
        for name, (dtype, *_) in first_form.items():
            if dtype.is_floating_point and name in sample:
                sample[name] = sample[name].float()

        form = form_of(sample)
        if not first_form:
            first_form = form
        if form != first_form:
            raise UserError(
                key=key,
                found=f"sample {number} has {form}, and sample 0 {first_form}",
                fix="give all the same form",
            )
        samples.append(sample)

    names = list(samples[0])
    column_of = {name: [sample[name] for sample in samples] for name in names}
    columns = Columns.of(column_of, _batch_like(original))
    is_plain_pair = (
        len(names) == 2
        and not isinstance(original, Mapping)
        and not hasattr(type(original), "_make")
    )
    return columns, is_plain_pair and _is_target(columns.tensors[names[-1]])


def _read_sample(source: Any, number: int, key: str) -> tuple[Any, dict[str, Tensor]]:
    """Return a sample as the data set gives it, and its columns."""
    try:
        original = source[number]
        sample = _columns_of(original)
        is_random = number < _READ_TWICE and not _equal(sample, _columns_of(source[number]))
    except Exception as error:  # of the user's data set
        raise UserError(
            key=key,
            found=f"sample {number} cannot be used ({reason(error)})",
            fix="a sample is a pair of an input and a class or floats, or named tensors",
        ) from error

    if is_random:
        raise UserError(
            key=key,
            found=f"sample {number} changes when it is read again",
            fix="give random transforms as train_transform: the data set is read only once",
        )
    return original, sample


def _batch_like(sample: Any) -> Callable[[dict[str, Tensor]], Any]:
    """Return a function that makes of columns a batch of the same form as a sample."""
    if isinstance(sample, Mapping):
        return dict
    # A named tuple is made of an iterable by `_make`, and of its own arguments by its class.
    make = getattr(type(sample), "_make", tuple)
    return lambda columns: make(columns.values())


def _is_target(column: Tensor) -> bool:
    """Return whether a column can be what a model predicts: floats, or a number for each sample."""
    is_one_number = column.shape[1:].numel() == 1
    return column.dim() < 3 and (column.is_floating_point() or is_one_number)


def _columns_of(sample: Any) -> dict[str, Tensor]:
    """Return the columns of a sample: by the names of a dict or a named tuple, or by position."""
    if isinstance(sample, Mapping):
        items = list(sample.items())
    elif isinstance(sample, tuple | list):
        names = getattr(sample, "_fields", range(len(sample)))
        items = list(zip(names, sample, strict=True))
    else:
        raise TypeError(f"it is a {type(sample).__name__}")

    if not items:
        raise TypeError("it has no columns")

    columns = {}
    for name, value in items:
        tensor = _tensor_of(value)
        columns[str(name)] = tensor.float() if tensor.is_floating_point() else tensor
    return columns


def _tensor_of(value: Any) -> Tensor:
    is_pil_image = hasattr(value, "getbands")
    if is_pil_image:
        from torchvision.transforms.functional import pil_to_tensor

        return pil_to_tensor(value)
    return torch.as_tensor(value)


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two samples are equal; NaN is equal to NaN."""
    for name, value in one.items():
        if not torch.equal(value.nan_to_num(), other[name].nan_to_num()):
            return False
    return True


def form_of(sample: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what all samples of a data set share: their types and axes, by column.

    The first axis may have any length, and is given as "*".
    """
    form = {}
    for name, value in sample.items():
        first_axis = "*" if value.dim() else ""
        form[name] = (value.dtype, first_axis, *value.shape[1:])
    return form


def kind_of(samples: Samples) -> str:
    """Return what the samples of both splits must have in common, in words."""
    if samples.columns is not None:
        first_sample = {name: column[0] for name, column in samples.columns.tensors.items()}
        return str(form_of(first_sample))
    if samples.y.is_floating_point():
        return f"floats {tuple(samples.y.shape[1:])}"
    return "classes"


def num_shared(train: Any, test: Any) -> int:
    """Return how many samples two data sets share, if they are parts of one data set."""
    whole, train_numbers = _whole_and_numbers(train)
    whole_of_test, test_numbers = _whole_and_numbers(test)
    if whole is not whole_of_test:
        return 0
    return len(set(train_numbers) & set(test_numbers))


def _whole_and_numbers(source: Any) -> tuple[Any, Sequence[int]]:
    """Return the data set that another one may be a part of, and the numbers of its samples there.

    A part of a part is followed to the whole.
    """
    if not isinstance(source, torch_data.Subset):
        return source, range(len(source))
    whole, numbers = _whole_and_numbers(source.dataset)
    return whole, [numbers[i] for i in source.indices]
