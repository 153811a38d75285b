"""Samples are checked once after loading, whatever their source."""

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from lightfed.data.dataset import Dataset, Samples, Transform
from lightfed.utils.errors import UserError

_PART = 4096  # samples looked at together; they may be mapped from a file


def loaded(dataset: Dataset) -> tuple[Samples, Samples]:
    """The training and the test split; a UserError names the first sample that is of no use."""
    train, test = dataset.load("train"), dataset.load("test")
    for split, samples in (("train", train), ("test", test)):
        found = _mistake(samples, dataset)
        if found is not None:
            fix = "correct the data, or the arguments of the data set"
            raise UserError("data.dataset", f"{dataset.name}, {split} split: {found}", fix)
    return train, test


def _mistake(samples: Any, dataset: Dataset) -> str | None:
    known = isinstance(samples, Samples)
    parts = [samples.x, samples.y, samples.groups] if known else [samples]
    if not all(isinstance(part, Tensor | None) for part in parts) or not known:
        kinds = ", ".join(type(part).__name__ for part in parts)
        return f"load returns {kinds}, not Samples of tensors"
    x, y, groups = parts
    if not 0 < len(x) == len(y) == len(y if groups is None else groups):
        owners = "" if groups is None else f", {len(groups)} natural owners"
        return f"{len(x)} samples, {len(y)} labels{owners}"
    if dataset.task == "regression":
        return _not_finite(x) or _not_finite(y)
    if y.dtype != torch.int64 or y.dim() != 1:
        return f"the labels are {y.dtype} of shape {tuple(y.shape)}, not int64 of one axis"
    bad = ((y < 0) | (y >= max(1, len(dataset.classes)))).nonzero()
    if len(bad):
        first = int(bad[0])
        return f"sample {first} has class {int(y[first])}, of {len(dataset.classes)} classes"
    if samples.columns is not None:
        return next(filter(None, map(_not_finite, samples.columns.tensors.values())), None)
    transform, shape = dataset.transform, tuple(x.shape[1:])
    if isinstance(transform, Transform | None) and shape != tuple(dataset.input_shape):
        return f"sample 0 has the shape {shape}, not {tuple(dataset.input_shape)}"
    if isinstance(transform, Transform):
        mean, std = transform.mean, transform.std
        fits = {len(mean), len(std)} <= {1, *shape[:1]} and min(std) > 0
        if not fits or not all(map(isfinite, mean + std)):
            return f"for {shape[0]} channels the means are {mean}, the deviations {std}"
    return _not_finite(x)


def _not_finite(x: Tensor) -> str | None:
    """The first sample with a number that is not finite."""
    for start in range(0, len(x) if x.is_floating_point() else 0, _PART):
        part = x[start : start + _PART]
        finite = part.isfinite().reshape(len(part), -1).all(1)
        if not finite.all():
            return f"sample {start + int(finite.logical_not().nonzero()[0])} is not finite"
    return None
