"""The official files of MNIST and CIFAR, read by torchvision."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from typing_extensions import override

from lightfed.data.datasets.dataset import KEY, Dataset, Samples, Split, Transform
from lightfed.utils.errors import UserError, reason, require


class OfficialFiles(Dataset):
    """A data set in its official files, where torchvision expects them."""

    _reader: ClassVar[Any]  # torchvision's class for the files
    _folder: ClassVar[str]  # of the files, below the root
    _sizes: ClassVar[Mapping[Split, int]]

    def __init__(self, root: str, *, download: bool = False, verify_checksums: bool = True) -> None:
        """Read the official files.

        Args:
            root: the folder that holds the folder of the data set.
            download: fetch the files if they are missing.
            verify_checksums: refuse files that are not the official ones: those of CIFAR by their
                md5, and all by the number of images. CIFAR's files are pickles, which can run code;
                only set false for files that you trust.
        """
        self.root = Path(root).expanduser()
        self.download, self.verify_checksums = download, verify_checksums

    @override
    def fetch(self) -> None:
        if self.download:
            self.load("train")

    @override
    def load(self, split: Split) -> Samples:
        reader = self._reader
        if not self.verify_checksums and hasattr(reader, "tgz_md5"):
            reader = _unverified(reader)
        try:
            data = reader(str(self.root), train=split == "train", download=self.download)
            if self.verify_checksums and len(data) != self._sizes[split]:
                raise ValueError(f"{len(data)} images; officially {self._sizes[split]}")
        except Exception as error:  # a damaged pickle, and the network, can raise anything
            folder = self.root / self._folder
            key = "download" if self.download and not any(folder.glob("*")) else "root"
            found = f"{self.name} cannot be read from {folder} ({reason(error)})"
            holds = Path(self._folder).parts[0]
            fix = f"set root to the folder that holds {holds}, or pass download: true"
            others = "; for files that are not the official ones, verify_checksums: false"
            raise UserError(f"{KEY}.{key}", found, fix + others) from error
        x = torch.as_tensor(data.data)
        x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2).contiguous()
        return Samples(x=x, y=torch.as_tensor(data.targets))


class CIFARFiles(OfficialFiles):
    """The pickled batches of 32x32 colour images."""

    input_shape = (3, 32, 32)
    _sizes = {"train": 50_000, "test": 10_000}
    _presets: ClassVar[Mapping[str, Transform]]

    def __init__(
        self,
        root: str,
        *,
        preset: str,
        augment: bool = True,
        erase: float | None = None,
        **files: bool,
    ) -> None:
        """Read the images.

        Args:
            root: the folder that holds the folder of the data set.
            preset: the paper whose constants and augmentation are used.
            augment: crop, flip and erase at random in training, as the paper does.
            erase: probability with which a rectangle of a training image gets the mean colour; the
                preset's by default.
            **files: `download` and `verify_checksums`.
        """
        super().__init__(root, **files)
        found, fix = f"{self.name} has no preset {preset!r}", ", ".join(self._presets)
        require(preset in self._presets, f"{KEY}.preset", found, f"choose one of {fix}")
        if erase is not None:
            found = f"{erase}" if augment else f"{erase} with augment: false"
            fix = "give a probability such as 0.5, or leave it out"
            require(0 <= erase <= 1 and (augment or not erase), f"{KEY}.erase", found, fix)
        self.preset, self.augment, self.erase = preset, augment, erase

    @property
    @override
    def transform(self) -> Transform:
        chosen = self._presets[self.preset]
        if not self.augment:
            return chosen.fixed()
        return chosen if self.erase is None else replace(chosen, erase=self.erase)


def _unverified(reader: Any) -> Any:
    """A class of torchvision that reads CIFAR files of any md5."""
    listed: dict[str, Any] = {
        part: [(name, None) for name, _ in getattr(reader, part)]
        for part in ("train_list", "test_list")
    }
    listed["meta"] = reader.meta | {"md5": None}
    return type(reader.__name__, (reader,), {**listed, "tgz_md5": None})
