"""CINIC-10: image files in a folder per class, decoded once."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torchvision.datasets import ImageFolder
from typing_extensions import override

from lightfed.data.datasets.cache import cached
from lightfed.data.datasets.columns import picture
from lightfed.data.datasets.dataset import Dataset, Samples, Split, Transform, missing, unreadable
from lightfed.data.datasets.vision import CIFAR10

_UNPACK = "unpack the published archive again"
_TRANSFORM = Transform(
    (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835), 4, True
)


class CINIC10(Dataset):
    """CIFAR-10's classes with images of ImageNet: 90,000 for training and 90,000 for testing.

    From ROOT/{train,test}/CLASS/*.png; the third part, `valid`, is not used. The decoded images,
    276 MB per split, are kept between runs (`lightfed.data.datasets.cache`) until a file changes
    its name, size or time.
    """

    classes = CIFAR10.classes
    input_shape = (3, 32, 32)
    keeps = True

    def __init__(self, root: str, *, augment: bool = True) -> None:
        """Read CINIC-10.

        Args:
            root: the folder that holds train and test.
            augment: crop and flip at random in training, as FlexiFed does.
        """
        self.root = Path(root).expanduser()
        self.augment = augment

    @property
    @override
    def transform(self) -> Transform:
        return _TRANSFORM if self.augment else _TRANSFORM.fixed()

    @override
    def load(self, split: Split) -> Samples:
        folder = self.root / split
        if not folder.is_dir():
            raise missing(folder, holds="train and test")
        try:
            images = ImageFolder(folder)
            if images.classes != list(self.classes):
                raise ValueError(f"its folders are {', '.join(images.classes)}")
            stats = [(Path(path), Path(path).stat()) for path, _ in images.samples]
        except (OSError, ValueError) as error:
            raise unreadable(folder, error, fix=_UNPACK) from error
        key = [(str(p.relative_to(folder)), s.st_size, s.st_mtime_ns) for p, s in stats]
        x = cached(f"cinic10-{split}", key, partial(_decoded, images))
        return Samples(x=x, y=torch.tensor(images.targets))


def _decoded(images: ImageFolder) -> Iterator[np.ndarray]:
    """The images of all classes, (1, 3, 32, 32) uint8 each."""
    for path, _ in images.samples:
        try:
            image = picture(path, base=Path(), grey=False)
            if image.shape != CINIC10.input_shape:
                raise ValueError(f"{image.shape[2]}x{image.shape[1]} pixels, not 32x32")
        except (OSError, SyntaxError, ValueError) as error:
            raise unreadable(Path(path), error, fix=_UNPACK) from error
        yield image[None]
