"""Splits on the device or the host, and the augmentation of many samples at once."""

import os
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightfed.data.batches import MEBI, Batch, Resident
from lightfed.data.datasets.dataset import Dataset, Samples, Transform
from lightfed.data.datasets.transforms import Functions, transformed
from lightfed.data.erase import Size, draw_rectangles, hidden
from lightfed.utils.memory import sent

Place = Literal["auto", "device", "host", "mapped"]


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
        super().__init__(samples.y, device=device, sample_bytes=size, held=held)
        self._held = held
        self._last = channels_last and samples.x.dim() == 4
        self._flip = train and transform.flip
        self._padding = transform.crop_padding if train else 0
        self._erase = transform.erase if train else 0.0
        self._beyond = self._padding > 0 and transform.padding == "mean"
        self._size: Size = (shape[1], shape[2]) if len(shape) == 3 else (0, 0)
        x = samples.x.to(self.home)
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
            x = self._memory(self._moved(x))
        x = x.to(torch.float32, copy=True)
        if not self._ready:
            x.sub_(self._shift).mul_(self._scale)
        return self._logical(x.contiguous()), self._labels(start, stop)

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
        y, plain, windows = self._rows(self.y, index), self._plain, self._windows
        if not self._held:
            plain, windows = self._views(self._bordered(self._rows(self._x, index)))
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


class ResidentTokens(Resident):
    """Tokens or characters, stored in few bytes and converted in batches.

    Windows of tokens become int64, and copies are their targets. Characters become float32, like
    all samples to classify; a model converts them to indices. Nothing is random here: a model draws
    the positions to mask.
    """

    def __init__(
        self, samples: Samples, *, device: torch.device, windows: bool, held: bool = True
    ) -> None:
        self._dtype = torch.int64 if windows else torch.float32
        size = samples.x.shape[1] * self._dtype.itemsize
        super().__init__(samples.y, device=device, sample_bytes=size, held=held)
        self._tokens = samples.x.to(self.home)
        self._windows = windows

    @override
    def span(self, start: int, stop: int) -> Batch:
        x = self._moved(self._tokens[start:stop]).to(self._dtype, copy=True)
        return x, x.clone() if self._windows else self._labels(start, stop)

    @override
    def _draw(self, count: int, generator: torch.Generator | None) -> None:
        return None

    @override
    def take(self, index: Tensor, draw: Tensor | None) -> Batch:
        x = self._rows(self._tokens, index).to(self._dtype)
        return x, x.clone() if self._windows else self._rows(self.y, index)


class ResidentFunctions(Resident):
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
        super().__init__(samples.y, device=device, sample_bytes=size, held=held)
        self._x = samples.x.to(self.home)
        self._last = channels_last

    @property
    @override
    def gathers(self) -> bool:
        return False

    @override
    def span(self, start: int, stop: int) -> Batch:
        return self._batch(self._x[start:stop].clone(), None), self._labels(start, stop)

    @override
    def _draw(self, count: int, generator: torch.Generator | None) -> Tensor | None:
        """(1, count) on the CPU: the seed of each sample."""
        if generator is None or self._augmented is self._plain:
            return None
        return torch.randint(0, 2**62, (1, count), generator=generator)

    @override
    def take(self, index: Tensor, draw: Tensor | None) -> Batch:
        rows = self._x.index_select(0, index)
        return self._batch(rows, draw), self._rows(self.y, index)

    def _batch(self, rows: Tensor, draw: Tensor | None) -> Tensor:
        function, seeds = (self._plain, None) if draw is None else (self._augmented, draw[0])
        x = transformed(self._moved(rows), function, seeds)
        last = self._last and x.dim() == 4
        return x.contiguous(memory_format=torch.channels_last) if last else x


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
