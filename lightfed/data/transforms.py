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

# For a batch these do what they do for a sample.
_ON_BATCHES = (v2.Identity, v2.Normalize, v2.Pad, v2.Resize, v2.ToDtype)


@dataclass(frozen=True)
class Functions:
    """The transforms of a data set, in place of `Transform`; None does nothing.

    That for tests is also for training samples that are not trained on.
    """

    train: Function | None = None
    test: Function | None = None

    @property
    def augments(self) -> bool:
        """Whether samples are trained on with another transform than they are tested with."""
        return self.train is not self.test


def steps(transform: Function | None) -> Iterator[Function]:
    """The single steps of a transform."""
    inner: Any = transform if isinstance(transform, nn.Sequential) else None
    if isinstance(transform, v2.Compose | v1.Compose):
        inner = transform.transforms
    if inner is not None:
        for step in inner:
            yield from steps(step)
    elif transform is not None:
        yield transform


def normalises(transform: Function | None) -> bool:
    """Whether a step of torchvision does; unknown of a user's own function, hence False."""
    return any(isinstance(step, v1.Normalize | v2.Normalize) for step in steps(transform))


def transformed(transform: Function | None, x: Tensor, seeds: Tensor | None) -> Tensor:
    """Samples (B, ...) after a transform, float32; uint8 that is left becomes 0..1.

    The seeds (B,) int64 on the CPU are those of the draws of each sample; None seeds all with 0.
    """
    for step in steps(transform):
        x = step(x) if isinstance(step, _ON_BATCHES) else _one_by_one(x, step, seeds)
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()


def _one_by_one(x: Tensor, step: Function, seeds: Tensor | None) -> Tensor:
    samples = []
    with seeded(0, x.device):
        for sample, seed in zip(x, [0] * len(x) if seeds is None else seeds.tolist(), strict=True):
            seed_default_generators(seed, x.device)
            samples.append(step(sample))
    return torch.stack(samples)
