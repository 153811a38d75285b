"""CINIC-10: pictures in folders, decoded once."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightfed.data.datasets.cache import cached
from lightfed.data.datasets.dataset import Dataset, Samples, Split, Transform
from lightfed.data.datasets.missing import missing
from lightfed.data.datasets.vision import CIFAR10
from lightfed.utils.errors import UserError

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
        return _TRANSFORM if self.augment else replace(_TRANSFORM, crop_padding=0, flip=False)

    @override
    def fetch(self) -> None:
        for split in ("train", "test"):
            self.load(split)

    @override
    def load(self, split: Split) -> Samples:
        files = [self._pictures(self.root / split / name) for name in self.classes]
        key = [
            [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in part]
            for part in files
        ]
        tensors = cached(f"cinic10-{split}", key, partial(_decoded, files))
        return Samples(x=tensors["x"], y=tensors["y"])

    def _pictures(self, folder: Path) -> list[os.DirEntry[str]]:
        """The pictures of a class, by name."""
        try:
            with os.scandir(folder) as entries:
                found = sorted(
                    (e for e in entries if e.name.endswith(".png")), key=lambda e: e.name
                )
        except (FileNotFoundError, NotADirectoryError):
            found = []
        except OSError as error:
            raise _refusal(str(folder), f"cannot be read ({error.strerror})") from error
        if not found:
            expected = folder / "*.png" if folder.is_dir() else folder
            raise missing(self.root, expected, holds="train and test", archive="CINIC-10")
        return found


def _decoded(files: list[list[os.DirEntry[str]]]) -> dict[str, Tensor]:
    """(N, 3, 32, 32) uint8 and (N,) int64: the pictures of all classes, and their classes."""
    sizes = torch.tensor([len(part) for part in files])
    pictures = (_picture(file.path) for part in files for file in part)
    x = np.empty((int(sizes.sum()), 3, 32, 32), dtype=np.uint8)
    for i, picture in enumerate(pictures):
        x[i] = picture
    return {"x": torch.from_numpy(x), "y": torch.arange(len(files)).repeat_interleave(sizes)}


def _picture(path: str) -> np.ndarray:
    """(3, 32, 32) uint8."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise _refusal(path, f"cannot be read ({reason})") from error
    if pixels.shape != (32, 32, 3):
        raise _refusal(path, f"has {pixels.shape[1]}x{pixels.shape[0]} pixels, not 32x32")
    return pixels.transpose(2, 0, 1)


def _refusal(path: str, found: str) -> UserError:
    key = "data.dataset.init_args.root"
    return UserError(key, f"{path} {found}", "unpack the published archive again")
