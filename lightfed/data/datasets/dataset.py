"""What a data set is to lightfed: two splits of compact tensors, and what happens to a batch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Split = Literal["train", "test"]
Task = Literal["classification", "masked_lm"]


@dataclass(frozen=True)
class Samples:
    """One split, resident as compact tensors.

    Attributes:
        x: (N, C, H, W) uint8 for images, (N, window) int32 for tokens, (N, length) uint8 for
            characters, float32 for anything else.
        y: (N,) int64, the class of each sample; partitioners see it.
        groups: (N,) int64, the natural owner of each sample (writer, speaker), if there is one.
    """

    x: Tensor
    y: Tensor
    groups: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    def and_then(self, other: "Samples") -> "Samples":
        """These samples and, behind them, those of another split of the same data set."""
        groups = None
        if self.groups is not None and other.groups is not None:
            groups = torch.cat((self.groups, other.groups))
        return Samples(torch.cat((self.x, other.x)), torch.cat((self.y, other.y)), groups)


@dataclass(frozen=True)
class Transform:
    """What happens to a batch, on its device: normalisation and, in training, crop, flip, erasing.

    Attributes:
        mean: one value per channel, of x / 255 if x is uint8 and of x itself if it is float32.
        std: like mean.
        crop_padding: pixels around an image before a random crop back to its size; each sample has
            its own offset. 0 means no crop.
        flip: mirror each sample left to right with probability 1/2.
        padding: the colour of those pixels: black, or the mean, which is 0 once it is normalised.
        erase: probability with which a rectangle of a sample gets the mean colour, see
            `lightfed.data.erase`.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_padding: int = 0
    flip: bool = False
    padding: Literal["black", "mean"] = "black"
    erase: float = 0.0

    @property
    def is_random(self) -> bool:
        """Whether a training batch depends on draws."""
        return bool(self.crop_padding or self.flip or self.erase)

    def fixed(self) -> "Transform":
        """The normalisation alone."""
        return Transform(self.mean, self.std)


class Dataset(ABC):
    """A labelled data set with a training and a test split; constructor arguments are config keys.

    Attributes:
        classes: the class names; sample label c belongs to classes[c].
        input_shape: of one sample, for example (1, 28, 28).
        synthetic: whether the samples are generated, which every report then says.
        task: what a model does with them: name the class, or the tokens of a window.
    """

    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    synthetic: bool = False
    task: Task = "classification"

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def num_classes(self) -> int:
        """Logits of a prediction: the classes; of a language model, the size of the vocabulary."""
        return len(self.classes)

    @property
    @abstractmethod
    def transform(self) -> Transform | None:
        """What turns stored samples into the batches that a model sees.

        None for what has only to change its type: tokens become int64, and characters float32, as
        all that is classified.
        """

    def fetch(self) -> None:  # noqa: B027 - most data sets have nothing to fetch
        """Put the files in place; one process of a node does so before any process loads them."""

    @abstractmethod
    def load(self, split: Split) -> Samples:
        """Read one split from the disk.

        Raises:
            UserError: the files are missing or are not what they should be.
        """
