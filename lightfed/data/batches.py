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

# The ranges of random erasing: a rectangle's area, as a share of the image's, and height / width.
_AREA = (0.04, 0.2)
_RATIO = (0.5, 2.0)

Size = tuple[int, int]
"""Height and width of an image."""

MEBI = 1 << 20
# Batches are gathered together up to this many bytes of float32: on a CPU what fits in its caches
# (larger gathers were measured to be slower), on a GPU enough for few kernel launches.
GATHER_BYTES = {"cpu": 2 * MEBI, "cuda": 64 * MEBI}


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return values on a device; the host does not wait, because it copies from pinned memory."""
    if device.type == "cpu" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@lru_cache(4096)
def batch_sizes(samples: int, batch_size: int, last_batch: LastBatch) -> tuple[int, ...]:
    """Return the sizes of the batches of an epoch.

    Args:
        samples: The number of samples of the client.
        batch_size: The size of all batches but the last.
        last_batch: "keep" a smaller last batch; "drop" it; or "join" it to the one before if it is
            a single sample, which BatchNorm cannot normalize.
    """
    num_whole, rest = divmod(samples, batch_size)
    sizes = [batch_size] * num_whole
    if rest == 0:
        return tuple(sizes)

    if last_batch == "join" and rest == 1 and num_whole:
        sizes[-1] += 1
    elif last_batch != "drop":
        sizes.append(rest)
    return tuple(sizes)


@dataclass(slots=True)
class Plan:
    """One pass over n samples in order, in batches. It is on the CPU; nothing is gathered yet.

    Attributes:
        index: The samples, (n,).
        sizes: The sizes of the batches, n in total.
        draw: The draws of the augmentation, (..., n); None for none.
    """

    index: Tensor | np.ndarray
    sizes: Sequence[int]
    draw: Tensor | None

    def repeated(self, times: int) -> "Plan":
        """Return the pass with every batch several times in succession, by the same draws."""
        if times == 1:
            return self

        positions = []
        end = 0
        for size in self.sizes:
            start, end = end, end + size
            positions += [np.arange(start, end)] * times
        where = np.concatenate(positions)

        draw = None if self.draw is None else self.draw[..., torch.from_numpy(where)]
        return Plan(self.index[where], np.repeat(self.sizes, times).tolist(), draw)


class Resident(ABC):
    """One split, and its batches on one device.

    Args:
        samples: The split.
        device: The device of batches.
        sample_bytes: The bytes of a sample in a batch.
        held: Whether the split is kept on the device. Otherwise it is kept on the host, and every
            batch is copied.

    Attributes:
        device: The device of batches.
        home: Where the split is kept.
        stored: The samples as they are kept, (N, ...), at `home`.
        y: The labels, (N,), at `home`.
        gather_bytes: Batches are gathered together up to this many bytes.
    """

    def __init__(
        self, samples: Samples, *, device: torch.device, sample_bytes: int, held: bool
    ) -> None:
        self.device = device
        self.home = device if held else torch.device("cpu")
        self.stored = samples.x.to(self.home)
        self.y = samples.y.to(self.home)
        self.gather_bytes = GATHER_BYTES.get(device.type, GATHER_BYTES["cpu"])
        self._sample_bytes = sample_bytes

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.y)

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> Batch:
        """Return the samples of an index, augmented if a generator is given.

        Args:
            index: The samples, (B,).
            generator: A generator of the CPU, so that draws do not depend on the device.

        Returns:
            x, (B, C, H, W) float32 and normalized for images, or (B, length) float32 for
            characters; and y, (B,) int64.
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
        """Return the order, the batches and the augmentation of one pass over some samples.

        All draws are made before the first batch, so that they depend neither on the batch size nor
        on how many batches are gathered together.

        Args:
            index: The samples, (n,), of an integer type and on the CPU.
            batch_size: The size of all batches but the last.
            generator: Draws the augmentation; None for none.
            order: Draws the order; None for that of the index.
            last_batch: What is done with a smaller last batch, see `batch_sizes`.
            limit: The largest number of batches; None for all.
        """
        if order is not None:
            index = index[torch.randperm(len(index), generator=order).numpy()]
        sizes = batch_sizes(len(index), batch_size, last_batch)[:limit]
        count = sum(sizes)
        draw = self._draw(count, generator) if count else None
        return Plan(index[:count], sizes, draw)

    def batches(self, plan: Plan) -> Iterator[Batch]:
        """Yield the batches of a plan, each as `batch` returns it. No two of them share memory.

        As many are gathered at once as `gather_bytes` allows.
        """
        if not plan.sizes:
            return

        index = sent(torch.as_tensor(plan.index), self.home)
        together = self.together(plan.sizes[0])
        start = 0
        for first in range(0, len(plan.sizes), together):
            sizes = plan.sizes[first : first + together]
            end = start + sum(sizes)
            draw = None if plan.draw is None else plan.draw[:, start:end]
            x, y = self.take(index[start:end], draw)
            # Tensor.split does the same, ten times slower.
            yield from zip(
                torch.split_with_sizes(x, sizes), torch.split_with_sizes(y, sizes), strict=True
            )
            start = end

    def together(self, samples: int) -> int:
        """Return how many batches of this many samples are gathered at once."""
        return max(1, self.gather_bytes // max(1, samples * self._sample_bytes))

    def _draw(self, count: int, generator: torch.Generator | None) -> Tensor | None:
        """Draw the augmentation of some samples, (..., count) on the CPU; None if there is none."""
        return None

    @abstractmethod
    def take(self, index: Tensor, draw: Tensor | None) -> Batch:
        """Return the samples of an index, in new memory on the device.

        Args:
            index: The samples, (B,), at `home`.
            draw: The draws of their augmentation, (..., B), on the CPU; None for none.
        """


class ResidentSplit(Resident):
    """Images, or samples of numbers.

    A small split is stored as normalized float32. A large one, one that is cropped, and one that
    the device does not hold are stored unchanged, and each batch is normalized by the same
    arithmetic, hence to the same bits.

    Black borders are normalized with their image. Borders of the mean color, and erased rectangles,
    are set to 0 after that. For channels_last a split is stored as NHWC, and a batch is permuted
    after the gather, which copies nothing.

    Args:
        samples: The split.
        transform: Its normalization, and the augmentation of training samples.
        device: The device of batches.
        channels_last: Whether images have that memory format. Other samples have no such format.
        train: Whether crop, flip and erasing apply.
        held: Whether the split is kept on the device.
        float_limit: A split of at most this many bytes of float32 is stored as normalized float32.
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
        sample_shape = samples.x.shape[1:]
        super().__init__(samples, device=device, sample_bytes=4 * sample_shape.numel(), held=held)
        self._held = held
        self._channels_last = channels_last and samples.x.dim() == 4
        self._transform = transform if train else transform.fixed()
        is_image = len(sample_shape) == 3
        self._size: Size = (sample_shape[1], sample_shape[2]) if is_image else (0, 0)

        shift, scale = _constants(transform, self.stored)
        shift = shift.to(device)
        scale = scale.to(device)

        # Not with a crop: converting a copy costs no more than copying 4 times the bytes.
        is_cropped = self._transform.crop_padding > 0
        is_small = 4 * self.stored.numel() <= float_limit
        self._is_normalized = held and is_small and not is_cropped
        if self._is_normalized:
            self.stored = self.stored.to(torch.float32, copy=True).sub_(shift).mul_(scale)

        # Shaped like a sample: broadcasting over an innermost axis of 3 channels is 7 times slower.
        self._shift = self._in_memory_order(shift.expand(1, *sample_shape))[0]
        self._scale = self._in_memory_order(scale.expand(1, *sample_shape))[0]
        if held:
            self.stored = self._in_memory_order(self.stored)

    @override
    def _draw(self, count: int, generator: torch.Generator | None) -> Tensor | None:
        """Draw the top and left edge of each crop, and 1 for a mirrored sample: (3, count).

        With erasing also the rectangles: (7, count).
        """
        transform = self._transform
        if generator is None or not transform.augments:
            return None

        # What is switched off is drawn too, as 0.
        offsets = torch.randint(0, 2 * transform.crop_padding + 1, (2, count), generator=generator)
        mirrored = torch.randint(0, 2 if transform.flip else 1, (1, count), generator=generator)
        if not transform.erase:
            return torch.cat((offsets, mirrored))

        rectangles = draw_rectangles(
            count, self._size, probability=transform.erase, generator=generator
        )
        return torch.cat((offsets, mirrored, rectangles))

    @override
    def take(self, index: Tensor, draw: Tensor | None) -> Batch:
        """Gather, normalize, erase, crop and mirror the samples of an index, as in `Resident`."""
        x = sent(self.stored.index_select(0, index), self.device)
        if not self._held:
            # What stays on the host is stored as it was loaded, in torch's own order of axes.
            x = self._in_memory_order(x).clone(memory_format=torch.contiguous_format)
        y = sent(self.y.index_select(0, index), self.device)
        return self._finished(x.float(), draw), y

    def _finished(self, x: Tensor, draw: Tensor | None) -> Tensor:
        """Return float samples as they are in a batch. They are changed in place."""
        if not self._is_normalized:
            x.sub_(self._shift).mul_(self._scale)
        if draw is not None:
            x = self._augmented(x, draw)
        if self._channels_last:
            # From the order in memory, (B, H, W, C), to the shape that layers expect.
            return x.permute(0, 3, 1, 2)
        return x

    def _augmented(self, x: Tensor, draw: Tensor) -> Tensor:
        """Erase, crop and mirror normalized samples by their draws, (3, B) or (7, B)."""
        transform = self._transform
        if transform.erase:
            mask = erased(self._size, sent(draw[3:], self.device))
            channels = 3 if self._channels_last else 1
            x.masked_fill_(mask.unsqueeze(channels), 0.0)

        if transform.crop_padding:
            top, left = sent(draw[:2], self.device)
            x = self._cropped(x, top, left)

        if transform.flip:
            # Selected on the CPU, to avoid waiting for the device.
            mirrored = sent(draw[2].nonzero().squeeze(1), self.device)
            columns = 2 if self._channels_last else 3
            x.index_copy_(0, mirrored, x.index_select(0, mirrored).flip(columns))
        return x

    def _cropped(self, x: Tensor, top: Tensor, left: Tensor) -> Tensor:
        """Return the windows of bordered samples with their corners at top and left, (B,)."""
        rows = 1 if self._channels_last else 2
        columns = rows + 1
        added = self._transform.crop_padding
        height, width = self._size

        bordered_shape = list(x.shape)
        bordered_shape[rows] += 2 * added
        bordered_shape[columns] += 2 * added
        bordered = x.new_zeros(bordered_shape)  # of the mean color
        if self._transform.padding == "black":
            # The shift and the scale are equal at all pixels: one pixel of them is enough. They
            # have no axis of samples.
            black = -self._shift * self._scale
            bordered += black.narrow(rows - 1, 0, 1).narrow(columns - 1, 0, 1)
        bordered.narrow(rows, added, height).narrow(columns, added, width).copy_(x)

        # All windows, as views: the axes of corners come second and third, and those of a window
        # where the rows and columns were.
        windows = bordered.unfold(rows, height, 1).unfold(columns, width, 1)
        windows = windows.movedim((rows, columns, -2, -1), (1, 2, rows + 2, columns + 2))
        return windows[torch.arange(len(x), device=self.device), top, left]

    def _in_memory_order(self, x: Tensor) -> Tensor:
        """Return (N, C, H, W) in the stored order of axes: (N, H, W, C) for channels_last."""
        if self._channels_last:
            x = x.permute(0, 2, 3, 1)
        return x.contiguous()


class ResidentConverted(Resident):
    """Samples stored as they are, whose batches go through functions on the device.

    Windows of tokens are stored in few bytes; they become int64, and copies are their targets.
    Characters become float32, like all samples to classify; a model converts them to indices. In
    both cases nothing is random here: a model draws the positions to mask.

    Args:
        samples: The split.
        functions: The transforms of a data set; None for none.
        device: The device of batches.
        train: Whether the transform for training applies.
        windows: Whether samples are windows of tokens.
        channels_last: Whether images have that memory format.
        held: Whether the split is kept on the device.
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
        self._functions = functions
        self._windows = windows
        self._channels_last = channels_last
        self._augments = train and functions is not None and functions.augments
        # A copy, because a user's function may change what it is given.
        example = self._converted(samples.x[:1].clone(), None)
        super().__init__(samples, device=device, sample_bytes=example.nbytes, held=held)

    def _converted(self, x: Tensor, seeds: Tensor | None) -> Tensor:
        """Return samples (B, ...) as they are in a batch; with seeds (B,) as in training."""
        if self._functions is not None:
            function = self._functions.test if seeds is None else self._functions.train
            return transformed(function, x, seeds)
        return x.long() if self._windows else x.float()

    @override
    def _draw(self, count: int, generator: torch.Generator | None) -> Tensor | None:
        """Draw the seed of each sample, (1, count) on the CPU."""
        if generator is None or not self._augments:
            return None
        return torch.randint(0, 2**62, (1, count), generator=generator)

    @override
    def take(self, index: Tensor, draw: Tensor | None) -> Batch:
        x = sent(self.stored.index_select(0, index), self.device)
        x = self._converted(x, None if draw is None else draw[0])
        if self._channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)

        if self._windows:
            return x, x.clone()
        return x, sent(self.y.index_select(0, index), self.device)


