"""Images: the digits of scikit-learn, and MNIST, Fashion-MNIST and CIFAR from official files.

Papers differ in the constants of normalization and in augmentation. A preset names the paper.
"""

import tarfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torchvision import datasets as published
from typing_extensions import override

from lightfed.data.dataset import KEY, Dataset, Samples, Split, Transform
from lightfed.datasets.cifar_batches import batch_of
from lightfed.utils.counts import largest_remainder
from lightfed.utils.errors import UserError, reason
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

    The gray levels 0..16 are stored as level / 16, which is exact in float32. The split is
    stratified and never changes.
    """

    classes = _DIGIT_NAMES
    transform = Transform(mean=(0.3055,), std=(0.3762,))  # of the training split

    def __init__(self, *, image_size: int = 8) -> None:
        """Use the digits as they are or resized.

        Args:
            image_size: The height and width in pixels. Any size but 8 needs bilinear
                interpolation.
        """
        if image_size < 1:
            found = f"{image_size} pixels"
            raise UserError(f"{KEY}.image_size", found, fix="give at least 1")
        self.image_size = image_size
        self.input_shape = (1, image_size, image_size)

    @override
    def load(self, split: Split) -> Samples:
        table = _digits()
        images = table[:, :-1].reshape(-1, 8, 8)
        y = table[:, -1].astype(np.int64)

        # Four fifths of each class, drawn with a constant seed, are for training.
        rng = numpy_generator(0, "digits/split")
        train_counts = largest_remainder(np.bincount(y), len(y) * 4 // 5)
        is_train = np.zeros(len(y), dtype=bool)
        for label, count in enumerate(train_counts):
            shuffled = rng.permutation(np.flatnonzero(y == label))
            is_train[shuffled[:count]] = True
        chosen = is_train if split == "train" else ~is_train

        x = torch.from_numpy((images[chosen] / 16.0).astype(np.float32)).unsqueeze(1)
        if self.image_size != 8:
            x = F.interpolate(x, size=(self.image_size, self.image_size), mode="bilinear")
        return Samples(x=x, y=torch.from_numpy(y[chosen]))


@cache  # both splits are in one table, and runs of a process may read it again
def _digits() -> NDArray[np.float64]:
    """Return the pixels and the label of each digit, (1797, 65), which nobody may write to."""
    # The package is found and not imported: that would take half a second of every run.
    package = find_spec("sklearn")
    assert package is not None
    file = Path(str(package.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",")
    table.setflags(write=False)
    return table


class OfficialFiles(Dataset):
    """A data set in its official files, where torchvision expects them."""

    # torchvision's class that reads the files, and their folder below the root.
    _reader: ClassVar[Any]
    _folder: ClassVar[str]

    # The official number of images of each split.
    _sizes: ClassVar[Mapping[Split, int]] = {"train": 60_000, "test": 10_000}

    def __init__(self, root: str, *, download: bool = False, verify_checksums: bool = True) -> None:
        """Read the official files.

        Args:
            root: The folder that holds the folder of the data set.
            download: Whether to fetch the files if they are missing.
            verify_checksums: Whether to refuse files that are not the official ones: those of CIFAR
                by their md5, and all by the number of images. Other files of CIFAR's form are read
                without running code: they can only hold arrays, texts, numbers and lists.
        """
        self.root = Path(root).expanduser()
        self.download = download
        self.verify_checksums = verify_checksums

    @override
    def fetch(self) -> None:
        if self.download:
            self.load("train")

    def _read(self, split: Split) -> Any:
        """Return an object with the images and the targets of a split, as torchvision does."""
        return self._reader(str(self.root), train=split == "train", download=self.download)

    @override
    def load(self, split: Split) -> Samples:
        try:
            data = self._read(split)
            if self.verify_checksums and len(data) != self._sizes[split]:
                raise ValueError(f"{len(data)} images; officially {self._sizes[split]}")
        except Exception as error:  # a damaged pickle, and the network, can raise anything
            folder = self.root / self._folder
            has_failed_to_download = self.download and not any(folder.glob("*"))
            argument = "download" if has_failed_to_download else "root"
            raise UserError(
                key=f"{KEY}.{argument}",
                found=f"{self.name} cannot be read from {folder} ({reason(error)})",
                fix=f"set root to the folder that holds {self._folder}, or pass download: true; "
                "for files that are not the official ones, verify_checksums: false",
            ) from error

        # To (N, C, H, W), from (N, H, W) of gray images or (N, H, W, C) of others.
        x = torch.as_tensor(data.data)
        x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2).contiguous()
        return Samples(x=x, y=torch.as_tensor(data.targets))


class CIFARFiles(OfficialFiles):
    """The pickled batches of 32x32 color images."""

    input_shape = (3, 32, 32)
    _sizes = {"train": 50_000, "test": 10_000}

    #: The constants and augmentation of each paper, by its method.
    presets: ClassVar[Mapping[str, Transform]]

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
            root: The folder that holds the folder of the data set.
            preset: The paper whose constants and augmentation are used; by default the first one.
            augment: Whether to crop, flip and erase at random in training, as the paper does.
            **files: `download` and `verify_checksums`.
        """
        super().__init__(root, **files)
        if not preset:
            preset = next(iter(self.presets))
        if preset not in self.presets:
            raise UserError(
                key=f"{KEY}.preset",
                found=f"{self.name} has no preset {preset!r}",
                fix=f"choose one of {', '.join(self.presets)}",
            )
        self.preset = preset
        self.augment = augment

    @override
    def _read(self, split: Split) -> Any:
        if self.verify_checksums:
            return super()._read(split)

        folder = self.root / self._folder
        if self.download and not folder.is_dir():
            self._unpack()

        files = self._reader.train_list if split == "train" else self._reader.test_list
        images = []
        targets: list[int] = []
        for name, _ in files:
            images_of_batch, targets_of_batch = batch_of(folder / name)
            images.append(images_of_batch)
            targets += targets_of_batch
        return SimpleNamespace(data=np.concatenate(images), targets=targets)

    def _unpack(self) -> None:
        """Unpack the archive if it exists, or else fetch the official files, by their md5."""
        archive = self.root / self._reader.filename
        if not archive.is_file():
            self._reader(str(self.root), download=True)
            return
        # The filter refuses files that would lie outside of the folder.
        with tarfile.open(archive) as files:
            files.extractall(self.root, filter="data")

    @property
    @override
    def transform(self) -> Transform:
        transform = self.presets[self.preset]
        return transform if self.augment else transform.fixed()


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

    The preset is heterofl, flexifed, fedapen, dispfl, fedbcd or pfedmoe. The last one follows other
    repositories of its authors, with random erasing.
    """

    classes = tuple(_CIFAR10_NAMES.split())
    _reader = published.CIFAR10
    _folder = _reader.base_folder
    presets = {
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

    The preset is dispfl, fedapen or pfedmoe; see `CIFAR10`.
    """

    classes = tuple(_CIFAR100_NAMES.split())
    _reader = published.CIFAR100
    _folder = _reader.base_folder
    presets = {
        "dispfl": _CIFAR100_DISPFL,
        "fedapen": _CIFAR10_HETEROFL,  # its code keeps the constants of CIFAR-10
        "pfedmoe": replace(_CIFAR100_DISPFL, padding="mean", erase=0.5),
    }
