"""Samples are checked once after loading, whatever their source."""

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from lightfed.data.dataset import Dataset, Samples, Transform
from lightfed.utils.errors import UserError

# Samples that are looked at together. They may be mapped from a file that is larger than memory.
_AT_A_TIME = 4096


def loaded(dataset: Dataset) -> tuple[Samples, Samples]:
    """Load the training and the test split, and check them.

    Raises:
        UserError: If a sample cannot be used. It names the first one.
    """
    train = dataset.load("train")
    test = dataset.load("test")
    for split, samples in (("train", train), ("test", test)):
        mistake = first_mistake(samples, dataset)
        if mistake is not None:
            raise UserError(
                key="data.dataset",
                found=f"{dataset.name}, {split} split: {mistake}",
                fix="correct the data, or the arguments of the data set",
            )
    return train, test


def first_mistake(samples: Any, dataset: Dataset) -> str | None:
    """Return the first thing that is wrong with a split, in words; None if it can be used."""
    mistake = _mistake_in_types(samples) or _mistake_in_sizes(samples)
    if mistake is not None:
        return mistake

    if dataset.task == "regression":
        return _not_finite(samples.x) or _not_finite(samples.y)

    mistake = _mistake_in_labels(samples.y, len(dataset.classes))
    if mistake is not None:
        return mistake

    if samples.columns is not None:
        for column in samples.columns.tensors.values():
            mistake = _not_finite(column)
            if mistake is not None:
                return mistake
        return None
    return _mistake_in_transform(samples.x, dataset) or _not_finite(samples.x)


def _mistake_in_types(samples: Any) -> str | None:
    """Return what is no tensor: a user's `load` may return anything."""
    if not isinstance(samples, Samples):
        return f"load returns {type(samples).__name__}, not Samples of tensors"
    values = (samples.x, samples.y, samples.groups)
    if not all(isinstance(value, Tensor | None) for value in values):
        kinds = ", ".join(type(value).__name__ for value in values)
        return f"load returns {kinds}, not Samples of tensors"
    return None


def _mistake_in_sizes(samples: Samples) -> str | None:
    """Return the numbers of samples, labels and owners, if they differ or are 0."""
    num_samples = len(samples.x)
    num_labels = len(samples.y)
    counts = f"{num_samples} samples, {num_labels} labels"
    num_owners = num_samples
    if samples.groups is not None:
        num_owners = len(samples.groups)
        counts += f", {num_owners} natural owners"

    if num_samples == 0 or num_labels != num_samples or num_owners != num_samples:
        return counts
    return None


def _mistake_in_labels(y: Tensor, num_classes: int) -> str | None:
    """Return the first label that is no class."""
    if y.dtype != torch.int64 or y.dim() != 1:
        return f"the labels are {y.dtype} of shape {tuple(y.shape)}, not int64 of one axis"
    # Without classes all labels are 0.
    is_no_class = (y < 0) | (y >= max(1, num_classes))
    if is_no_class.any():
        first = int(is_no_class.nonzero()[0])
        return f"sample {first} has class {int(y[first])}, of {num_classes} classes"
    return None


def _mistake_in_transform(x: Tensor, dataset: Dataset) -> str | None:
    """Return how samples differ from what the data set says of their shape and channels."""
    transform = dataset.transform
    shape = tuple(x.shape[1:])
    # Functions may change the shape; then `input_shape` is that of the result.
    has_stated_shape = transform is None or isinstance(transform, Transform)
    if has_stated_shape and shape != tuple(dataset.input_shape):
        return f"sample 0 has the shape {shape}, not {tuple(dataset.input_shape)}"
    if not isinstance(transform, Transform):
        return None

    mean = transform.mean
    std = transform.std
    fits_channels = {len(mean), len(std)} <= {1, *shape[:1]}
    all_finite = all(isfinite(number) for number in mean + std)
    if not fits_channels or not all_finite or min(std) <= 0:
        return f"for {shape[0]} channels the means are {mean}, the deviations {std}"
    return None


def _not_finite(x: Tensor) -> str | None:
    """Return the first sample with a number that is not finite."""
    if not x.is_floating_point():
        return None
    for start in range(0, len(x), _AT_A_TIME):
        samples = x[start : start + _AT_A_TIME]
        is_finite = samples.isfinite().reshape(len(samples), -1).all(1)
        if not is_finite.all():
            first = start + int(is_finite.logical_not().nonzero()[0])
            return f"sample {first} is not finite"
    return None
