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
from lightfed.data.datasets.transforms import Functions, normalises, transformed
from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.lightning_private import is_overridden
from lightfed.utils.rng import seeded

_READ_TWICE = 32  # samples, to find random transforms
_WHOLE = (torch_data.SequentialSampler, torch_data.RandomSampler)
_COLLATES = (torch_data.default_collate, torch_data.default_convert)
_HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer")


class FromTorch(Dataset):
    """The samples of a training and a test set of torch, read once.

    What they draw from global random state meanwhile, as `random_split` does, is always the same.
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
        fix = "give a test set, unless a data module has it: FromTorch(train, test)"
        require((test is None) == given, f"{KEY}.test", "given twice" if given else "missing", fix)
        self._train, self._test = train, test
        self._functions = Functions(train_transform, test_transform)
        done = test_transform is not None or not normalises(train_transform)
        found, fix = "missing, and train_transform normalises", "normalise the samples of both"
        require(done, f"{KEY}.test_transform", found, fix)
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
        try:
            return tuple(transformed(self._functions.test, first, None).shape[1:])
        except Exception as error:  # of the user's function
            found, fix = f"fails for sample 0 ({reason(error)})", "it is given a tensor, (C, H, W)"
            raise UserError(f"{KEY}.test_transform", found, fix) from error

    @property
    @override
    def transform(self) -> Transform | Functions:
        if self._functions == Functions() and self._samples["train"].x.dtype == torch.uint8:
            return self._standard
        return self._functions

    @cached_property
    def _standard(self) -> Transform:
        x = self._samples["train"].x
        shape, colours = tuple(x.shape[1:]), (1, 3, 4)
        last = len(shape) == 3 and shape[2] in colours and shape[0] not in colours
        fix = f"put channels first, as {(shape[-1], *shape[:-1])}"
        require(not last, f"{KEY}.train", f"samples have the shape {shape}", fix)
        # Images without an axis of channels have one colour, not one for every row.
        return Transform(*moments(x.unsqueeze(1) if len(shape) == 2 else x))

    @override
    def load(self, split: Split) -> Samples:
        return self._samples[split]

    @cached_property
    @seeded(0)
    def _sources(self) -> dict[str, Any]:
        if not isinstance(self._train, LightningDataModule):
            return {"train": self._train, "test": self._test}
        module = self._train
        module.prepare_data()
        module.setup("fit")
        module.setup("test")
        loaders = {"train": module.train_dataloader(), "test": module.test_dataloader()}
        for split, loader in loaders.items():
            ignored = _ignored(loader)
            fix = "do it in the data set, such as a torch.utils.data.Subset, or in a transform"
            require(not ignored, f"{KEY}.train", f"its {split} loader has a {ignored}", fix)
        hook = next((name for name in _HOOKS if is_overridden(name, module)), None)
        fix = "give train_transform and test_transform"
        require(hook is None, f"{KEY}.train", f"its {hook} would not be called", fix)
        return {split: loader.dataset for split, loader in loaders.items()}

    @cached_property
    def _samples(self) -> dict[str, Samples]:
        train, test = (_read(source, split) for split, source in self._sources.items())
        (whole, places), (other, tested) = map(_places, self._sources.values())
        shared = len({*places} & {*tested}) if whole is other else 0
        found = f"{shared} of its samples are also in the training set"
        require(not shared, f"{KEY}.test", found, "leave them out")
        if self._owners is not None:
            _, groups = np.unique(np.asarray(self._owners), return_inverse=True)
            train = Samples(train.x, train.y, torch.from_numpy(groups))
        return {"train": train, "test": test}


def _ignored(loader: Any) -> str | None:
    """What selects or changes samples on their way from a data set through its loader."""
    if not isinstance(loader, torch_data.DataLoader):
        return type(loader).__name__
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if not isinstance(sampler, _WHOLE):
        return type(sampler).__name__
    return None if loader.collate_fn in _COLLATES else "collate_fn"


def _places(source: Any) -> tuple[Any, Sequence[int]]:
    """The whole data set of what may be a part of one, and the numbers of the samples in it."""
    if not isinstance(source, torch_data.Subset):
        return source, range(len(source))
    whole, places = _places(source.dataset)
    return whole, [places[i] for i in source.indices]


@seeded(0)
def _read(source: Any, split: str) -> Samples:
    """All samples of a data set."""
    key = f"{KEY}.{split}"
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
        if number < _READ_TWICE:
            same = torch.equal(x.nan_to_num(), _tensor(source[number][0]).nan_to_num())
            found = f"sample {number} is another one when it is read again"
            fix = f"give random transforms as {split}_transform: the data set is read only once"
            require(same, key, found, fix)
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
