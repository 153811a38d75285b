"""Images: the digits of scikit-learn, and MNIST, Fashion-MNIST and CIFAR from official files.

Papers differ in normalisation constants and augmentation; a preset names the paper.
"""

import tarfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torchvision import datasets as published
from typing_extensions import override

from lightfed.data.dataset import KEY, Dataset, Samples, Split, Transform
from lightfed.datasets.cifar_batches import batch_of
from lightfed.utils.counts import largest_remainder
from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.rng import numpy_generator

_DIGIT_NAMES = tuple("0123456789")
_CIFAR10_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange
orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit
raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel
streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip
turtle wardrobe whale willow_tree wolf woman worm
"""
_CIFAR10_HETEROFL = Transform((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), 4, True)
_CIFAR100_DISPFL = Transform((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), 4, True)


class Digits(Dataset):
    """1,797 real handwritten digits of 8x8 pixels (UCI, by scikit-learn): 1,437 train, 360 test.

    The grey levels 0..16 are stored as level / 16, exact in float32. The split is stratified and
    never changes.
    """

    classes = _DIGIT_NAMES
    transform = Transform(mean=(0.3055,), std=(0.3762,))  # of the training split

    def __init__(self, *, image_size: int = 8) -> None:
        """Use the digits as they are or resized.

        Args:
            image_size: height and width in pixels; any size but 8 needs bilinear interpolation.
        """
        found = f"{image_size} pixels"
        require(image_size >= 1, f"{KEY}.image_size", found, "give at least 1")
        self.image_size = image_size
        self.input_shape = (1, image_size, image_size)

    @override
    def load(self, split: Split) -> Samples:
        # The package is found and not imported, which would take half a second of every run.
        package = find_spec("sklearn")
        assert package is not None
        file = Path(str(package.origin)).parent / "datasets" / "data" / "digits.csv.gz"
        table = np.loadtxt(file, delimiter=",")
        images, y = table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
        # Four fifths of each class, drawn with a constant seed, are for training.
        rng = numpy_generator(0, "digits/split")
        chosen = np.full(len(y), split == "test")
        for label, count in enumerate(largest_remainder(np.bincount(y), len(y) * 4 // 5)):
            chosen[rng.permutation(np.flatnonzero(y == label))[:count]] = split == "train"
        x = torch.from_numpy((images[chosen] / 16.0).astype(np.float32)).unsqueeze(1)
        if self.image_size != 8:
            x = F.interpolate(x, size=(self.image_size, self.image_size), mode="bilinear")
        return Samples(x=x, y=torch.from_numpy(y[chosen]))


class OfficialFiles(Dataset):
    """A data set in its official files, where torchvision expects them."""

    _reader: ClassVar[Any]  # torchvision's class for the files
    _folder: ClassVar[str]  # of the files, below the root
    _sizes: ClassVar[Mapping[Split, int]] = {"train": 60_000, "test": 10_000}

    def __init__(self, root: str, *, download: bool = False, verify_checksums: bool = True) -> None:
        """Read the official files.

        Args:
            root: the folder that holds the folder of the data set.
            download: fetch the files if they are missing.
            verify_checksums: refuse files that are not the official ones: those of CIFAR by their
                md5, and all by the number of images. Other files of CIFAR's form are read without
                running code: they may hold arrays, texts, numbers and lists alone.
        """
        self.root = Path(root).expanduser()
        self.download, self.verify_checksums = download, verify_checksums

    @override
    def fetch(self) -> None:
        if self.download:
            self.load("train")

    def _read(self, split: Split) -> Any:
        """The images and the targets of a split, as torchvision has them."""
        return self._reader(str(self.root), train=split == "train", download=self.download)

    @override
    def load(self, split: Split) -> Samples:
        try:
            data = self._read(split)
            if self.verify_checksums and len(data) != self._sizes[split]:
                raise ValueError(f"{len(data)} images; officially {self._sizes[split]}")
        except Exception as error:  # a damaged pickle, and the network, can raise anything
            folder = self.root / self._folder
            key = "download" if self.download and not any(folder.glob("*")) else "root"
            found = f"{self.name} cannot be read from {folder} ({reason(error)})"
            fix = f"set root to the folder that holds {self._folder}, or pass download: true"
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
        preset: str | None = None,
        augment: bool = True,
        **files: bool,
    ) -> None:
        """Read the images.

        Args:
            root: the folder that holds the folder of the data set.
            preset: the paper whose constants and augmentation are used; by default the first one.
            augment: crop, flip and erase at random in training, as the paper does.
            **files: `download` and `verify_checksums`.
        """
        super().__init__(root, **files)
        self.preset, self.augment = preset or next(iter(self._presets)), augment
        found, fix = f"{self.name} has no preset {preset!r}", ", ".join(self._presets)
        require(self.preset in self._presets, f"{KEY}.preset", found, f"choose one of {fix}")

    @override
    def _read(self, split: Split) -> Any:
        if self.verify_checksums:
            return super()._read(split)
        if self.download and not (self.root / self._folder).is_dir():
            self._unpack()
        listed = self._reader.train_list if split == "train" else self._reader.test_list
        batches = [batch_of(self.root / self._folder / name) for name, _ in listed]
        images = np.concatenate([images for images, _ in batches])
        targets = [target for _, targets in batches for target in targets]
        return SimpleNamespace(data=images, targets=targets)

    def _unpack(self) -> None:
        """Unpack an archive that is there, or fetch the official files, by their md5."""
        archive = self.root / self._reader.filename
        if not archive.is_file():
            self._reader(str(self.root), download=True)
            return
        with tarfile.open(archive) as files:
            files.extractall(self.root, filter="data")  # nothing outside of the folder

    @property
    @override
    def transform(self) -> Transform:
        chosen = self._presets[self.preset]
        return chosen if self.augment else chosen.fixed()


class MNIST(OfficialFiles):
    """70,000 handwritten digits of 28x28 pixels, from ROOT/MNIST/raw/*-ubyte.

    Mean and deviation are those of HeteroFL, FedBCD and FedAPEN.
    """

    classes = _DIGIT_NAMES
    transform = Transform(mean=(0.1307,), std=(0.3081,))
    input_shape = (1, 28, 28)
    _reader = published.MNIST
    _folder = "MNIST/raw"


class FashionMNIST(OfficialFiles):
    """70,000 images of clothes of 28x28 pixels, from ROOT/FashionMNIST/raw/*-ubyte."""

    classes = tuple(published.FashionMNIST.classes)
    transform = Transform(mean=(0.2860,), std=(0.3530,))  # of the training set
    input_shape = (1, 28, 28)
    _reader = published.FashionMNIST
    _folder = "FashionMNIST/raw"


class CIFAR10(CIFARFiles):
    """60,000 images of ten classes, from ROOT/cifar-10-batches-py.

    The preset is heterofl, flexifed, fedapen, dispfl, fedbcd or pfedmoe, which follows other
    repositories of its authors, with random erasing.
    """

    classes = tuple(_CIFAR10_NAMES.split())
    _reader = published.CIFAR10
    _folder = _reader.base_folder
    _presets = {
        "heterofl": _CIFAR10_HETEROFL,
        "flexifed": _CIFAR10_HETEROFL,
        "fedapen": _CIFAR10_HETEROFL,
        "dispfl": Transform(
            (0.49139968, 0.48215827, 0.44653124), (0.24703233, 0.24348505, 0.26158768), 4, True
        ),
        "fedbcd": Transform((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 4, True),
        "pfedmoe": Transform(  # the constants are those of ImageNet
            (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 4, True, padding="mean", erase=0.5
        ),
    }


class CIFAR100(CIFARFiles):
    """60,000 images of a hundred classes, the fine labels, from ROOT/cifar-100-python.

    The preset is dispfl, fedapen or pfedmoe, as of `CIFAR10`.
    """

    classes = tuple(_CIFAR100_NAMES.split())
    _reader = published.CIFAR100
    _folder = _reader.base_folder
    _presets = {
        "dispfl": _CIFAR100_DISPFL,
        "fedapen": _CIFAR10_HETEROFL,  # its code keeps the constants of CIFAR-10
        "pfedmoe": replace(_CIFAR100_DISPFL, padding="mean", erase=0.5),
    }
