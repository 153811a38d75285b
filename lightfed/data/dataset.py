"""The interface of a data set: two splits of compact tensors, and how a batch is transformed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import floor, log10
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightfed.data.transforms import Functions
from lightfed.utils.errors import UserError, reason
from lightfed.utils.recorded import Recorded

KEY = "data.dataset.init_args"
Split = Literal["train", "test"]
Task = Literal["classification", "masked_lm", "regression", "columns"]


@dataclass(frozen=True)
class Columns:
    """Named columns of samples, and the form of a batch.

    Attributes:
        tensors: (N, ...) each; sequences of several lengths end in padding.
        lengths: (N,) int64, of the columns with such sequences.
        form: makes a batch of its columns, each cut to the longest sequence in the batch.
    """

    tensors: dict[str, Tensor]
    lengths: dict[str, Tensor]
    form: Callable[[dict[str, Tensor]], Any]

    @classmethod
    def of(
        cls,
        samples: Mapping[str, list[Tensor]],
        form: Callable[[dict[str, Tensor]], Any] = dict,
        **padding: float,
    ) -> "Columns":
        """Of the tensors of each sample, which may differ in the length of their first axis.

        `padding` has the number that fills up a column, if it is not 0, or -100 for `labels`, which
        losses leave out.
        """
        tensors, lengths = {}, {}
        fill = {"labels": -100} | padding
        for name, column in samples.items():
            sizes = torch.tensor([len(part) if part.dim() else 0 for part in column])
            if (sizes == sizes[0]).all():
                tensors[name] = torch.stack(column)
                continue
            pad = torch.nn.utils.rnn.pad_sequence
            tensors[name] = pad(column, batch_first=True, padding_value=fill.get(name, 0))
            lengths[name] = sizes
        return cls(tensors, lengths, form)


@dataclass(frozen=True)
class Samples:
    """One split as compact tensors.

    Attributes:
        x: (N, C, H, W) uint8 for images, (N, window) int32 for tokens, (N, length) uint8 for
            characters, float32 for anything else.
        y: (N,) int64, the class of each sample; partitions depend on it. For a regression (N,) or
            (N, outputs) float32, the targets.
        groups: (N,) int64, the natural owner of each sample (writer, speaker), if there is one.
        columns: what batches are made of instead of x and y; x is then the first column, and y is
            for partitions only, 0 where there are no classes.
    """

    x: Tensor
    y: Tensor
    groups: Tensor | None = None
    columns: Columns | None = None

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Transform:
    """Normalisation of a batch on its device; in training also random crop, flip and erasing.

    Attributes:
        mean: one value per channel, of x / 255 if x is uint8, and of x itself if it is float32.
        std: like mean.
        crop_padding: pixels added around an image before a random crop back to its size; each
            sample has its own offset. 0 means no crop.
        flip: mirror each sample horizontally with probability 1/2.
        padding: colour of the added pixels: black, or the mean, which becomes 0.
        erase: probability with which a rectangle of a sample gets the mean colour, see
            `lightfed.data.batches.draw_rectangles`.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_padding: int = 0
    flip: bool = False
    padding: Literal["black", "mean"] = "black"
    erase: float = 0.0

    @property
    def augments(self) -> bool:
        return bool(self.crop_padding or self.flip or self.erase)

    def fixed(self) -> "Transform":
        """The normalisation alone."""
        return Transform(self.mean, self.std)


def moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of x / 255 if x is uint8; 1 for a constant one.

    Rounded, so that they do not depend on the order of the sums: to 6 places, or the third digit of
    a deviation that is smaller.

    `x` is (N, C, ...), read in parts, so that it may be larger than memory.
    """
    sums = torch.zeros(2, x.shape[1], dtype=torch.float64)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    for part in x.split(1024):
        values = part.double() / (255 if x.dtype == torch.uint8 else 1)
        sums += torch.stack((values.sum(axes), values.square().sum(axes)))
    mean, square = sums / (x.numel() / x.shape[1])
    std = (square - mean.square()).clamp_(min=0).sqrt()
    std = torch.where(std > 1e-6 * mean.abs(), std, 1.0)  # also of what is not finite
    places = [max(6, 2 - floor(log10(s))) for s in std.tolist()]
    values = (mean.tolist(), std.tolist())
    means, stds = (tuple(map(round, some, places)) for some in values)
    return means, stds


class Dataset(Recorded, ABC):
    """A labelled data set with a training and a test split; constructor arguments are config keys.

    Attributes:
        classes: names of the classes; label c means classes[c]. None without classes.
        input_shape: of one sample, for example (1, 28, 28); () for named columns.
        synthetic: whether the samples are generated; every report then says so.
        task: what a model predicts: the class, the tokens of a window, or numbers; or samples are
            named columns, of which a LightningModule makes what it likes.
        outputs: numbers that a regression predicts for a sample.
        keeps: whether `load` keeps prepared samples in the cache folder, where the other processes
            of a node find them.
    """

    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    synthetic: bool = False
    task: Task = "classification"
    outputs: int = 1
    keeps: bool = False

    @cached_property
    def name(self) -> str:
        return type(self).__name__

    @property
    def num_classes(self) -> int:
        """Numbers of a prediction: logits of classes or words, or targets of a regression.

        0 for named columns.
        """
        if self.task == "columns":
            return 0
        return self.outputs if self.task == "regression" else len(self.classes)

    @property
    @abstractmethod
    def transform(self) -> Transform | Functions | None:
        """Turns stored samples into batches.

        None if only the type changes: tokens become int64, and characters float32.
        """

    def fetch(self) -> None:
        """Download or prepare files; called in one process per node, before all others load."""
        if self.keeps:
            self.load("train")
            self.load("test")

    def unused_settings(self, settings: Mapping[str, Any]) -> list[str]:
        """What the source of the samples says about batches, and a run does not follow.

        Args:
            settings: of the data module, by the names of its arguments.
        """
        return []

    @abstractmethod
    def load(self, split: Split) -> Samples:
        """Read one split from disk.

        Raises:
            UserError: files are missing, damaged or of another kind.
        """


def missing(expected: Path, *, holds: str) -> UserError:
    """The error for a root without what is expected; it is "the folder that holds" `holds`."""
    fix = f"unpack the data set, and set root to the folder that holds {holds}"
    return UserError(f"{KEY}.root", f"expected {expected}, which is not there", fix)


def unreadable(path: Path, error: Exception, *, fix: str = "fetch it again") -> UserError:
    """The error for a file or folder that cannot be read, with the reason on one line."""
    return UserError(f"{KEY}.root", f"{path} cannot be read ({reason(error)})", fix)
