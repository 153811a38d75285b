"""Data sets of torch: anything with a length and samples by their number."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils import data as torch_data
from typing_extensions import override

from lightfed.data.dataset import KEY, Dataset, Samples, Split, Task, Transform, moments
from lightfed.data.torch_loaders import check_loader, loader_of, settings_not_followed
from lightfed.data.torch_samples import kind_of, num_shared, read_columns
from lightfed.data.transforms import Functions, normalizes, transformed
from lightfed.utils.errors import UserError, reason
from lightfed.utils.lightning_private import is_overridden
from lightfed.utils.rng import seeded

_SPLITS: tuple[Split, Split] = ("train", "test")

# Columns that partitions sort by as classes, unless the user names another one.
_USUAL_LABELS = ("labels", "label")

# An axis of this length may be that of colors: gray, RGB, or RGB with transparency.
_COLORS = (1, 3, 4)


class FromTorch(Dataset):
    """The samples of a training and a test set of torch, read once.

    What they draw from global random state meanwhile, as `random_split` does, is always the same.

    A sample is a pair: an image of PIL, an array or a tensor of one shape, and a whole number as
    its class, or the targets of a regression, a float or a vector of floats. Without transforms,
    images (uint8) are standardized, and other samples stay as they are.

    Or a sample is a dict, tuple or named tuple of tensors, its columns, and so is a batch. Columns
    may differ in the length of their first axis; a batch is as long as its longest sample. Shorter
    ones are filled with 0, and `labels` with -100, which losses of torch leave out.
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
        test_groups: Sequence[int | str] | None = None,
        by: str | int | None = None,
    ) -> None:
        """Describe the data; nothing is read yet.

        Args:
            train: The training set, or a data module whose loaders for training and testing have
                one data set each.
            test: The test set; None for a data module.
            train_transform: The transform of samples in training, such as one of
                torchvision.transforms.v2. It is called in every epoch, on the device.
            test_transform: The transform of all other samples. Give both if samples need one.
            classes: The names of the classes; by default those of the training set, or its
                numbers.
            groups: The natural owner of each training sample, for `Natural`.
            test_groups: The owner of each test sample, so that a client is tested on those of its
                owners.
            by: The column of whole numbers, a sample each, that partitions sort by as classes; by
                default `labels` or `label`, if it is one. Columns of tuples are 0, 1, ...

        Raises:
            UserError: If a data module is given with a test set, or a data set without one; or if
                only training samples are normalized.
        """
        if test_groups is not None and groups is None:
            fix = "give the owners of training samples, too"
            raise UserError(f"{KEY}.groups", "not given, but test_groups is", fix)
        is_module = isinstance(train, LightningDataModule)
        has_test = test is not None
        if is_module == has_test:
            raise UserError(
                key=f"{KEY}.test",
                found="given twice" if is_module else "missing",
                fix="give a test set, unless a data module has it: FromTorch(train, test)",
            )
        if test_transform is None and normalizes(train_transform):
            raise UserError(
                key=f"{KEY}.test_transform",
                found="missing, but train_transform normalizes",
                fix="normalize both splits",
            )

        self._train = train
        self._test = test
        self._functions = Functions(train_transform, test_transform)
        self._class_names = classes
        self._owners = groups
        self._test_owners = test_groups
        self._by = None if by is None else str(by)
        self._values_of_by: tuple[str, ...] = ()  # known when the samples are read
        self._loaders: dict[Split, Any] = {}  # of a data module, likewise

    @property
    def datamodule(self) -> LightningDataModule | None:
        """The data module that these samples come from; None for data sets."""
        return self._train if isinstance(self._train, LightningDataModule) else None

    @property
    def task(self) -> Task:  # type: ignore[override]
        """What the samples are for. It is known when they are read, as are the next three."""
        samples = self._samples["train"]
        if samples.columns is not None:
            return "columns"
        return "regression" if samples.y.is_floating_point() else "classification"

    @property
    def outputs(self) -> int:  # type: ignore[override]
        return self._samples["train"].y.shape[1:].numel()

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        if self.task != "classification":
            return self._values_of_by

        names = self._class_names or getattr(self._sources["train"], "classes", None)
        if names is None:
            largest = int(self._samples["train"].y.max())
            names = range(largest + 1)
        return tuple(str(name) for name in names)

    @cached_property
    def input_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        if self.task == "columns":
            return ()

        # Of the test set, because the transform of training samples may be random. A copy, because
        # a transform may change what it is given.
        first = self._samples["test"].x[:1].clone()
        if isinstance(self.transform, Transform):
            return tuple(first.shape[1:])
        try:
            return tuple(transformed(self._functions.test, first, None).shape[1:])
        except Exception as error:  # of the user's function
            raise UserError(
                key=f"{KEY}.test_transform",
                found=f"fails for sample 0 ({reason(error)})",
                fix="write it for a tensor of shape (C, H, W)",
            ) from error

    @property
    @override
    def transform(self) -> Transform | Functions:
        train = self._samples["train"]
        are_images = train.columns is None and train.x.dtype == torch.uint8
        if are_images and not self._has_functions:
            return self._standardization
        return self._functions

    @property
    def _has_functions(self) -> bool:
        return self._functions != Functions()

    @cached_property
    def _standardization(self) -> Transform:
        """The transform of images by the moments of the training set.

        Raises:
            UserError: If channels come last.
        """
        x = self._samples["train"].x
        shape = tuple(x.shape[1:])
        if len(shape) == 3 and shape[2] in _COLORS and shape[0] not in _COLORS:
            raise UserError(
                key=f"{KEY}.train",
                found=f"samples have the shape {shape}",
                fix=f"put channels first, as {(shape[-1], *shape[:-1])}",
            )
        if len(shape) == 2:
            # Images without an axis of channels have one color, not one for every row.
            x = x.unsqueeze(1)
        return Transform(*moments(x))

    @override
    def load(self, split: Split) -> Samples:
        return self._samples[split]

    @override
    def unused_settings(self, settings: Mapping[str, Any]) -> list[str]:
        if self.datamodule is None:
            return []

        unused = []
        for split, loader in self._loaders.items():
            unused += settings_not_followed(split, loader, settings)
        for name in ("val_dataloader", "predict_dataloader"):
            if is_overridden(name, self.datamodule):
                unused.append(f"its {name}, whose samples nothing reads")
        return unused

    @cached_property
    @seeded(0)
    def _sources(self) -> dict[Split, Any]:
        """The data set of each split, after a data module has been set up.

        Raises:
            UserError: If a loader of a data module changes what its data set gives.
        """
        module = self.datamodule
        if module is None:
            return {"train": self._train, "test": self._test}

        module.prepare_data()
        module.setup("fit")
        module.setup("test")
        loaders = {split: loader_of(module, split) for split in _SPLITS}
        for split, loader in loaders.items():
            check_loader(loader, split)
        self._loaders = loaders
        return {split: loader.dataset for split, loader in loaders.items()}

    @cached_property
    def _samples(self) -> dict[Split, Samples]:
        """Both splits, read once.

        Raises:
            UserError: If samples cannot be used, or if the splits differ in kind or share samples.
        """
        sources = self._sources
        train = self._read("train")
        test = self._read("test")

        if kind_of(train) != kind_of(test):
            raise UserError(
                key=f"{KEY}.test",
                found=f"samples of {kind_of(test)}, and the training set of {kind_of(train)}",
                fix="give both sets the same kind",
            )
        shared = num_shared(sources["train"], sources["test"])
        if shared:
            raise UserError(
                key=f"{KEY}.test",
                found=f"{shared} of its samples are also in the training set",
                fix="leave them out",
            )

        train, test = self._with_classes(train, test)
        if self.datamodule is not None:
            # All samples are read.
            self.datamodule.teardown("fit")
            self.datamodule.teardown("test")
        return self._with_owners(train, test)

    def _with_owners(self, train: Samples, test: Samples) -> dict[Split, Samples]:
        """Return both splits with the owners of their samples, which have one number in both."""
        if self._owners is None:
            return {"train": train, "test": test}

        owners = np.asarray(self._owners)
        if self._test_owners is None:
            names, groups = np.unique(owners, return_inverse=True)
            train = replace(train, groups=torch.from_numpy(groups), owners=_words(names))
            return {"train": train, "test": test}

        test_owners = np.asarray(self._test_owners)
        names, groups = np.unique(np.concatenate([owners, test_owners]), return_inverse=True)
        numbers = torch.from_numpy(groups)
        return {
            "train": replace(train, groups=numbers[: len(owners)], owners=_words(names)),
            "test": replace(test, groups=numbers[len(owners) :], owners=_words(names)),
        }

    def _read(self, split: Split) -> Samples:
        """Read a split: pairs as x and y, and other samples as columns."""
        key = f"{KEY}.{split}"
        columns, are_pairs = read_columns(self._sources[split], key)
        x, *others = columns.tensors.values()
        if not are_pairs:
            return Samples(x, torch.zeros(len(x), dtype=torch.int64), columns=columns)

        if columns.lengths:
            sizes = next(iter(columns.lengths.values()))
            number = int((sizes != sizes[0]).int().argmax())
            raise UserError(
                key=key,
                found=f"sample {number} has {sizes[number]} entries, and sample 0 {sizes[0]}",
                fix="give pairs of one shape, or name the parts of a sample",
            )

        (y,) = others
        if x.dtype != torch.uint8:
            x = x.float()
        if x.dim() == 1:
            x = x.unsqueeze(1)
        # Floats are targets, unless the user has named classes.
        if y.is_floating_point() and not self._class_names:
            return Samples(x, y)
        return Samples(x, _whole_numbers(y.flatten(), key))

    def _with_classes(self, train: Samples, test: Samples) -> tuple[Samples, Samples]:
        """Return both splits; named columns with the classes that partitions sort by.

        Raises:
            UserError: If `by` is no column of whole numbers, or columns are to be transformed.
        """
        columns = []
        whole_numbers = []
        if train.columns is not None and test.columns is not None:
            columns = [train.columns.tensors, test.columns.tensors]
            for name, column in train.columns.tensors.items():
                if column.dim() == 1 and not column.is_floating_point():
                    whole_numbers.append(name)

        if self._by is not None and self._by not in whole_numbers:
            raise UserError(
                key=f"{KEY}.by",
                found=(
                    f"{self._by}, the columns of whole numbers are "
                    f"{', '.join(whole_numbers) or 'none'}"
                ),
                fix="name one of these",
            )
        if columns and self._has_functions:
            raise UserError(
                key=f"{KEY}.train_transform",
                found="given",
                fix="transform samples in the data set: these have named columns",
            )

        by = self._by
        if by is None:
            by = next((name for name in _USUAL_LABELS if name in whole_numbers), None)
        if by is None:
            return train, test

        # Classes are numbered by the values of both splits.
        values_of_both = torch.cat([tensors[by] for tensors in columns])
        values, codes = values_of_both.unique(return_inverse=True)
        names = self._class_names or values.tolist()
        self._values_of_by = tuple(str(name) for name in names)
        return replace(train, y=codes[: len(train)]), replace(test, y=codes[len(train) :])


def _whole_numbers(values: Tensor, key: str) -> Tensor:
    """Return the classes of samples, (N,), as int64.

    Raises:
        UserError: If one of them is no whole number.
    """
    rounded = values.long()
    differs = values != rounded
    if differs.any():
        number = int(differs.int().argmax())
        raise UserError(
            key=key, found=f"sample {number} has the class {values[number]}", fix="round it"
        )
    return rounded


def _words(names: np.ndarray) -> tuple[str, ...]:
    """Return the names of owners as text."""
    return tuple(str(name) for name in names)
