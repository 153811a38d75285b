"""One split on the device: batches by index, and augmentation of many samples at once.

There are no worker processes and no Python loops over samples. A batch is a gather from one tensor.
The epoch of a small client is a single gather, cut into views.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightfed.data.datasets.dataset import Samples, Transform
from lightfed.data.erase import Size, draw_rectangles, hidden

Batch = tuple[Tensor, Tensor]
LastBatch = Literal["keep", "drop", "join"]

_MEBI = 1 << 20
# Batches are gathered together up to this many bytes of float32: on a CPU what fits in its caches
# (larger gathers were measured to be slower), on a GPU enough for few kernel launches.
_GATHER_BYTES = {"cpu": 2 * _MEBI, "cuda": 64 * _MEBI}


def batch_sizes(samples: int, batch_size: int, last_batch: LastBatch) -> list[int]:
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
    return sizes


class How(TypedDict):
    """Arguments of `Resident.plan`."""

    batch_size: int
    generator: NotRequired[torch.Generator | None]
    order: NotRequired[torch.Generator | None]
    last_batch: NotRequired[LastBatch]
    limit: NotRequired[int | None]


@dataclass(frozen=True)
class Plan:
    """One pass over some samples.

    Attributes:
        index: (n,) the samples in order, of an integer type.
        sizes: of the batches; their sum is n.
        draw: of the augmentation, (..., n) on the CPU; None for none.
    """

    index: Tensor
    sizes: list[int]
    draw: Tensor | None


class Resident(ABC):
    """One split on one device, and the batches of it.

    Attributes:
        y: (N,) int64, `Samples.y` on the device.
        device: of the split.
    """

    def __init__(self, y: Tensor, *, device: torch.device, sample_bytes: int) -> None:
        self.device = device
        self.y = y.to(device)
        self._sample_bytes = sample_bytes  # of x in a batch
        self._gather_bytes = _GATHER_BYTES.get(device.type, _GATHER_BYTES["cpu"])

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> Batch:
        """The samples of an index, augmented if a generator is given.

        Args:
            index: (B,) of an integer type, on the CPU or the device.
            generator: of the CPU, so that draws do not depend on the device.

        Returns:
            x, (B, C, H, W) float32, normalised, for images, or (B, length) float32 for characters;
            and y, (B,) int64.
        """
        draw = self._draw(len(index), generator)
        return self._take(index.to(self.device), draw)

    @abstractmethod
    def span(self, start: int, stop: int) -> Batch:
        """Samples start to stop - 1, not augmented; views if they are stored as needed."""

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
        on how many batches are gathered together.

        Args:
            index: (n,) of an integer type, on the CPU or the device.
            batch_size: samples in a batch.
            generator: draws the augmentation; None for none.
            order: draws the order; None leaves it as it is.
            last_batch: as in `batch_sizes`.
            limit: at most this many batches.
        """
        index = torch.as_tensor(index)
        if order is not None:
            shuffled = torch.randperm(len(index), generator=order)
            index = index.index_select(0, shuffled.to(index.device))
        sizes = batch_sizes(len(index), batch_size, last_batch)[:limit]
        count = sum(sizes)
        draw = self._draw(count, generator) if count else None
        return Plan(index[:count], sizes, draw)

    def batches(self, plan: Plan) -> Iterator[Batch]:
        """The batches of a plan as by `batch`; no two of them share memory."""
        if not plan.sizes:
            return iter(())
        return self._gathers(plan.index.to(self.device), plan.draw, plan.sizes, plan.sizes[0])

    def side_by_side(self, plans: Sequence[Plan], batches: Sequence[int]) -> Batch:
        """One batch of each of K plans.

        Args:
            plans: K, on this split.
            batches: the position of the batch in each plan; all of one size B.

        Returns:
            x and y as of `batch`, (K, B, ...) each.
        """
        starts = [sum(plan.sizes[:batch]) for plan, batch in zip(plans, batches, strict=True)]
        size = plans[0].sizes[batches[0]]
        parts = [slice(start, start + size) for start in starts]
        index = torch.cat([plan.index[part] for plan, part in zip(plans, parts, strict=True)])
        draws = [
            plan.draw[..., part]
            for plan, part in zip(plans, parts, strict=True)
            if plan.draw is not None
        ]
        x, y = self._take(index.to(self.device), torch.cat(draws, -1) if draws else None)
        return x.unflatten(0, (len(plans), size)), y.unflatten(0, (len(plans), size))

    def epoch(self, index: Tensor | np.ndarray, **how: Unpack[How]) -> Iterator[Batch]:
        """One pass over the samples of an index, in batches; the arguments are those of `plan`."""
        return self.batches(self.plan(index, **how))

    def _gathers(
        self, index: Tensor, draw: Tensor | None, sizes: list[int], batch_size: int
    ) -> Iterator[Batch]:
        """The batches of an epoch, as many gathered at once as `_GATHER_BYTES` allows."""
        together = max(1, self._gather_bytes // (batch_size * self._sample_bytes))
        start = 0
        for first in range(0, len(sizes), together):
            group = sizes[first : first + together]
            part = slice(start, start + sum(group))
            x, y = self._take(index[part], None if draw is None else draw[:, part])
            yield from zip(_cut(x, group), _cut(y, group), strict=True)
            start = part.stop

    @abstractmethod
    def _draw(self, count: int, generator: torch.Generator | None) -> Tensor | None:
        """The draws for `count` samples, (..., count) on the CPU; None if nothing is random."""

    @abstractmethod
    def _take(self, index: Tensor, draw: Tensor | None) -> Batch:
        """The samples of an index on the device, in new memory."""


class ResidentSplit(Resident):
    """Images, or samples of numbers.

    A small split is stored as normalised float32. A large one is stored unchanged, and each batch
    is normalised by the same arithmetic, hence to the same bits. A split that is cropped is stored
    unchanged with a black border; a border of the mean colour, and erased rectangles, are set to 0
    after the normalisation of a batch. For channels_last a split is stored as NHWC, and a batch is
    permuted after the gather, which copies nothing.
    """

    def __init__(
        self,
        samples: Samples,
        transform: Transform,
        *,
        device: torch.device,
        channels_last: bool = False,
        train: bool,
        float_limit: int = 512 * _MEBI,
    ) -> None:
        """Move a split to a device.

        Args:
            samples: the split, on the CPU.
            transform: what happens to a batch.
            device: of the split.
            channels_last: give images in that memory format; ignored for other shapes.
            train: whether crop, flip and erasing apply.
            float_limit: most bytes of a split that is stored as normalised float32.
        """
        shape = samples.x.shape[1:]
        super().__init__(samples.y, device=device, sample_bytes=4 * shape.numel())
        self._last = channels_last and samples.x.dim() == 4
        self._flip = train and transform.flip
        self._padding = transform.crop_padding if train else 0
        self._erase = transform.erase if train else 0.0
        self._beyond = self._padding > 0 and transform.padding == "mean"
        self._size: Size = (shape[1], shape[2]) if len(shape) == 3 else (0, 0)
        x = samples.x.to(device)
        if self._padding:
            x = F.pad(x, (self._padding,) * 4)
        shift, scale = _constants(transform, x)
        # Useless with a crop: converting a copy costs no more than copying 4 times the bytes.
        self._ready = not self._padding and 4 * x.numel() <= float_limit
        if self._ready:
            x = x.to(torch.float32, copy=True).sub_(shift).mul_(scale)
        # Shaped like a sample: broadcasting over an innermost axis of 3 channels is 7 times slower.
        self._shift = self._memory(shift.expand(1, *shape))[0]
        self._scale = self._memory(scale.expand(1, *shape))[0]
        self._plain = x = self._memory(x)
        if self._padding:
            row = 1 if self._last else 2  # the axis of rows; that of columns comes next
            windows = x.unfold(row, self._size[0], 1).unfold(row + 1, self._size[1], 1)
            # All windows of the images, a view: (N, top, left, *sample)
            self._windows = windows.movedim((row, row + 1, -2, -1), (1, 2, row + 2, row + 3))
            self._plain = self._windows[:, self._padding, self._padding]

    @override
    def span(self, start: int, stop: int) -> Batch:
        x = self._plain[start:stop]
        if not self._ready:
            x = x.to(torch.float32, copy=True).sub_(self._shift).mul_(self._scale)
        return self._logical(x.contiguous()), self.y[start:stop]

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
    def _take(self, index: Tensor, draw: Tensor | None) -> Batch:
        """Gather, normalise, erase and mirror the samples of an index on the device."""
        if draw is None or not self._padding:
            x = self._plain.index_select(0, index)
        else:
            top, left = draw[:2].to(self.device)
            x = self._windows[index.long(), top, left]
        x = x.float().contiguous()
        if not self._ready:
            x.sub_(self._shift).mul_(self._scale)
        if draw is not None and (self._erase or self._beyond):
            places = torch.cat((draw[:2], draw[3:])).to(self.device)
            mask = hidden(self._size, places, border=self._padding, beyond=self._beyond)
            x.masked_fill_(mask.unsqueeze(3 if self._last else 1), 0.0)
        if draw is not None and self._flip:
            # Selected on the CPU, to avoid waiting for the device.
            mirrored = draw[2].nonzero().squeeze(1).to(self.device)
            width = 2 if self._last else 3
            x.index_copy_(0, mirrored, x.index_select(0, mirrored).flip(width))
        return self._logical(x), self.y.index_select(0, index)

    def _memory(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to the stored order of axes: (N, H, W, C) for channels_last."""
        return (x.permute(0, 2, 3, 1) if self._last else x).contiguous()

    def _logical(self, x: Tensor) -> Tensor:
        """The inverse of `_memory`, a view."""
        return x.permute(0, 3, 1, 2) if self._last else x


class ResidentTokens(Resident):
    """Tokens or characters, stored in few bytes and converted in batches.

    Windows of tokens become int64, and are their own targets. Characters become float32, like all
    samples to classify; a model converts them to indices. Nothing is random here: a model draws the
    positions to mask.
    """

    def __init__(self, samples: Samples, *, device: torch.device, windows: bool) -> None:
        self._dtype = torch.int64 if windows else torch.float32
        bytes_each = self._dtype.itemsize * samples.x.shape[1]
        super().__init__(samples.y, device=device, sample_bytes=bytes_each)
        self._tokens = samples.x.to(device)
        self._windows = windows

    @override
    def span(self, start: int, stop: int) -> Batch:
        x = self._tokens[start:stop].to(self._dtype)
        return x, x if self._windows else self.y[start:stop]

    @override
    def _draw(self, count: int, generator: torch.Generator | None) -> None:
        return None

    @override
    def _take(self, index: Tensor, draw: Tensor | None) -> Batch:
        x = self._tokens.index_select(0, index).to(self._dtype)
        return x, x if self._windows else self.y.index_select(0, index)


def _cut(samples: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    # Tensor.split does the same, ten times slower.
    return torch.split_with_sizes(samples, sizes)


def _constants(transform: Transform, x: Tensor) -> tuple[Tensor, Tensor]:
    """Shift and scale of channels, (C, 1, 1) for images: (x - shift) * scale is normalised."""
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    shape = (-1,) + (1,) * (x.dim() - 2)
    mean = torch.tensor(transform.mean, dtype=torch.float64).view(shape) * unit
    std = torch.tensor(transform.std, dtype=torch.float64).view(shape) * unit
    return mean.float().to(x.device), std.reciprocal().float().to(x.device)
