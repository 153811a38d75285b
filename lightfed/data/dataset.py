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

# Samples that are read at a time for their mean and deviation.
_AT_A_TIME = 1024


@dataclass(frozen=True)
class Columns:
    """Named columns of samples, and the form of a batch.

    Attributes:
        tensors: The columns by name, (N, ...) each. Sequences of several lengths end in padding.
        lengths: For the columns with such sequences, the length of each sample's, (N,) int64.
        form: Makes a batch of its columns, each cut to the longest sequence in the batch.
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
        """Return the columns of samples that may differ in the length of their first axis.

        Args:
            samples: The tensor of each sample, by column.
            form: Makes a batch of its columns.
            **padding: The number that fills up a column, by its name. By default it is 0, and for
                `labels` -100, which the losses of torch leave out.
        """
        padding = {"labels": -100, **padding}
        tensors = {}
        lengths = {}
        for name, column in samples.items():
            sizes = torch.tensor([len(value) if value.dim() else 0 for value in column])
            if (sizes == sizes[0]).all():
                tensors[name] = torch.stack(column)
            else:
                tensors[name] = torch.nn.utils.rnn.pad_sequence(
                    column, batch_first=True, padding_value=padding.get(name, 0)
                )
                lengths[name] = sizes
        return cls(tensors, lengths, form)


@dataclass(frozen=True)
class Samples:
    """One split as compact tensors.

    Attributes:
        x: The inputs: (N, C, H, W) uint8 for images, (N, window) int32 for tokens, (N, length)
            uint8 for characters, float32 for anything else.
        y: The class of each sample, (N,) int64; partitions depend on it. For a regression the
            targets, (N,) or (N, outputs) float32.
        groups: The natural owner of each sample (writer, speaker), (N,) int64; None if there is
            none. An owner has the same number in both splits.
        columns: What batches are made of instead of x and y. x is then the first column, and y is
            for partitions only, 0 where there are no classes.
        owners: The names of the owners, by their numbers in `groups`; None if they have none.
    """

    x: Tensor
    y: Tensor
    groups: Tensor | None = None
    columns: Columns | None = None
    owners: tuple[str, ...] | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.y)


@dataclass(frozen=True)
class Transform:
    """The normalization of a batch on its device; in training also random crop, flip and erasing.

    Attributes:
        mean: The mean of each channel, of x / 255 if x is uint8, and of x itself if it is float32.
        std: The deviation of each channel, likewise.
        crop_padding: Pixels added around an image before a random crop back to its size. Each
            sample has its own offset. 0 means no crop.
        flip: Whether each sample is mirrored horizontally with probability 1/2.
        padding: The color of the added pixels: black, or the mean, which becomes 0.
        erase: The probability with which a rectangle of a sample gets the mean color, see
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
        """Whether training samples are changed at random."""
        return bool(self.crop_padding or self.flip or self.erase)

    def fixed(self) -> "Transform":
        """Return the normalization alone."""
        return Transform(self.mean, self.std)


def moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel, of x / 255 if x is uint8.

    They are rounded, so that they do not depend on the order of the sums: to 6 places, or to the
    third digit of a deviation that is smaller. The deviation of a constant channel is given as 1.

    Args:
        x: Samples, (N, C, ...). They are read in parts, so that they may be larger than memory.
    """
    unit = 255 if x.dtype == torch.uint8 else 1
    axes = [axis for axis in range(x.dim()) if axis != 1]
    sums = torch.zeros(2, x.shape[1], dtype=torch.float64)
    for samples in x.split(_AT_A_TIME):
        values = samples.double() / unit
        sums += torch.stack((values.sum(axes), values.square().sum(axes)))

    mean, square = sums / (x.numel() / x.shape[1])
    std = (square - mean.square()).clamp_(min=0).sqrt()
    # Written so that a deviation that is not finite becomes 1 as well.
    std = torch.where(std > 1e-6 * mean.abs(), std, 1.0)

    means = []
    stds = []
    for channel_mean, channel_std in zip(mean.tolist(), std.tolist(), strict=True):
        places = max(6, 2 - floor(log10(channel_std)))
        means.append(round(channel_mean, places))
        stds.append(round(channel_std, places))
    return tuple(means), tuple(stds)


class Dataset(Recorded, ABC):
    """A labeled data set with a training and a test split.

    The arguments of its constructor are keys of a configuration.

    Attributes:
        classes: The names of the classes: label c means classes[c]. Empty without classes.
        input_shape: The shape of one sample, for example (1, 28, 28); () for named columns.
        synthetic: Whether the samples are generated. Every report then says so.
        task: What a model predicts: the class, the tokens of a window, or numbers. For named
            columns a LightningModule decides.
        outputs: The number of numbers that a regression predicts for a sample.
        keeps: Whether `load` keeps prepared samples in the cache folder, where the other processes
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
        """The name of the data set in reports."""
        return type(self).__name__

    @property
    def num_classes(self) -> int:
        """The size of a prediction: logits of classes or words, or targets of a regression.

        0 for named columns.
        """
        if self.task == "columns":
            return 0
        if self.task == "regression":
            return self.outputs
        return len(self.classes)

    @property
    @abstractmethod
    def transform(self) -> Transform | Functions | None:
        """What turns stored samples into batches.

        None if only the type changes: tokens become int64, and characters float32.
        """

    def fetch(self) -> None:
        """Download or prepare files, in one process per node, before all others load."""
        if self.keeps:
            self.load("train")
            self.load("test")

    def unused_settings(self, settings: Mapping[str, Any]) -> list[str]:
        """Return what the source of the samples says about batches and a run does not follow.

        Args:
            settings: The settings of the data module, by the names of its arguments.
        """
        return []

    @abstractmethod
    def load(self, split: Split) -> Samples:
        """Read one split from disk.

        Raises:
            UserError: If files are missing, damaged or of another kind.
        """


def missing(expected: Path, *, holds: str) -> UserError:
    """Return the error for a root without what is expected there.

    Args:
        expected: The file or folder that is not there.
        holds: What the right root holds, for "the folder that holds ...".
    """
    return UserError(
        key=f"{KEY}.root",
        found=f"expected {expected}, which is not there",
        fix=f"unpack the data set, and set root to the folder that holds {holds}",
    )


def unreadable(path: Path, error: Exception, *, fix: str = "fetch it again") -> UserError:
    """Return the error for a file or folder that cannot be read, with the reason on one line."""
    return UserError(key=f"{KEY}.root", found=f"{path} cannot be read ({reason(error)})", fix=fix)