class ResidentColumns(Resident):
    """Samples of named columns. A batch is as long as its longest sample, column by column.

    Args:
        samples: A split with columns.
        device: The device of batches.
        held: Whether the split is kept on the device.
    """

    def __init__(self, samples: Samples, *, device: torch.device, held: bool) -> None:
        assert samples.columns is not None
        super().__init__(samples, device=device, sample_bytes=0, held=held)
        columns = samples.columns
        self._tensors = {name: column.to(self.home) for name, column in columns.tensors.items()}
        self._lengths = columns.lengths
        self._form = columns.form

    @override
    def batches(self, plan: Plan) -> Iterator[Any]:
        index = sent(torch.as_tensor(plan.index), self.home)
        for batch_index in torch.split_with_sizes(index, plan.sizes):
            yield self.take(batch_index, None)

    @override
    def take(self, index: Tensor, draw: Tensor | None) -> Any:
        columns = {}
        index_on_host = index.cpu()
        for name, column in self._tensors.items():
            values = column.index_select(0, index)
            if name in self._lengths:
                longest = int(self._lengths[name][index_on_host].max())
                values = values[:, :longest].contiguous()
            columns[name] = sent(values, self.device)
        return self._form(columns)

    def longest(self) -> Any:
        """Return a batch of the two samples with the longest sequences."""
        total = sum(self._lengths.values(), torch.zeros(len(self)))
        return self.batch(total.argsort(descending=True, stable=True)[:2])


