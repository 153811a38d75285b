"""The batches of a split on the device, by index, and their augmentation.

There are no worker processes and no Python loops over samples. A batch is a gather from one tensor.
The epoch of a small client is a single gather, cut into views.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightfed.data.dataset import Dataset, Samples, Transform
from lightfed.data.transforms import Functions, transformed
from lightfed.utils.memory import free_memory

Batch = tuple[Tensor, Tensor]
LastBatch = Literal["keep", "drop", "join"]
Place = Literal["auto", "device", "host"]

_AREA = (0.04, 0.2)
_RATIO = (0.5, 2.0)

Size = tuple[int, int]
"""Height and width of an image."""

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

    def repeated(self, times: int) -> "Plan":
        """The pass with every batch so many times in succession."""
        if times == 1:
            return self
        ends = np.cumsum(self.sizes)
        batches = [np.arange(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        where = np.concatenate([batch for batch in batches for _ in range(times)])
        draw = None if self.draw is None else self.draw[..., torch.from_numpy(where)]
        return Plan(self.index[where], np.repeat(self.sizes, times).tolist(), draw)


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

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> Batch:
        """The samples (B,) of an index, augmented if a generator, of the CPU, is given.

        Draws do not depend on the device. Returns x, (B, C, H, W) float32, normalised, for images,
        or (B, length) float32 for characters; and y, (B,) int64.
        """
        draw = self._draw(len(index), generator)
        return self.take(sent(index, self.home), draw)

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
        together = self.together(plan.sizes[0])
        start = 0
        for first in range(0, len(plan.sizes), together):
            group = plan.sizes[first : first + together]
            part = slice(start, start + sum(group))
            x, y = self.take(index[part], None if draw is None else draw[:, part])
            # Tensor.split does the same, ten times slower.
            cut = torch.split_with_sizes
            yield from zip(cut(x, group), cut(y, group), strict=True)
            start = part.stop

    def together(self, samples: int) -> int:
        """How many batches of so many samples are gathered at once."""
        return max(1, self._gather_bytes // max(1, samples * self._sample_bytes))

    def _draw(self, count: int, generator: torch.Generator | None) -> Tensor | None:
        """The draws for `count` samples, (..., count) on the CPU; None if nothing is random."""
        return None

    @abstractmethod
    def take(self, index: Tensor, draw: Tensor | None) -> Batch:
        """The samples of an index where the split is; in new memory on the device."""


class ResidentSplit(Resident):
    """Images, or samples of numbers.

    A small split is stored as normalised float32. A large one, one that is cropped, and one that
    the device does not hold are stored unchanged, and each batch is normalised by the same
    arithmetic, hence to the same bits. Black borders are normalised with their image; those of the
    mean colour, and erased rectangles, are set to 0 afterwards. For channels_last a split is stored
    as NHWC, and a batch is permuted after the gather, which copies nothing.
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
        self._held, self._last = held, channels_last and samples.x.dim() == 4
        self._transform = transform if train else transform.fixed()
        self._size: Size = (shape[1], shape[2]) if len(shape) == 3 else (0, 0)
        shift, scale = (constant.to(device) for constant in _constants(transform, self._x))
        # Useless with a crop: converting a copy costs no more than copying 4 times the bytes.
        cropped = self._transform.crop_padding > 0
        self._ready = held and not cropped and 4 * self._x.numel() <= float_limit
        if self._ready:
            self._x = self._x.to(torch.float32, copy=True).sub_(shift).mul_(scale)
        # Shaped like a sample: broadcasting over an innermost axis of 3 channels is 7 times slower.
        self._shift = self._memory(shift.expand(1, *shape))[0]
        self._scale = self._memory(scale.expand(1, *shape))[0]
        if held:
            self._x = self._memory(self._x)

    @override
    def _draw(self, count: int, generator: torch.Generator | None) -> Tensor | None:
        """(3, count) on the CPU: top and left edge of each crop, and 1 for a mirrored sample.

        With erasing (7, count): also the rectangles.
        """
        how = self._transform
        if generator is None or not how.augments:
            return None
        offsets = torch.randint(0, 2 * how.crop_padding + 1, (2, count), generator=generator)
        mirrored = torch.randint(0, 2 if how.flip else 1, (1, count), generator=generator)
        if not how.erase:
            return torch.cat((offsets, mirrored))
        erased = draw_rectangles(count, self._size, probability=how.erase, generator=generator)
        return torch.cat((offsets, mirrored, erased))

    @override
    def take(self, index: Tensor, draw: Tensor | None) -> Batch:
        """Gather, normalise, erase, crop and mirror the samples of an index on the device."""
        x = sent(self._x.index_select(0, index), self.device)
        if not self._held:
            x = self._memory(x).clone(memory_format=torch.contiguous_format)
        return self._finished(x.float(), draw), sent(self.y.index_select(0, index), self.device)

    def _finished(self, x: Tensor, draw: Tensor | None) -> Tensor:
        """Float samples, which may change, as they are in a batch."""
        how = self._transform
        if not self._ready:
            x.sub_(self._shift).mul_(self._scale)
        if draw is not None and how.erase:
            mask = erased(self._size, sent(draw[3:], self.device))
            x.masked_fill_(mask.unsqueeze(3 if self._last else 1), 0.0)
        if draw is not None and how.crop_padding:
            x = self._cropped(x, *sent(draw[:2], self.device))
        if draw is not None and how.flip:
            # Selected on the CPU, to avoid waiting for the device.
            mirrored = sent(draw[2].nonzero().squeeze(1), self.device)
            width = 2 if self._last else 3
            x.index_copy_(0, mirrored, x.index_select(0, mirrored).flip(width))
        return x.permute(0, 3, 1, 2) if self._last else x

    def _cropped(self, x: Tensor, top: Tensor, left: Tensor) -> Tensor:
        """The windows of bordered samples with these upper left corners."""
        row = 1 if self._last else 2  # the axis of rows; that of columns comes next
        added = self._transform.crop_padding
        shape = [n + 2 * added * (axis in (row, row + 1)) for axis, n in enumerate(x.shape)]
        bordered = x.new_zeros(shape)  # of the mean colour
        if self._transform.padding == "black":
            black = -self._shift * self._scale
            bordered += black.narrow(row - 1, 0, 1).narrow(row, 0, 1)
        height, width = self._size
        bordered.narrow(row, added, height).narrow(row + 1, added, width).copy_(x)
        windows = bordered.unfold(row, height, 1).unfold(row + 1, width, 1)
        windows = windows.movedim((row, row + 1, -2, -1), (1, 2, row + 2, row + 3))
        return windows[torch.arange(len(x), device=self.device), top, left]

    def _memory(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to the stored order of axes: (N, H, W, C) for channels_last."""
        return (x.permute(0, 2, 3, 1) if self._last else x).contiguous()


class ResidentConverted(Resident):
    """Samples stored as they are, whose batches go through functions on the device.

    Windows of tokens are stored in few bytes; they become int64, and copies are their targets.
    Characters become float32, like all samples to classify; a model converts them to indices. Of
    both nothing is random here: a model draws the positions to mask.
    """

    def __init__(
        self,
        samples: Samples,
        functions: Functions | None,
        *,
        device: torch.device,
        train: bool,
        windows: bool = False,
        channels_last: bool = False,
        held: bool = True,
    ) -> None:
        """`functions` for training apply if `train`."""
        self._functions, self._windows, self._last = functions, windows, channels_last
        self._augments = train and functions is not None and functions.augments
        size = self._converted(samples.x[:1].clone(), None).nbytes
        super().__init__(samples, device=device, sample_bytes=size, held=held)

    def _converted(self, x: Tensor, seeds: Tensor | None) -> Tensor:
        if self._functions is None:
            return x.long() if self._windows else x.float()
        return transformed(
            self._functions.test if seeds is None else self._functions.train, x, seeds
        )

    @override
    def _draw(self, count: int, generator: torch.Generator | None) -> Tensor | None:
        """(1, count) on the CPU: the seed of each sample."""
        if generator is None or not self._augments:
            return None
        return torch.randint(0, 2**62, (1, count), generator=generator)

    @override
    def take(self, index: Tensor, draw: Tensor | None) -> Batch:
        x = sent(self._x.index_select(0, index), self.device)
        x = self._converted(x, None if draw is None else draw[0])
        if self._last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        y = x.clone() if self._windows else sent(self.y.index_select(0, index), self.device)
        return x, y


class ResidentColumns(Resident):
    """Samples of named columns; a batch is as long as its longest sample, column by column."""

    def __init__(self, samples: Samples, *, device: torch.device, held: bool) -> None:
        assert samples.columns is not None
        super().__init__(samples, device=device, sample_bytes=0, held=held)
        columns = samples.columns
        self._tensors = {name: t.to(self.home) for name, t in columns.tensors.items()}
        self._lengths, self._form = columns.lengths, columns.form

    @override
    def batches(self, plan: Plan) -> Iterator[Any]:
        index = sent(torch.as_tensor(plan.index), self.home)
        for part in torch.split_with_sizes(index, plan.sizes):
            yield self.take(part, None)

    @override
    def take(self, index: Tensor, draw: Tensor | None) -> Any:
        found, places = {}, index.cpu()
        for name, column in self._tensors.items():
            part = column.index_select(0, index)
            if name in self._lengths:
                part = part[:, : int(self._lengths[name][places].max())].contiguous()
            found[name] = sent(part, self.device)
        return self._form(found)

    def longest(self) -> Any:
        """A batch of the two samples with the longest sequences."""
        total = sum(self._lengths.values(), torch.zeros(len(self)))
        return self.batch(total.argsort(descending=True, stable=True)[:2])


class PackBatches:
    """The batches of K sessions that train side by side.

    A session has its passes over samples, one after the other.

    Attributes:
        sizes: (K, steps) samples of every batch; 0 where a session has ended. Sessions with more
            batches come first.
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

    def __iter__(self) -> Iterator[Batch]:
        """X and y as of `Resident.batch`, (k, B, ...) each, of all k sessions that have a batch.

        A batch that is smaller than the largest of its step ends in copies of its last sample.
        The index of all samples is sent to the split at once, and as many batches are gathered
        together as by `Resident.batches`.
        """
        spans = [self._span(step) for step in range(self.sizes.shape[1])]
        where = np.concatenate([span.ravel() for span in spans])
        draw = None if self._draw is None else self._draw[..., torch.from_numpy(where)]
        index = sent(torch.from_numpy(self._index[where]), self.source.home)
        together = self.source.together(spans[0].size)
        start = 0
        for first in range(0, len(spans), together):
            group = spans[first : first + together]
            counts = [span.size for span in group]
            part = slice(start, start + sum(counts))
            x, y = self.source.take(index[part], None if draw is None else draw[..., part])
            cut = torch.split_with_sizes
            for span, xs, ys in zip(group, cut(x, counts), cut(y, counts), strict=True):
                yield xs.unflatten(0, span.shape), ys.unflatten(0, span.shape)
            start = part.stop

    def _span(self, step: int) -> np.ndarray:
        """(k, B) where the samples of a step lie among those of all sessions."""
        active = int((self.sizes[:, step] > 0).sum())
        sizes, starts = self.sizes[:active, step], self._starts[:active, step]
        return starts[:, None] + np.minimum(np.arange(sizes.max()), sizes[:, None] - 1)


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

    `place`: on the device, if it has memory to spare or always; or on the host as it was loaded,
    which for a data set in the cache folder is mapped from there. `last` gives images in the memory
    format channels_last.
    """
    columns = samples.columns
    size = sum(t.nbytes for t in columns.tensors.values()) if columns else samples.x.nbytes
    held = _fits(size, device) if place == "auto" else place == "device"
    if columns is not None:
        return ResidentColumns(samples, device=device, held=held)
    transform = dataset.transform
    given: dict[str, Any] = {"device": device, "channels_last": last, "held": held, "train": train}
    if isinstance(transform, Transform):
        return ResidentSplit(samples, transform, **given)
    windows = dataset.task == "masked_lm"
    return ResidentConverted(samples, transform, windows=windows, **given)


def _fits(size: int, device: torch.device) -> bool:
    """Whether so many bytes fit in half of the free memory, which leaves space for models."""
    on_card = device.type == "cuda"
    return 2 * size <= (torch.cuda.mem_get_info(device)[0] if on_card else free_memory())


def _constants(transform: Transform, x: Tensor) -> tuple[Tensor, Tensor]:
    """Shift and scale of channels, (C, 1, 1) for images: (x - shift) * scale is normalised."""
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    shape = (-1,) + (1,) * (x.dim() - 2)
    mean = torch.tensor(transform.mean, dtype=torch.float64).view(shape) * unit
    std = torch.tensor(transform.std, dtype=torch.float64).view(shape) * unit
    return mean.float().to(x.device), std.reciprocal().float().to(x.device)


def draw_rectangles(
    count: int, size: Size, *, probability: float, generator: torch.Generator
) -> Tensor:
    """(4, count) int64 on the CPU: top, left, height and width; height and width 0 for none.

    Random erasing, Zhong et al., AAAI 2020 (arXiv:1708.04896): the area of a rectangle is uniform
    between .04 and .2 of the image's, the logarithm of its height over its width between those of
    1/2 and 2, and its place is uniform. The authors of pFedMoE use this in other repositories, by
    torchvision's `RandomErasing`, which erases the same rectangle of all images of a batch.
    The rectangles are cut to an image's size. `probability` is that of one, per image; the
    generator is of the CPU.
    """
    drawn = torch.rand(5, count, generator=generator, dtype=torch.float64)
    area = (_AREA[0] + (_AREA[1] - _AREA[0]) * drawn[1]) * prod(size)
    ratio = _RATIO[0] * (_RATIO[1] / _RATIO[0]) ** drawn[2]
    sides = torch.stack(((area * ratio).sqrt(), (area / ratio).sqrt())).round()
    limits = torch.tensor(size)[:, None]
    sides = torch.minimum(sides, limits) * (drawn[0] < probability)
    return torch.cat((drawn[3:] * (limits - sides + 1), sides)).long()


def erased(size: Size, rectangles: Tensor) -> Tensor:
    """(B, H, W) bool: the pixels of images that are in their rectangles, (4, B)."""
    top, left, height, width = rectangles[:, :, None]
    rows, columns = (torch.arange(length, device=rectangles.device) for length in size)
    inside = (rows >= top) & (rows < top + height)
    return inside[:, :, None] & ((columns >= left) & (columns < left + width))[:, None]
