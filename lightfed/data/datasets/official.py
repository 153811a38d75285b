"""Readers of the files that the authors of MNIST and CIFAR publish."""

import pickle
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torchvision.datasets.utils import check_integrity, download_and_extract_archive
from typing_extensions import override

from lightfed.data.datasets.dataset import KEY, Dataset, Samples, Split, Transform, unreadable
from lightfed.utils.errors import UserError, require

# The classes that a pickled array of numpy 1 or 2 needs.
_ARRAYS = {("numpy", "ndarray"), ("numpy", "dtype")} | {
    (f"numpy.{core}.{module}", name)
    for core in ("core", "_core")
    for module, name in (("multiarray", "_reconstruct"), ("numeric", "_frombuffer"))
}


class OfficialFiles(Dataset):
    """A data set in its official files, where torchvision expects them."""

    _reader: ClassVar[Any]  # torchvision's class for the files

    def __init__(self, root: str, *, download: bool = False, verify_checksums: bool = True) -> None:
        """Read the official files.

        Args:
            root: the folder that holds the folder of the data set.
            download: fetch the files if they are missing.
            verify_checksums: refuse files that are not the official ones: by their md5, and those
                of MNIST and Fashion-MNIST by the number of images.
        """
        self.root = Path(root).expanduser()
        self.download, self.verify_checksums = download, verify_checksums

    @abstractmethod
    def _files(self) -> list[tuple[Path, str | None]]:
        """All files, with the md5 of those to verify."""

    @abstractmethod
    def _download(self) -> None:
        """Put the files in place; raises anything."""

    @abstractmethod
    def _read(self, split: Split) -> Samples:
        """All samples of a split; raises anything if a file is damaged."""

    @override
    def fetch(self) -> None:
        if self.download:
            self.load("train")

    @override
    def load(self, split: Split) -> Samples:
        fault = self._fault()
        if fault is not None and self.download:
            try:
                self._download()
            except Exception as error:  # of the network, the disk or the archive
                found = f"{self.name} could not be fetched ({' '.join(str(error).split())})"
                fix = f"put its files below {self.root} and set download: false"
                raise UserError(f"{KEY}.download", found, fix) from error
            fault = self._fault()
        if fault is not None:
            raise fault
        try:
            return self._read(split)
        except Exception as error:  # a damaged pickle can raise anything
            fix = "fetch the official files, or pass verify_checksums: false for others of the kind"
            raise unreadable(self._files()[0][0].parent, error, fix=fix) from error

    def _fault(self) -> UserError | None:
        """The error for the first file that is missing or not the official one."""
        for path, md5 in self._files():
            if not path.is_file():
                folder = path.relative_to(self.root).parts[0]
                found = f"expected {path}, which is not there"
                fix = f"set root to the folder that holds {folder}, or pass download: true"
                return UserError(f"{KEY}.root", found, fix)
            if not check_integrity(path, md5):
                found = f"{path} is not the official file (its md5 differs)"
                fix = "fetch it again, or pass verify_checksums: false"
                return UserError(f"{KEY}.root", found, fix)
        return None


class MNISTFiles(OfficialFiles):
    """The four uncompressed idx files in ROOT/<class name>/raw."""

    input_shape = (1, 28, 28)

    @override
    def _files(self) -> list[tuple[Path, str | None]]:
        # torchvision derives the folder from the name of its class, so no subclass of it is used.
        folder = self.root / self._reader.__name__ / "raw"
        return [(folder / name.removesuffix(".gz"), None) for name, _ in self._reader.resources]

    @override
    def _download(self) -> None:
        self._reader(str(self.root), download=True)

    @override
    def _read(self, split: Split) -> Samples:
        data = self._reader(str(self.root), train=split == "train")
        # Only the compressed files have published checksums, and these are not kept.
        expected = 60_000 if split == "train" else 10_000
        if self.verify_checksums and len(data) != expected:
            raise ValueError(f"{len(data)} images, where the official files hold {expected}")
        return Samples(x=data.data.unsqueeze(1), y=data.targets)


class CIFARFiles(OfficialFiles):
    """The pickled batches of 32x32 colour images."""

    input_shape = (3, 32, 32)
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

    @property
    def _folder(self) -> Path:
        return self.root / self._reader.base_folder

    @override
    def _files(self) -> list[tuple[Path, str | None]]:
        reader = self._reader
        meta = [reader.meta["filename"], reader.meta["md5"]]
        listed = [*reader.train_list, *reader.test_list, meta]
        verify = self.verify_checksums
        return [(self._folder / name, md5 if verify else None) for name, md5 in listed]

    @override
    def _download(self) -> None:
        reader = self._reader
        md5 = reader.tgz_md5 if self.verify_checksums else None
        download_and_extract_archive(reader.url, self.root, filename=reader.filename, md5=md5)

    @override
    def _read(self, split: Split) -> Samples:
        # Not by torchvision, which would run any code that a pickle names.
        listed = self._reader.train_list if split == "train" else self._reader.test_list
        batches = []
        for name, _ in listed:
            with (self._folder / name).open("rb") as file:
                batches.append(_ArrayUnpickler(file, encoding="latin1").load())
        label = "labels" if "labels" in batches[0] else "fine_labels"
        x = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
        y = np.concatenate([batch[label] for batch in batches], dtype=np.int64)
        return Samples(x=torch.from_numpy(x), y=torch.from_numpy(y))


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles only arrays and types that Python has literals for, which run no code."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return super().find_class(module, name)