class PackBatches:
    """The batches of K sessions that train side by side.

    Args:
        source: The training split.
        sessions: The passes of each session over its samples, one after the other. Sessions with
            more batches come first.

    Attributes:
        sizes: The number of samples of every batch, (K, steps); 0 where a session has ended.
        source: The training split.
    """

    def __init__(self, source: Resident, sessions: Sequence[Sequence[Plan]]) -> None:
        plans = [plan for session in sessions for plan in session]
        sizes = [[size for plan in session for size in plan.sizes] for session in sessions]
        # Sessions that end early have batches of no samples.
        steps = max(len(session_sizes) for session_sizes in sizes)
        self.sizes = np.array([own + [0] * (steps - len(own)) for own in sizes])
        self.source = source

        # The samples of all sessions, one session after the other, and where each batch begins.
        self._index = np.concatenate([plan.index for plan in plans])
        self._starts = self.sizes.cumsum().reshape(self.sizes.shape) - self.sizes
        draws = [plan.draw for plan in plans if plan.draw is not None]
        self._draw = torch.cat(draws, -1) if draws else None

    def __iter__(self) -> Iterator[Batch]:
        """Yield x and y of each step, (k, B, ...), for the k sessions that have a batch in it.

        A batch that is smaller than the largest of its step ends in copies of its last sample.
        """
        # The index of all samples is sent at once, and as many batches are gathered together as by
        # `Resident.batches`.
        positions = [self._positions(step) for step in range(self.sizes.shape[1])]
        where = np.concatenate([of_step.ravel() for of_step in positions])
        draw = None if self._draw is None else self._draw[..., torch.from_numpy(where)]
        index = sent(torch.from_numpy(self._index[where]), self.source.home)

        together = self.source.together(positions[0].size)
        start = 0
        for first in range(0, len(positions), together):
            shapes = [of_step.shape for of_step in positions[first : first + together]]
            counts = [prod(shape) for shape in shapes]
            end = start + sum(counts)
            x, y = self.source.take(
                index[start:end], None if draw is None else draw[..., start:end]
            )
            for shape, step_x, step_y in zip(
                shapes,
                torch.split_with_sizes(x, counts),
                torch.split_with_sizes(y, counts),
                strict=True,
            ):
                yield step_x.unflatten(0, shape), step_y.unflatten(0, shape)
            start = end

    def _positions(self, step: int) -> np.ndarray:
        """Return where the samples of a step lie among those of all sessions, (k, B)."""
        # Sessions that have ended come last.
        active = int((self.sizes[:, step] > 0).sum())
        sizes = self.sizes[:active, step]
        starts = self._starts[:active, step]
        number_in_batch = np.minimum(np.arange(sizes.max()), sizes[:, None] - 1)
        return starts[:, None] + number_in_batch


