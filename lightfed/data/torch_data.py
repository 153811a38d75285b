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

from lightfed.data.dataset import (
    KEY,
    Columns,
    Dataset,
    Samples,
    Split,
    Task,
    Transform,
    moments,
)
from lightfed.data.transforms import Functions, normalises, transformed
from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.lightning_private import is_overridden
from lightfed.utils.rng import seeded

_READ_TWICE = 32  # samples, to find random transforms
_WHOLE = (torch_data.SequentialSampler, torch_data.RandomSampler)
_BATCHES = (torch_data.BatchSampler,)
_COLLATES = (torch_data.default_collate, torch_data.default_convert)
# Settings of a loader that only say how samples are read.
_READING = {
    "num_workers": 0, "pin_memory": False, "timeout": 0, "worker_init_fn": None,
    "prefetch_factor": None, "persistent_workers": False,
}  # fmt: skip


class FromTorch(Dataset):
    """The samples of a training and a test set of torch, read once.

    What they draw from global random state meanwhile, as `random_split` does, is always the same.
    A sample is a pair: an image of PIL, an array or a tensor of one shape, and a whole number as
    its class, or the targets of a regression, a float or a vector of floats. Without transforms,
    images (uint8) are standardised, and other samples stay as they are.

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
        by: str | int | None = None,
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
            by: the column of whole numbers, a sample each, that partitions sort by as classes; by
                default `labels` or `label`, if it is one. Columns of tuples are 0, 1, ...
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
        self._by = None if by is None else str(by)
        self._values: tuple[str, ...] = ()  # of the column `by`

    @property
    def datamodule(self) -> LightningDataModule | None:
        """The data module that these samples come from; None for data sets."""
        return self._train if isinstance(self._train, LightningDataModule) else None

    @property
    def task(self) -> Task:  # type: ignore[override]
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
            return self._values
        known = self._names or getattr(self._sources["train"], "classes", None)
        top = int(self._samples["train"].y.max()) if known is None else 0
        return tuple(map(str, range(top + 1) if known is None else known))

    @cached_property
    def input_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        if self.task == "columns":
            return ()
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
        train, given = self._samples["train"], self._functions != Functions()
        images = train.columns is None and train.x.dtype == torch.uint8
        return self._standard if images and not given else self._functions

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
        loaders = {split: _loader(module, split) for split in ("train", "test")}
        for split, loader in loaders.items():
            ignored = _ignored(loader)
            fix = "do it in the data set, such as a torch.utils.data.Subset, or in a transform"
            require(not ignored, f"{KEY}.train", f"its {split} loader has a {ignored}", fix)
        self._loaders = loaders
        return {split: loader.dataset for split, loader in loaders.items()}

    @override
    def unused_settings(self, settings: Mapping[str, Any]) -> list[str]:
        module = self._train
        if not isinstance(module, LightningDataModule):
            return []
        found = []
        for split, loader in self._loaders.items():
            found += _unused(split, loader, settings)
        for name in ("val_dataloader", "predict_dataloader"):
            if is_overridden(name, module):
                found.append(f"its {name}, whose samples nothing reads")
        return found

    @cached_property
    def _samples(self) -> dict[str, Samples]:
        sources = self._sources
        train, test = (self._read(f"{KEY}.{split}", s) for split, s in sources.items())
        found = f"samples of {_kind(test)}, and the training set of {_kind(train)}"
        require(_kind(train) == _kind(test), f"{KEY}.test", found, "give both sets the same kind")
        (whole, places), (other, tested) = map(_places, sources.values())
        shared = len({*places} & {*tested}) if whole is other else 0
        found = f"{shared} of its samples are also in the training set"
        require(not shared, f"{KEY}.test", found, "leave them out")
        train, test = self._with_classes(train, test)
        if isinstance(self._train, LightningDataModule):
            for stage in ("fit", "test"):
                self._train.teardown(stage)  # all samples are read
        if self._owners is not None:
            _, groups = np.unique(np.asarray(self._owners), return_inverse=True)
            train = replace(train, groups=torch.from_numpy(groups))
        return {"train": train, "test": test}

    def _read(self, key: str, source: Any) -> Samples:
        columns, paired = _read(source, key)
        x, *others = columns.tensors.values()
        if not paired:
            return Samples(x, torch.zeros(len(x), dtype=torch.int64), columns=columns)
        for sizes in columns.lengths.values():
            at = int((sizes != sizes[0]).int().argmax())
            found = f"sample {at} has {sizes[at]} entries, and sample 0 {sizes[0]}"
            raise UserError(key, found, "give pairs of one shape, or name the parts of a sample")
        (y,), x = others, x if x.dtype == torch.uint8 else x.float()
        x = x if x.dim() > 1 else x.unsqueeze(1)
        if y.is_floating_point() and not self._names:
            return Samples(x, y)
        given, y = y.flatten(), y.flatten().long()
        at = int((given != y).int().argmax())
        require(bool(given[at] == y[at]), key, f"sample {at} has the class {given[at]}", "round it")
        return Samples(x, y)

    def _with_classes(self, *splits: Samples) -> list[Samples]:
        """Both splits, named columns with the classes that partitions sort by."""
        columns = [split.columns.tensors for split in splits if split.columns is not None]
        own = columns[0].items() if columns else ()
        whole = [name for name, t in own if t.dim() == 1 and not t.is_floating_point()]
        found = f"{self._by}, the columns of whole numbers are {', '.join(whole) or 'none'}"
        require(self._by in (None, *whole), f"{KEY}.by", found, "name one of these")
        fits = not columns or self._functions == Functions()
        fix = "transform samples in the data set: these have named columns"
        require(fits, f"{KEY}.train_transform", "given", fix)
        by = self._by or next((name for name in ("labels", "label") if name in whole), None)
        if by is None:
            return list(splits)
        values, codes = torch.cat([tensors[by] for tensors in columns]).unique(return_inverse=True)
        self._values = tuple(map(str, self._names or values.tolist()))
        ys = codes.split([len(split) for split in splits])
        return [replace(split, y=y) for split, y in zip(splits, ys, strict=True)]


def _loader(module: LightningDataModule, split: str) -> Any:
    """A data module's loader of the samples to train or to test with."""
    name = f"{split}_dataloader"
    found, fix = f"{type(module).__name__} has no {name}", "define one, with a data set of its own"
    require(is_overridden(name, module), f"{KEY}.train", found, fix)
    loader = getattr(module, name)()
    require(loader is not None, f"{KEY}.train", f"its {name} returns None", fix)
    return loader


