"""CINIC-10: image files in a folder per class, decoded once."""

from functools import cached_property
from pathlib import Path

from typing_extensions import override

from lightfed.data.datasets.dataset import KEY, Samples, Split, Transform, missing
from lightfed.data.datasets.hub import Hub
from lightfed.data.datasets.vision import CIFAR10
from lightfed.utils.errors import UserError, require

_TRANSFORM = Transform(
    (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835), 4, True
)


class CINIC10(Hub):
    """CIFAR-10's classes with images of ImageNet: 90,000 for training and 90,000 for testing.

    From ROOT/{train,test}/CLASS/*.png; the third part, `valid`, is not used. The decoded images,
    276 MB per split, are kept between runs, as those of `Hub`.
    """

    classes = CIFAR10.classes
    input_shape = (3, 32, 32)
    name = "CINIC10"

    def __init__(self, root: str, *, augment: bool = True) -> None:
        """Read CINIC-10.

        Args:
            root: the folder that holds train and test.
            augment: crop and flip at random in training, as FlexiFed does.
        """
        super().__init__(str(Path(root).expanduser()), image="image", label="label")
        self.augment = augment

    @cached_property
    @override
    def transform(self) -> Transform:
        return _TRANSFORM if self.augment else _TRANSFORM.fixed()

    @override
    def load(self, split: Split) -> Samples:
        folder = Path(self.path) / split
        if not folder.is_dir():
            raise missing(folder, holds="train and test")
        fix = "unpack the published archive again"
        found = sorted(path.name for path in folder.iterdir() if path.is_dir())
        named = f"{folder} cannot be read (its folders are {', '.join(found)})"
        require(found == list(self.classes), f"{KEY}.root", named, fix)
        try:
            return super().load(split)
        except UserError as error:  # of an image: the columns are no arguments of this class
            damage = f"{folder} cannot be read ({error.found})"
            raise UserError(f"{KEY}.root", damage, fix) from error
