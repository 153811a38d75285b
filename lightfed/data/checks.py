"""Samples are checked once after loading, whatever their source."""

from math import inf, isfinite

import torch

from lightfed.data.datasets.dataset import Dataset, Samples, Transform
from lightfed.utils.errors import UserError

_PART = 4096  # samples looked at together; they may be larger than memory


def loaded(dataset: Dataset) -> tuple[Samples, Samples]:
    """The training and the test split; a UserError names the first sample that is of no use."""
    splits = {"train": dataset.load("train"), "test": dataset.load("test")}
    for split, samples in splits.items():
        found = _mistake(samples, dataset)
        if found is not None:
            fix = "correct the data, or the arguments of the data set"
            raise UserError("data.dataset", f"{dataset.name}, {split} split: {found}", fix)
    return splits["train"], splits["test"]


def _mistake(samples: Samples, dataset: Dataset) -> str | None:
    given: object = samples
    if not isinstance(given, Samples):
        return f"load returns a {type(given).__name__}, not Samples"
    x, y, groups = samples.x, samples.y, samples.groups
    for part in (x, y) if groups is None else (x, y, groups):
        if not isinstance(part, torch.Tensor):
            return f"its Samples hold a {type(part).__name__}, not tensors"
    if not len(x) or not len(y):
        return "there are no samples"
    if len(x) != len(y):
        return f"{len(x)} samples, but {len(y)} labels: sample {min(len(x), len(y))} lacks one"
    if groups is not None and len(groups) != len(y):
        return f"{len(y)} samples, but {len(groups)} natural owners"
    if y.dtype != torch.int64 or y.dim() != 1:
        return f"the labels are {y.dtype} of shape {tuple(y.shape)}, not int64 of one axis"
    bad = ((y < 0) | (y >= len(dataset.classes))).nonzero()
    if len(bad):
        first = int(bad[0])
        return f"sample {first} has class {int(y[first])}, of {len(dataset.classes)} classes"
    expected, shape = tuple(dataset.input_shape), tuple(x.shape[1:])
    if isinstance(dataset.transform, Transform | None) and shape != expected:
        return f"sample 0 has the shape {shape}, not {expected}"
    if isinstance(dataset.transform, Transform):
        mean, std = dataset.transform.mean, dataset.transform.std
        if not {len(mean), len(std)} <= {1, *shape[:1]}:
            return f"the transform has {len(mean)} means and {len(std)} deviations, not {shape[0]}"
        if not all(map(isfinite, mean)) or not all(0 < value < inf for value in std):
            return f"the transform has the means {mean} and the deviations {std}"
    for start in range(0, len(x) if x.is_floating_point() else 0, _PART):
        finite = x[start : start + _PART].isfinite().flatten(1).all(1)
        if not finite.all():
            return f"sample {start + int(finite.logical_not().nonzero()[0])} is not finite"
    return None