def resident(
    samples: Samples,
    dataset: Dataset,
    *,
    device: torch.device,
    place: Place,
    last: bool = False,
    train: bool,
) -> Resident:
    """Return a split where it should be. The bits of its batches do not depend on that.

    Args:
        samples: The split.
        dataset: The data set that it is of.
        device: The device of batches.
        place: "device" or "host", or "auto" for the device if it has memory to spare. On the host
            the split is as it was loaded, which for a data set in the cache folder means that it is
            mapped from there.
        last: Whether images are in the memory format channels_last.
        train: Whether samples are augmented.
    """
    columns = samples.columns
    if columns is None:
        size = samples.x.nbytes
    else:
        size = sum(column.nbytes for column in columns.tensors.values())
    held = fits_in_free_memory(size, device) if place == "auto" else place == "device"

    if columns is not None:
        return ResidentColumns(samples, device=device, held=held)

    transform = dataset.transform
    if isinstance(transform, Transform):
        return ResidentSplit(
            samples, transform, device=device, channels_last=last, train=train, held=held
        )
    return ResidentConverted(
        samples,
        transform,
        device=device,
        channels_last=last,
        train=train,
        held=held,
        windows=dataset.task == "masked_lm",
    )


def fits_in_free_memory(size: int, device: torch.device) -> bool:
    """Return whether this many bytes fit in half of the free memory; models need the other half."""
    if device.type == "cuda":
        free_on_card, _ = torch.cuda.mem_get_info(device)
        return 2 * size <= free_on_card
    return 2 * size <= free_memory()