def _unused(split: str, loader: Any, settings: Mapping[str, Any]) -> list[str]:
    """The settings of a loader that the run does not follow, each with the key that does it."""
    size, key = ("batch_size", "data.batch_size")
    if split == "test":
        size, key = ("eval_batch_size", "data.eval_batch_size")
    batches = loader if loader.batch_sampler is None else loader.batch_sampler
    sampler, found = batches.sampler, []
    if batches.batch_size != settings[size]:
        found.append(f"batch_size={batches.batch_size} ({split}; {key} is {settings[size]})")
    drops = split == "train" and settings["last_batch"] == "drop"
    if batches.drop_last and not drops:
        fix = f"data.last_batch is {settings['last_batch']}" if split == "train" else "all count"
        found.append(f"drop_last=True ({split}; {fix})")
    if split == "train" and isinstance(sampler, torch_data.SequentialSampler):
        found.append("shuffle=False (train; sessions shuffle)")
    if getattr(sampler, "replacement", False) or len(sampler) != len(loader.dataset):
        found.append(f"a sampler of a part ({split}; an epoch has every sample once)")
    for name, usual in _READING.items():
        if getattr(loader, name, usual) != usual:
            found.append(f"{name} ({split}; samples are read once)")
    return found


def _ignored(loader: Any) -> str | None:
    """What selects or changes samples on their way from a data set through its loader."""
    if not isinstance(loader, torch_data.DataLoader):
        return type(loader).__name__
    if loader.batch_sampler is not None and type(loader.batch_sampler) not in _BATCHES:
        return type(loader.batch_sampler).__name__
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
def _read(source: Any, key: str) -> tuple[Columns, bool]:
    """All samples of a data set as columns, and whether they are pairs of an input and a target."""
    require(hasattr(source, "__len__"), key, "it has no length", "give a map-style data set")
    require(len(source) > 0, key, "it is empty", "give samples")
    samples: list[dict[str, Tensor]] = []
    known: dict[str, Any] = {}
    for number in range(len(source)):
        try:
            given = source[number]
            sample = _columns(given)
            same = number >= _READ_TWICE or _equal(sample, _columns(source[number]))
        except Exception as error:  # of the user's data set
            found = f"sample {number} cannot be used ({reason(error)})"
            fix = "a sample is a pair of an input and a class or floats, or named tensors"
            raise UserError(key, found, fix) from error
        found = f"sample {number} is another one when it is read again"
        fix = "give random transforms as train_transform: the data set is read only once"
        require(same, key, found, fix)
        floats = [name for name, (kind, *_) in known.items() if kind.is_floating_point]
        sample |= {name: sample[name].float() for name in floats if name in sample}
        form = _form(sample)
        known = known or form
        found, fix = f"sample {number} has {form}, and sample 0 {known}", "give all the same form"
        require(form == known, key, found, fix)
        samples.append(sample)
    make: Any = dict if isinstance(given, Mapping) else getattr(type(given), "_make", tuple)
    every = {name: [sample[name] for sample in samples] for name in samples[0]}
    columns = Columns.of(every, make if make is dict else lambda c: make(c.values()))
    *_, y = columns.tensors.values()
    a_target = y.dim() < 3 and (y.is_floating_point() or y.shape[1:].numel() == 1)
    return columns, make is tuple and len(every) == 2 and a_target


def _columns(sample: Any) -> dict[str, Tensor]:
    """The columns of a sample: names of a dict or a named tuple, or places."""
    if not isinstance(sample, Mapping | tuple | list):
        raise TypeError(f"it is a {type(sample).__name__}")
    names = getattr(sample, "_fields", range(len(sample)))
    items = sample.items() if isinstance(sample, Mapping) else zip(names, sample, strict=True)
    found = {str(name): _tensor(value) for name, value in items}
    return {name: t.float() if t.is_floating_point() else t for name, t in found.items()}


def _tensor(value: Any) -> Tensor:
    if hasattr(value, "getbands"):  # an image of PIL
        from torchvision.transforms.functional import pil_to_tensor

        return pil_to_tensor(value)
    return torch.as_tensor(value)


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    pairs = ((one[name].nan_to_num(), other[name].nan_to_num()) for name in one)
    return all(torch.equal(*pair) for pair in pairs)


def _form(sample: Mapping[str, Tensor]) -> dict[str, Any]:
    """What all samples of a data set share: types and axes, of which the first has any length."""
    return {name: (t.dtype, "*" if t.dim() else "", *t.shape[1:]) for name, t in sample.items()}


def _kind(samples: Samples) -> str:
    """What the samples of both splits have in common."""
    if samples.columns is not None:
        return str(_form({name: t[0] for name, t in samples.columns.tensors.items()}))
    return f"floats {tuple(samples.y.shape[1:])}" if samples.y.is_floating_point() else "classes"
