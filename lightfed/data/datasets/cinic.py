"""CINIC-10: pictures in folders, decoded once."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor
from typing_extensions import override

from lightfed.data.datasets.cache import cached
from lightfed.data.datasets.dataset import Dataset, Samples, Split, Transform
from lightfed.data.datasets.refusals import missing, unreadable
from lightfed.data.datasets.vision import CIFAR10

_TRANSFORM = Transform(
    (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835), 4, True
)


class CINIC10(Dataset):
    """CIFAR-10's classes, with pictures of ImageNet: 90,000 to train on and 90,000 to test.

    From ROOT/{train,test}/CLASS/*.png; the third part, `valid`, is not read. The decoded pictures,
    276 MB a split, are kept between runs (`lightfed.data.datasets.cache`), for as long as no file
    changes its name, size or time.
    """

    classes = CIFAR10.classes
    input_shape = (3, 32, 32)

    def __init__(self, root: str, *, augment: bool = True) -> None:
        """Read CINIC-10.

        Args:
            root: the folder that holds train and test.
            augment: crop and flip at random while training, as FlexiFed does.
        """
        self.root = Path(root).expanduser()
        self.augment = augment

    @property
    @override
    def transform(self) -> Transform:
        return _TRANSFORM if self.augment else _TRANSFORM.fixed()

    @override
    def fetch(self) -> None:
        for split in ("train", "test"):
            self.load(split)

    @override
    def load(self, split: Split) -> Samples:
        folder = self.root / split
        if not folder.is_dir():
            raise missing(folder, holds="train and test")
        try:
            pictures = ImageFolder(folder)
            if pictures.classes != list(self.classes):
                raise ValueError(f"its folders are {', '.join(pictures.classes)}")
            times = [Path(path).stat() for path, _ in pictures.samples]
        except (OSError, ValueError) as error:
            raise unreadable(folder, error, fix="unpack the published archive again") from error
        names = [str(Path(path).relative_to(folder)) for path, _ in pictures.samples]
        key = [(n, s.st_size, s.st_mtime_ns) for n, s in zip(names, times, strict=True)]
        tensors = cached(f"cinic10-{split}", key, partial(_decoded, pictures))
        return Samples(x=tensors["x"], y=tensors["y"])


def _decoded(pictures: ImageFolder) -> dict[str, Tensor]:
    """(N, 3, 32, 32) uint8 and (N,) int64: the pictures of all classes, and their classes."""
    x = torch.empty(len(pictures), *CINIC10.input_shape, dtype=torch.uint8)
    for i, (path, _) in enumerate(pictures.samples):
        try:
            picture = pil_to_tensor(pictures.loader(path))
            if picture.shape != CINIC10.input_shape:
                raise ValueError(f"{picture.shape[2]}x{picture.shape[1]} pixels, not 32x32")
        except (OSError, SyntaxError, ValueError) as error:
            fix = "unpack the published archive again"
            raise unreadable(Path(path), error, fix=fix) from error
        x[i] = picture
    return {"x": x, "y": torch.tensor(pictures.targets)}