def _constants(transform: Transform, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shift and the scale of channels: (x - shift) * scale is normalized.

    They are float32 and (C, 1, 1) for images.
    """
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    shape = (-1,) + (1,) * (x.dim() - 2)
    mean = torch.tensor(transform.mean, dtype=torch.float64).view(shape) * unit
    std = torch.tensor(transform.std, dtype=torch.float64).view(shape) * unit
    return mean.float().to(x.device), std.reciprocal().float().to(x.device)


def draw_rectangles(
    count: int, size: Size, *, probability: float, generator: torch.Generator
) -> Tensor:
    """Draw the rectangles of random erasing (Zhong et al., AAAI 2020, arXiv:1708.04896).

    The area of a rectangle is uniform between .04 and .2 of the image's. The logarithm of its
    height over its width is uniform between those of 1/2 and 2. Its place is uniform.

    The authors of pFedMoE use this in other repositories, by torchvision's `RandomErasing`, which
    erases the same rectangle of all images of a batch.

    Args:
        count: The number of images.
        size: Their height and width. Rectangles are cut to them.
        probability: The probability that an image gets a rectangle.
        generator: A generator of the CPU.

    Returns:
        Top, left, height and width of each rectangle in pixels, (4, count) int64 on the CPU. Height
        and width are 0 for none.
    """
    drawn = torch.rand(5, count, generator=generator, dtype=torch.float64)
    area = (_AREA[0] + (_AREA[1] - _AREA[0]) * drawn[1]) * prod(size)
    ratio = _RATIO[0] * (_RATIO[1] / _RATIO[0]) ** drawn[2]

    sides = torch.stack(((area * ratio).sqrt(), (area / ratio).sqrt())).round()
    limits = torch.tensor(size)[:, None]
    is_erased = drawn[0] < probability
    sides = torch.minimum(sides, limits) * is_erased
    corners = drawn[3:] * (limits - sides + 1)
    return torch.cat((corners, sides)).long()


def erased(size: Size, rectangles: Tensor) -> Tensor:
    """Return which pixels of images are in their rectangles, (B, H, W) bool.

    Args:
        size: The height and width of the images.
        rectangles: Top, left, height and width, (4, B).
    """
    top, left, height, width = rectangles[:, :, None]
    rows = torch.arange(size[0], device=rectangles.device)
    columns = torch.arange(size[1], device=rectangles.device)
    in_rows = (rows >= top) & (rows < top + height)
    in_columns = (columns >= left) & (columns < left + width)
    return in_rows[:, :, None] & in_columns[:, None]
