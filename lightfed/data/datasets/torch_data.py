"""Data sets of torch: anything with a length and samples by their number."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils import data as torch_data
from typing_extensions import override

from lightfed.data.datasets.dataset import KEY, Dataset, Samples, Split, Transform, moments
from lightfed.data.datasets.transforms import Functions, steps, transformed
from lightfed.utils.errors import UserError, reason, require


class FromTorch(Dataset):
    """The samples of a training and a test set of torch, read once.

    A sample is an image of PIL, an array or a tensor of one shape, with a whole number as its
    class. Without transforms, images (uint8) are standardised, and other samples stay as they are.
    """

    def __init__(
        self,
        train: torch_data.Dataset | LightningDataModule,
        test: torch_data.Dataset | None = None,
        *,
        train_transform: Callable[[Any], Any] | None = None,
        test_transform: Callable[[Any], Any] | None = None,
        classes: Sequence[str] | None = None,
        groups: Sequence[int | str] | None = None,
    ) -> None:
        """Describe the data; nothing is read yet.

        Args:
            train: the training set, or a data module whose loaders for training and testing have
                one data set each.
            test: the test set; None for a data module.
            train_transform: of samples in training, such as one of torchvision.transforms.v2; in
                every epoch, on the device.
            test_transform: of all other samples; give both if samples need one.
            classes: their names; by default those of the training set, or its numbers.
            groups: the natural owner of each training sample, for `Natural`.
        """
        given = isinstance(train, LightningDataModule)
        found = "given with a data module" if given else "missing"
        fix = "leave it out" if given else "give the test set"
        require((test is None) == given, f"{KEY}.test", found, fix)
        self._train, self._test = train, test
        self._functions = Functions(train_transform, test_transform)
        self._names, self._owners = classes, groups

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        known = self._names or getattr(self._sources["train"], "classes", None)
        top = int(self._samples["train"].y.max()) if known is None else 0
        return tuple(map(str, range(top + 1) if known is None else known))

    @cached_property
    def input_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        first = self._samples["test"].x[:1].clone()  # a transform may change it
        if isinstance(self.transform, Transform):
            return tuple(first.shape[1:])
        shapes = []
        for key, function in (("test", self._functions.test), ("train", self._functions.train)):
            try:
                shapes.append(tuple(transformed(first, function, None).shape[1:]))
            except Exception as error:  # of the user's function
                found = f"fails for sample 0 ({reason(error)})"
                fix = "it is given a tensor, (C, H, W) for images"
                raise UserError(f"{KEY}.{key}_transform", found, fix) from error
        found = f"gives the shape {shapes[1]}, test_transform {shapes[0]}"
        fits = shapes[0] == shapes[1]
        require(fits, f"{KEY}.train_transform", found, "give both with one shape")
        return shapes[0]

    @property
    @override
    def transform(self) -> Transform | Functions:
        if self._functions == Functions() and self._samples["train"].x.dtype == torch.uint8:
            return self._standard
        return self._functions

    @cached_property
    def _standard(self) -> Transform:
        return Transform(*moments(self._samples["train"].x))

    @override
    def load(self, split: Split) -> Samples:
        return self._samples[split]

    @cached_property
    def _sources(self) -> dict[str, Any]:
        if not isinstance(self._train, LightningDataModule):
            return {"train": self._train, "test": self._test}
        module = self._train
        module.prepare_data()
        module.setup("fit")
        module.setup("test")
        loaders = {"train": module.train_dataloader(), "test": module.test_dataloader()}
        for split, loader in loaders.items():
            found, fix = f"its {split} loader is a {type(loader).__name__}", "give one data loader"
            require(hasattr(loader, "dataset"), f"{KEY}.train", found, fix)
        return {split: loader.dataset for split, loader in loaders.items()}

    @cached_property
    def _samples(self) -> dict[str, Samples]:
        train, test = (_read(source, split) for split, source in self._sources.items())
        if self._owners is not None:
            _, groups = np.unique(np.asarray(self._owners), return_inverse=True)
            train = Samples(train.x, train.y, torch.from_numpy(groups))
        return {"train": train, "test": test}


def _read(source: Any, split: str) -> Samples:
    """All samples of a data set."""
    key = f"{KEY}.{split}"
    names = [type(step).__name__ for step in steps(getattr(source, "transform", None))]
    drawn = [name for name in names if "Random" in name]
    fix = f"give it as {split}_transform: the data set is read only once"
    require(not drawn, key, f"its transform has {', '.join(drawn)}", fix)
    require(hasattr(source, "__len__"), key, "it has no length", "give a map-style data set")
    samples: list[Tensor] = []
    labels: list[int] = []
    for number in range(len(source)):
        try:
            x, y = source[number]
            x = _tensor(x)
            if samples and x.shape != samples[0].shape:
                raise ValueError(f"its shape is {tuple(x.shape)}, not {tuple(samples[0].shape)}")
            if float(y) != int(y):
                raise ValueError(f"its class is {float(y)}")
        except Exception as error:  # of the user's data set
            found = f"sample {number} cannot be used ({reason(error)})"
            fix = "a sample is a pair of tensors of one shape, and whole numbers"
            raise UserError(key, found, fix) from error
        samples.append(x)
        labels.append(int(y))
    require(bool(samples), key, "it is empty", "give samples")
    return Samples(torch.stack(samples), torch.tensor(labels))


def _tensor(x: Any) -> Tensor:
    if hasattr(x, "getbands"):  # an image of PIL
        from torchvision.transforms.functional import pil_to_tensor

        return pil_to_tensor(x)
    x = torch.as_tensor(x)
    x = x if x.dtype == torch.uint8 else x.float()
    return x if x.dim() else x[None]
