"""The batches of a split on the device, by index.

There are no worker processes and no Python loops over samples. A batch is a gather from one tensor.
The epoch of a small client is a single gather, cut into views.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NotRequired, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from lightfed.utils.memory import sent

Batch = tuple[Tensor, Tensor]
LastBatch = Literal["keep", "drop", "join"]

MEBI = 1 << 20
# Batches are gathered together up to this many bytes of float32: on a CPU what fits in its caches
# (larger gathers were measured to be slower), on a GPU enough for few kernel launches.
_GATHER_BYTES = {"cpu": 2 * MEBI, "cuda": 64 * MEBI}


@lru_cache(4096)
def batch_sizes(samples: int, batch_size: int, last_batch: LastBatch) -> tuple[int, ...]:
    """Sizes of the batches of an epoch.

    Args:
        samples: number of samples of the client.
        batch_size: size of all batches but the last.
        last_batch: keep a smaller last batch; drop it; or join it to the one before if it is a
            single sample, which BatchNorm cannot normalise.
    """
    whole, rest = divmod(samples, batch_size)
    sizes = [batch_size] * whole
    if rest and last_batch == "join" and rest == 1 and whole:
        sizes[-1] += 1
    elif rest and last_batch != "drop":
        sizes.append(rest)
    return tuple(sizes)


class How(TypedDict):
    """Arguments of `Resident.plan`."""

    batch_size: int
    generator: NotRequired[torch.Generator | None]
    order: NotRequired[torch.Generator | None]
    last_batch: NotRequired[LastBatch]
    limit: NotRequired[int | None]


@dataclass(slots=True)
class Plan:
    """One pass over n samples in order, on the CPU, in batches of these sizes.

    `draw` is that of the augmentation, (..., n) on the CPU; None for none.
    """

    index: Tensor | np.ndarray
    sizes: Sequence[int]
    draw: Tensor | None


class Resident(ABC):
    """One split, and its batches on one device; its home and labels are there, or on the CPU."""

    def __init__(self, y: Tensor, *, device: torch.device, sample_bytes: int, held: bool) -> None:
        self.device, self.home = device, device if held else torch.device("cpu")
        self.y = y.to(self.home)
        self._sample_bytes = sample_bytes  # of x in a batch
        self._gather_bytes = _GATHER_BYTES.get(device.type, _GATHER_BYTES["cpu"])

    def __len__(self) -> int:
        return len(self.y)

    @property
    def gathers(self) -> bool:
        """Whether `take` without draws only gathers on the device, by an index that is there."""
        return self.home == self.device

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> Batch:
        """The samples (B,) of an index, augmented if a generator, of the CPU, is given.

        Draws do not depend on the device. Returns x, (B, C, H, W) float32, normalised, for images,
        or (B, length) float32 for characters; and y, (B,) int64.
        """
        draw = self._draw(len(index), generator)
        return self.take(sent(index, self.home), draw)

    @abstractmethod
    def span(self, start: int, stop: int) -> Batch:
        """Samples start to stop - 1, not augmented; copies, because models may change a batch."""

    def _labels(self, start: int, stop: int) -> Tensor:
        return self._moved(self.y[start:stop].clone())

    def plan(
        self,
        index: Tensor | np.ndarray,
        *,
        batch_size: int,
        generator: torch.Generator | None = None,
        order: torch.Generator | None = None,
        last_batch: LastBatch = "keep",
        limit: int | None = None,
    ) -> Plan:
        """The order, the batches and the augmentation of one pass over the samples of an index.

        All draws are made before the first batch, so that they depend neither on the batch size nor
        on how many batches are gathered together. `index` is (n,) of an integer type, on the CPU.
        `generator` draws the augmentation, and `order` the order; None for none. There are at most
        `limit` batches.
        """
        if order is not None:
            index = index[torch.randperm(len(index), generator=order).numpy()]
        sizes = batch_sizes(len(index), batch_size, last_batch)[:limit]
        count = sum(sizes)
        draw = self._draw(count, generator) if count else None
        return Plan(index[:count], sizes, draw)

    def batches(self, plan: Plan) -> Iterator[Batch]:
        """The batches of a plan as by `batch`; no two of them share memory."""
        if not plan.sizes:
            return iter(())
        index = sent(torch.as_tensor(plan.index), self.home)
        return self._gathers(index, plan.draw, plan.sizes, plan.sizes[0])

    def epoch(self, index: Tensor | np.ndarray, **how: Unpack[How]) -> Iterator[Batch]:
        """One pass over the samples of an index, in batches; the arguments are those of `plan`."""
        return self.batches(self.plan(index, **how))

    def _gathers(
        self, index: Tensor, draw: Tensor | None, sizes: Sequence[int], batch_size: int
    ) -> Iterator[Batch]:
        """The batches of an epoch, as many gathered at once as `_GATHER_BYTES` allows."""
        together = max(1, self._gather_bytes // (batch_size * self._sample_bytes))
        start = 0
        for first in range(0, len(sizes), together):
            group = sizes[first : first + together]
            part = slice(start, start + sum(group))
            x, y = self.take(index[part], None if draw is None else draw[:, part])
            yield from zip(_cut(x, group), _cut(y, group), strict=True)
            start = part.stop

    @abstractmethod
    def _draw(self, count: int, generator: torch.Generator | None) -> Tensor | None:
        """The draws for `count` samples, (..., count) on the CPU; None if nothing is random."""

    @abstractmethod
    def take(self, index: Tensor, draw: Tensor | None) -> Batch:
        """The samples of an index where the split is; in new memory on the device."""

    def _rows(self, stored: Tensor, index: Tensor) -> Tensor:
        """Rows of a stored tensor in new memory on the device."""
        return self._moved(stored.index_select(0, index))

    def _moved(self, rows: Tensor) -> Tensor:
        """Rows on the device; copied while a GPU computes what came before."""
        return sent(rows, self.device)


class PackBatches:
    """The batches of K sessions that train side by side.

    A session has its passes over samples, one after the other.

    Attributes:
        sizes: (K, steps) samples of every batch; 0 where a session has ended.
        source, idle: as given; the samples of idle sessions are not read.
    """

    def __init__(
        self,
        source: Resident,
        sessions: Sequence[Sequence[Plan]],
        idle: Collection[int] = (),
    ) -> None:
        plans = [plan for session in sessions for plan in session]
        sizes = [[size for plan in session for size in plan.sizes] for session in sessions]
        steps = max(map(len, sizes))
        self.sizes = np.array([mine + [0] * (steps - len(mine)) for mine in sizes])
        # Where every batch begins among the samples of all sessions.
        self._starts = self.sizes.cumsum().reshape(self.sizes.shape) - self.sizes
        self.source, self.idle = source, idle
        self._spare = next((self._starts[k, 0] for k in range(len(sizes)) if k not in idle), 0)
        self._index = np.concatenate([plan.index for plan in plans])
        draws = [plan.draw for plan in plans if plan.draw is not None]
        self._draw = torch.cat(draws, -1) if draws else None

    def batch(self, places: Sequence[int], step: int) -> Batch:
        """X and y as of `Resident.batch`, (k, B, ...) each, of the next batch of k sessions.

        A batch that is smaller than the largest ends in copies of its last sample; all those of an
        idle session are copies of the first sample of another one.
        """
        sizes = self.sizes[places, step]
        offsets = np.minimum(np.arange(sizes.max()), sizes[:, None] - 1)
        span = self._starts[places, step][:, None] + offsets
        for place in self.idle:
            if place in places:
                span[list(places).index(place)] = self._spare
        where = span.ravel()
        index = sent(torch.from_numpy(self._index[where]), self.source.home)
        draw = None if self._draw is None else self._draw[..., torch.from_numpy(where)]
        x, y = self.source.take(index, draw)
        return x.unflatten(0, span.shape), y.unflatten(0, span.shape)


def _cut(samples: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    # Tensor.split does the same, ten times slower.
    return torch.split_with_sizes(samples, sizes)
