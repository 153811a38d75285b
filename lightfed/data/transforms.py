"""Transforms of torchvision, or any function, for the samples of a batch on its device.

What cannot be random is called once for a batch. Anything else is called for each sample, with
torch's generators seeded for it, so that its draws do not depend on the other samples of the batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import transforms as v1
from torchvision.transforms import v2

from lightfed.utils.rng import seed_default_generators, seeded

Function = Callable[[Any], Any]

# These do to a batch what they do to a sample, and are not random.
_ON_BATCHES = (v2.Identity, v2.Normalize, v2.Pad, v2.Resize, v2.ToDtype)


@dataclass(frozen=True)
class Functions:
    """The transforms of a data set, in place of `Transform`. None does nothing.

    Attributes:
        train: The transform of samples that are trained on.
        test: The transform of all others, also of training samples that are not trained on.
    """

    train: Function | None = None
    test: Function | None = None

    @property
    def augments(self) -> bool:
        """Whether samples are trained on with another transform than they are tested with."""
        return self.train is not self.test


def steps(transform: Function | None) -> Iterator[Function]:
    """Yield the single steps of a transform, in order."""
    if transform is None:
        return
    inner_transforms: Any = None
    if isinstance(transform, nn.Sequential):
        inner_transforms = transform
    elif isinstance(transform, v2.Compose | v1.Compose):
        inner_transforms = transform.transforms

    if inner_transforms is None:
        yield transform
        return
    for inner in inner_transforms:
        yield from steps(inner)


def normalizes(transform: Function | None) -> bool:
    """Return whether a step of torchvision normalizes. Of a user's own function it is unknown."""
    return any(isinstance(step, v1.Normalize | v2.Normalize) for step in steps(transform))


def transformed(transform: Function | None, x: Tensor, seeds: Tensor | None) -> Tensor:
    """Return samples after a transform, as float32; uint8 that is left becomes 0..1.

    Args:
        transform: The transform; None does nothing.
        x: The samples, (B, ...).
        seeds: The seed of the draws of each sample, (B,) int64 on the CPU. None seeds all with 0.
    """
    for step in steps(transform):
        x = step(x) if isinstance(step, _ON_BATCHES) else _one_by_one(x, step, seeds)

    if x.dtype == torch.uint8:
        return x.float() / 255
    return x.float()


def _one_by_one(x: Tensor, step: Function, seeds: Tensor | None) -> Tensor:
    """Return samples (B, ...) after a step that may be random, each by draws of its own."""
    seed_list = [0] * len(x) if seeds is None else seeds.tolist()
    samples = []
    with seeded(0, x.device):
        for sample, seed in zip(x, seed_list, strict=True):
            seed_default_generators(seed, x.device)
            samples.append(step(sample))
    return torch.stack(samples)
