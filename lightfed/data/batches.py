"""The batches of a split on the device, by index, and their augmentation.

There are no worker processes and no Python loops over samples. A batch is a gather from one tensor.
The epoch of a small client is a single gather, cut into views.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightfed.data.datasets.dataset import Dataset, Samples, Transform
from lightfed.data.datasets.transforms import Functions, transformed
from lightfed.data.erase import Size, draw_rectangles, hidden

Batch = tuple[Tensor, Tensor]
LastBatch = Literal["keep", "drop", "join"]
Place = Literal["auto", "device", "host", "mapped"]

MEBI = 1 << 20
# Batches are gathered together up to this many bytes of float32: on a CPU what fits in its caches
# (larger gathers were measured to be slower), on a GPU enough for few kernel launches.
_GATHER_BYTES = {"cpu": 2 * MEBI, "cuda": 64 * MEBI}


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Values on a device; those of the host are copied from pinned memory."""
    if device.type == "cpu" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


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

    def __init__(
        self, samples: Samples, *, device: torch.device, sample_bytes: int, held: bool
    ) -> None:
        self.device, self.home = device, device if held else torch.device("cpu")
        self._x, self.y = samples.x.to(self.home), samples.y.to(self.home)
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
        """The batches of a plan as by `batch`; no two of them share memory.

        As many are gathered at once as `_GATHER_BYTES` allows.
        """
        if not plan.sizes:
            return
        index, draw = sent(torch.as_tensor(plan.index), self.home), plan.draw
        together = max(1, self._gather_bytes // (plan.sizes[0] * self._sample_bytes))
        start = 0
        for first in range(0, len(plan.sizes), together):
            group = plan.sizes[first : first + together]
            part = slice(start, start + sum(group))
            x, y = self.take(index[part], None if draw is None else draw[:, part])
            # Tensor.split does the same, ten times slower.
            cut = torch.split_with_sizes
            yield from zip(cut(x, group), cut(y, group), strict=True)
            start = part.stop

    @abstractmethod
    def _draw(self, count: int, generator: torch.Generator | None) -> Tensor | None:
        """The draws for `count` samples, (..., count) on the CPU; None if nothing is random."""

    @abstractmethod
    def take(self, index: Tensor, draw: Tensor | None) -> Batch:
        """The samples of an index where the split is; in new memory on the device."""


class ResidentSplit(Resident):
    """Images, or samples of numbers.

    A small split is stored as normalised float32. A large one is stored unchanged, and each batch
    is normalised by the same arithmetic, hence to the same bits. A split that is cropped is stored
    unchanged with a black border; a border of the mean colour, and erased rectangles, are set to 0
    after the normalisation of a batch. For channels_last a split is stored as NHWC, and a batch is
    permuted after the gather, which copies nothing. A split that the device does not hold is stored
    unchanged, and each batch is bordered after its copy.
    """

    def __init__(
        self,
        samples: Samples,
        transform: Transform,
        *,
        device: torch.device,
        channels_last: bool = False,
        train: bool,
        held: bool = True,
        float_limit: int = 512 * MEBI,
    ) -> None:
        """Move a split to a device, or leave it on the host and copy each batch, unless `held`.

        `channels_last` is ignored for other shapes than images. Crop, flip and erasing apply if
        `train`. A split of at most `float_limit` bytes is stored as normalised float32.
        """
        shape = samples.x.shape[1:]
        size = 4 * shape.numel()
        super().__init__(samples, device=device, sample_bytes=size, held=held)
        self._held = held
        self._last = channels_last and samples.x.dim() == 4
        self._flip = train and transform.flip
        self._padding = transform.crop_padding if train else 0
        self._erase = transform.erase if train else 0.0
        self._beyond = self._padding > 0 and transform.padding == "mean"
        self._size: Size = (shape[1], shape[2]) if len(shape) == 3 else (0, 0)
        x = self._x
        shift, scale = (constant.to(device) for constant in _constants(transform, x))
        # Useless with a crop: converting a copy costs no more than copying 4 times the bytes.
        self._ready = held and not self._padding and 4 * x.numel() <= float_limit
        if self._ready:
            x = x.to(torch.float32, copy=True).sub_(shift).mul_(scale)
        # Shaped like a sample: broadcasting over an innermost axis of 3 channels is 7 times slower.
        self._shift = self._memory(shift.expand(1, *shape))[0]
        self._scale = self._memory(scale.expand(1, *shape))[0]
        self._x = self._bordered(x) if held else x
        self._plain, self._windows = self._views(self._x) if held else (x, x)

    def _bordered(self, x: Tensor) -> Tensor:
        """Samples as they are stored on the device, with a border."""
        return self._memory(F.pad(x, (self._padding,) * 4) if self._padding else x)

    def _views(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Bordered samples without their border, and all windows: (N, top, left, *sample)."""
        if not self._padding:
            return x, x
        row = 1 if self._last else 2  # the axis of rows; that of columns comes next
        windows = x.unfold(row, self._size[0], 1).unfold(row + 1, self._size[1], 1)
        windows = windows.movedim((row, row + 1, -2, -1), (1, 2, row + 2, row + 3))
        return windows[:, self._padding, self._padding], windows

    @override
    def span(self, start: int, stop: int) -> Batch:
        x = self._plain[start:stop]
        if not self._held:
            x = self._memory(sent(x, self.device))
        x = x.to(torch.float32, copy=True)
        if not self._ready:
            x.sub_(self._shift).mul_(self._scale)
        return self._logical(x.contiguous()), sent(self.y[start:stop].clone(), self.device)

    @override
    def _draw(self, count: int, generator: torch.Generator | None) -> Tensor | None:
        """(3, count) on the CPU: top and left edge of each crop, and 1 for a mirrored sample.

        With erasing (7, count): also the rectangles.
        """
        if generator is None or not (self._padding or self._flip or self._erase):
            return None
        offsets = torch.randint(0, 2 * self._padding + 1, (2, count), generator=generator)
        mirrored = torch.randint(0, 2 if self._flip else 1, (1, count), generator=generator)
        if not self._erase:
            return torch.cat((offsets, mirrored))
        erased = draw_rectangles(count, self._size, probability=self._erase, generator=generator)
        return torch.cat((offsets, mirrored, erased))

    @override
    def take(self, index: Tensor, draw: Tensor | None) -> Batch:
        """Gather, normalise, erase and mirror the samples of an index on the device."""
        y = sent(self.y.index_select(0, index), self.device)
        plain, windows = self._plain, self._windows
        if not self._held:
            rows = sent(self._x.index_select(0, index), self.device)
            plain, windows = self._views(self._bordered(rows))
            index = torch.arange(len(index), device=self.device)
        if draw is None or not self._padding:
            x = plain.index_select(0, index)
        else:
            top, left = sent(draw[:2], self.device)
            x = windows[index.long(), top, left]
        x = x.float().contiguous()
        if not self._ready:
            x.sub_(self._shift).mul_(self._scale)
        if draw is not None and (self._erase or self._beyond):
            places = sent(torch.cat((draw[:2], draw[3:])), self.device)
            mask = hidden(self._size, places, border=self._padding, beyond=self._beyond)
            x.masked_fill_(mask.unsqueeze(3 if self._last else 1), 0.0)
        if draw is not None and self._flip:
            # Selected on the CPU, to avoid waiting for the device.
            mirrored = sent(draw[2].nonzero().squeeze(1), self.device)
            width = 2 if self._last else 3
            x.index_copy_(0, mirrored, x.index_select(0, mirrored).flip(width))
        return self._logical(x), y

    def _memory(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to the stored order of axes: (N, H, W, C) for channels_last."""
        return (x.permute(0, 2, 3, 1) if self._last else x).contiguous()

    def _logical(self, x: Tensor) -> Tensor:
        """The inverse of `_memory`, a view."""
        return x.permute(0, 3, 1, 2) if self._last else x


class _Converted(Resident):
    """Samples that are stored as they are loaded, and converted in batches."""

    @override
    def span(self, start: int, stop: int) -> Batch:
        return self._batch(self._x[start:stop].clone(), self.y[start:stop].clone(), None)

    @override
    def take(self, index: Tensor, draw: Tensor | None) -> Batch:
        x, y = self._x.index_select(0, index), self.y.index_select(0, index)
        return self._batch(x, y, draw)

    @abstractmethod
    def _batch(self, x: Tensor, y: Tensor, draw: Tensor | None) -> Batch:
        """A batch on the device of stored samples and labels, which it may change."""


class ResidentTokens(_Converted):
    """Tokens or characters, stored in few bytes and converted in batches.

    Windows of tokens become int64, and copies are their targets. Characters become float32, like
    all samples to classify; a model converts them to indices. Nothing is random here: a model draws
    the positions to mask.
    """

    def __init__(
        self, samples: Samples, *, device: torch.device, windows: bool, held: bool
    ) -> None:
        self._dtype, self._windows = torch.int64 if windows else torch.float32, windows
        size = samples.x.shape[1] * self._dtype.itemsize
        super().__init__(samples, device=device, sample_bytes=size, held=held)

    @override
    def _draw(self, count: int, generator: torch.Generator | None) -> None:
        return None

    @override
    def _batch(self, x: Tensor, y: Tensor, draw: Tensor | None) -> Batch:
        x = sent(x, self.device).to(self._dtype)
        return x, x.clone() if self._windows else sent(y, self.device)


class ResidentFunctions(_Converted):
    """Samples whose batches go through a user's functions on the device."""

    def __init__(
        self,
        samples: Samples,
        functions: Functions,
        *,
        device: torch.device,
        channels_last: bool = False,
        train: bool,
        held: bool = True,
    ) -> None:
        self._plain, self._augmented = functions.test, functions.train if train else functions.test
        size = 4 * transformed(samples.x[:1].clone(), self._plain, None).numel()
        super().__init__(samples, device=device, sample_bytes=size, held=held)
        self._last = channels_last

    @property
    @override
    def gathers(self) -> bool:
        return False

    @override
    def _draw(self, count: int, generator: torch.Generator | None) -> Tensor | None:
        """(1, count) on the CPU: the seed of each sample."""
        if generator is None or self._augmented is self._plain:
            return None
        return torch.randint(0, 2**62, (1, count), generator=generator)

    @override
    def _batch(self, x: Tensor, y: Tensor, draw: Tensor | None) -> Batch:
        function, seeds = (self._plain, None) if draw is None else (self._augmented, draw[0])
        x = transformed(sent(x, self.device), function, seeds)
        if self._last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x, sent(y, self.device)


class PackBatches:
    """The batches of K sessions that train side by side.

    A session has its passes over samples, one after the other.

    Attributes:
        sizes: (K, steps) samples of every batch; 0 where a session has ended.
        source: as given.
    """

    def __init__(self, source: Resident, sessions: Sequence[Sequence[Plan]]) -> None:
        plans = [plan for session in sessions for plan in session]
        sizes = [[size for plan in session for size in plan.sizes] for session in sessions]
        steps = max(map(len, sizes))
        self.sizes = np.array([mine + [0] * (steps - len(mine)) for mine in sizes])
        # Where every batch begins among the samples of all sessions.
        self._starts = self.sizes.cumsum().reshape(self.sizes.shape) - self.sizes
        self.source = source
        self._index = np.concatenate([plan.index for plan in plans])
        draws = [plan.draw for plan in plans if plan.draw is not None]
        self._draw = torch.cat(draws, -1) if draws else None

    def batch(self, places: Sequence[int], step: int) -> Batch:
        """X and y as of `Resident.batch`, (k, B, ...) each, of the next batch of k sessions.

        A batch that is smaller than the largest ends in copies of its last sample.
        """
        sizes = self.sizes[places, step]
        offsets = np.minimum(np.arange(sizes.max()), sizes[:, None] - 1)
        span = self._starts[places, step][:, None] + offsets
        where = span.ravel()
        index = sent(torch.from_numpy(self._index[where]), self.source.home)
        draw = None if self._draw is None else self._draw[..., torch.from_numpy(where)]
        x, y = self.source.take(index, draw)
        return x.unflatten(0, span.shape), y.unflatten(0, span.shape)


def resident(
    samples: Samples,
    dataset: Dataset,
    *,
    device: torch.device,
    place: Place,
    last: bool = False,
    train: bool,
) -> Resident:
    """A split where it should be; the bits of its batches do not depend on that.

    `place`: on the device; in the memory of the host; or as it was loaded, which for a data set in
    the cache folder is mapped from there; "auto" is the first with memory to spare. `last` gives
    images in the memory format channels_last.
    """
    if place == "auto":
        place = _place(samples.x.nbytes, device)
    if place == "host":
        samples = Samples(samples.x.clone(), samples.y, samples.groups)
    transform, held = dataset.transform, place == "device"
    if transform is None:
        windows = dataset.task == "masked_lm"
        return ResidentTokens(samples, device=device, windows=windows, held=held)
    given: dict[str, Any] = {"device": device, "channels_last": last, "train": train}
    if isinstance(transform, Functions):
        return ResidentFunctions(samples, transform, **given, held=held)
    return ResidentSplit(samples, transform, **given, held=held)


def _place(size: int, device: torch.device) -> Place:
    """Where so many bytes fit in half of the free memory, which leaves space for models."""
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host
    if 2 * size <= free:
        return "device"
    return "host" if 2 * size <= host else "mapped"


def _constants(transform: Transform, x: Tensor) -> tuple[Tensor, Tensor]:
    """Shift and scale of channels, (C, 1, 1) for images: (x - shift) * scale is normalised."""
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    shape = (-1,) + (1,) * (x.dim() - 2)
    mean = torch.tensor(transform.mean, dtype=torch.float64).view(shape) * unit
    std = torch.tensor(transform.std, dtype=torch.float64).view(shape) * unit
    return mean.float().to(x.device), std.reciprocal().float().to(x.device)
