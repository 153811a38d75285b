"""Data sets in the files of their authors, which torchvision knows; what is said if it cannot.

torchvision takes seconds to import, so that only `load` imports it.
"""

import pickle
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from typing_extensions import override

from lightfed.data.datasets.dataset import Dataset, Samples, Split, Transform
from lightfed.utils.errors import UserError

# All that a pickled array needs besides text and numbers, by numpy 1 and 2.
_ARRAYS = {("numpy", "ndarray"), ("numpy", "dtype")} | {
    (f"numpy.{core}.{module}", name)
    for core in ("core", "_core")
    for module, name in (("multiarray", "_reconstruct"), ("numeric", "_frombuffer"))
}


class OfficialFiles(Dataset):
    """A data set in the files that its authors publish, where torchvision expects them."""

    def __init__(self, root: str, *, download: bool, verify_checksums: bool) -> None:
        self.root = Path(root).expanduser()
        self.download = download
        self.verify_checksums = verify_checksums

    @abstractmethod
    def _reader(self) -> Any:
        """The torchvision class that knows the files."""

    @abstractmethod
    def _read(self, reader: Any, split: Split) -> Samples:
        """All samples of a split; raises anything if a file is missing or damaged."""

    @abstractmethod
    def _files(self, reader: Any) -> list[tuple[Path, str | None]]:
        """Every file that has to be there, with its md5 where it is to be checked."""

    @override
    def fetch(self) -> None:
        if self.download:
            self.load("train")

    @override
    def load(self, split: Split) -> Samples:
        reader = self._reader()
        try:
            samples = self._read(reader, split)
        except Exception as error:  # a damaged pickle can raise anything
            self._refuse(reader, error)
        self._check(samples, split)
        return samples

    def _check(self, samples: Samples, split: Split) -> None:
        """Refuse files that can be read but hold something else."""
        top = int(samples.y.max())
        if len(samples.x) == len(samples.y) and samples.x.shape[1:] == self.input_shape:
            if top < self.num_classes:
                return
            found = f"class {top} where {self.name} has {self.num_classes} classes"
        else:
            found = f"{tuple(samples.x.shape)} pixels for {len(samples.y)} labels"
        raise UserError(
            "data.dataset.init_args.root",
            f"the {split} files of {self.name} below {self.root} hold {found}",
            "point root at the official files",
        )

    def _refuse(self, reader: Any, error: Exception) -> NoReturn:
        """Say which file is missing or damaged."""
        from torchvision.datasets.utils import check_integrity

        reason = " ".join(f"{type(error).__name__}: {error}".split())
        files = self._files(reader)
        missing = next((path for path, _ in files if not path.is_file()), None)
        if missing is not None and self.download:
            raise UserError(
                "data.dataset.init_args.download",
                f"{self.name} could not be fetched ({reason})",
                f"put its files below {missing.parent} and set download: false",
            ) from error
        fix = f"set root to the folder that holds {files[0][0].relative_to(self.root).parts[0]}"
        if missing is not None:
            found, fix = f"expected {missing}, which is not there", f"{fix}, or pass download: true"
        elif broken := [path for path, md5 in files if not check_integrity(str(path), md5)]:
            found = f"{broken[0]} is not the official file (its md5 differs)"
            fix = "fetch it again, or pass verify_checksums: false"
        else:
            found = f"{self.name} below {files[0][0].parent} cannot be read ({reason})"
            fix = "fetch the files again"
        raise UserError("data.dataset.init_args.root", found, fix) from error


class MNISTFiles(OfficialFiles):
    """The four uncompressed idx files in ROOT/<class name>/raw."""

    input_shape = (1, 28, 28)
    _official_sizes: ClassVar[Mapping[str, int]] = {"train": 60_000, "test": 10_000}

    @override
    def _read(self, reader: Any, split: Split) -> Samples:
        data = reader(str(self.root), train=split == "train", download=self.download)
        return Samples(x=data.data.unsqueeze(1), y=data.targets)

    @override
    def _files(self, reader: Any) -> list[tuple[Path, str | None]]:
        # torchvision derives the folder from the name of its class, hence never from a subclass
        folder = self.root / reader.__name__ / "raw"
        return [(folder / name.removesuffix(".gz"), None) for name, _ in reader.resources]

    @override
    def _check(self, samples: Samples, split: Split) -> None:
        super()._check(samples, split)
        # The published checksums are of the compressed files, which are not kept: count instead.
        expected = self._official_sizes[split]
        if self.verify_checksums and len(samples) != expected:
            raise UserError(
                "data.dataset.init_args.root",
                f"the {split} files of {self.name} below {self.root} hold {len(samples)} images, "
                f"the official ones {expected}",
                "fetch them again, or pass verify_checksums: false",
            )


class CIFARFiles(OfficialFiles):
    """The pickled batches of 32x32 colour pictures."""

    input_shape = (3, 32, 32)
    _presets: ClassVar[Mapping[str, Transform]]

    def __init__(
        self,
        root: str,
        *,
        download: bool,
        verify_checksums: bool,
        preset: str,
        augment: bool,
        erase: float | None,
    ) -> None:
        super().__init__(root, download=download, verify_checksums=verify_checksums)
        if preset not in self._presets:
            raise UserError(
                "data.dataset.init_args.preset",
                f"{self.name} has no preset {preset!r}",
                f"choose one of {', '.join(self._presets)}",
            )
        if erase is not None and not (0 <= erase <= 1 and (augment or not erase)):
            found = f"{erase}" if augment else f"{erase} beside augment: false"
            fix = "give a probability such as 0.5, or leave it out"
            raise UserError("data.dataset.init_args.erase", found, fix)
        self.preset = preset
        self.augment = augment
        self.erase = erase

    @property
    @override
    def transform(self) -> Transform:
        chosen = self._presets[self.preset]
        if not self.augment:
            return chosen.fixed()
        return chosen if self.erase is None else replace(chosen, erase=self.erase)

    @override
    def _read(self, reader: Any, split: Split) -> Samples:
        # torchvision would run whatever code a pickle names.
        from torchvision.datasets.utils import check_integrity, download_and_extract_archive

        def whole() -> bool:
            return all(check_integrity(str(path), md5) for path, md5 in self._files(reader))

        if self.download and not whole():
            md5 = reader.tgz_md5 if self.verify_checksums else None
            download_and_extract_archive(
                reader.url, str(self.root), filename=reader.filename, md5=md5
            )
        if not whole():
            raise FileNotFoundError("not all files are there, or are the official ones")
        listed = reader.train_list if split == "train" else reader.test_list
        batches = [_unpickled(self.root / reader.base_folder / name) for name, _ in listed]
        label = "labels" if "labels" in batches[0] else "fine_labels"
        x = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
        y = np.concatenate([batch[label] for batch in batches], dtype=np.int64)
        return Samples(x=torch.from_numpy(x), y=torch.from_numpy(y))

    @override
    def _files(self, reader: Any) -> list[tuple[Path, str | None]]:
        folder = self.root / reader.base_folder
        meta = [reader.meta["filename"], reader.meta["md5"]]
        listed = [*reader.train_list, *reader.test_list, meta]
        return [(folder / name, md5 if self.verify_checksums else None) for name, md5 in listed]


class _ArraysAlone(pickle.Unpickler):
    """Unpickles arrays and what Python has literals for: nothing that could run code."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return super().find_class(module, name)


def _unpickled(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return _ArraysAlone(file, encoding="latin1").load()
