"""What Hugging Face `datasets` loads: data sets of its hub, local tables and folders; CINIC-10."""

import io
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
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
from lightfed.datasets.tables import Table, coded, column_of, open_splits, texts_of
from lightfed.datasets.text import encode, tokenized
from lightfed.datasets.vision import CIFAR10
from lightfed.utils.cache import cached
from lightfed.utils.errors import UserError, require

Kind = Literal["image", "text", "features"]
_LABELS = ("label", "labels", "y", "target", "class")
_FIXES = {
    "image": "repair or convert the file, or set image_size",
    "text": "give a text",
    "features": "correct the table, or set shape",
}


class Hub(Dataset):
    """Samples and classes from the columns of a table.

    The samples are images (uint8), texts as characters, or numbers; what is prepared of these is
    kept in the cache folder. With a tokenizer, batches of texts are dicts for a LightningModule:
    `input_ids`, `attention_mask` and `labels`, as long as the longest text of the batch. The labels
    are the classes, or without a column of labels the token ids themselves.
    """

    keeps = True

    def __init__(
        self,
        path: str,
        *,
        name: str | None = None,
        train: str = "train",
        test: float | str = "test",
        image: str | None = None,
        text: str | None = None,
        features: str | list[str] | None = None,
        label: str | None = None,
        group: str | None = None,
        image_size: int | None = None,
        crop_padding: int = 0,
        flip: bool = False,
        length: int = 1014,
        shape: list[int] | None = None,
        tokenizer: str | None = None,
        max_length: int | None = None,
    ) -> None:
        """Describe the columns; nothing is loaded yet.

        Args:
            path: a name of the hub; a file (parquet, arrow, csv, tsv, json, jsonl); or a folder: of
                such files, of images in a folder per class, of LEAF's JSON files, or written by
                `save_to_disk`.
            name: of the configuration, for a data set of the hub with several.
            train: the training split, as `datasets` reads it, such as `train[:80%]`.
            test: the test split, or a share of the training split such as 0.2, drawn once; the
                same share of every class up to rounding, if each has two samples.
            image: the column of images.
            text: the column of texts, given as their characters, or as tokens.
            features: the column or columns of numbers. By default the samples are the only column
                of images; or all columns but `label` and `group`, if they are one text or all
                numbers.
            label: the column of classes, words or whole numbers; by default `label`, `labels`, `y`,
                `target` or `class`.
            group: the column of the natural owner of a sample, such as its writer, for `Natural`.
            image_size: height and width in pixels to which images are resized.
            crop_padding: pixels around a training image before a random crop to its size.
            flip: mirror training images at random.
            length: characters of a text; longer ones are cut, shorter ones padded.
            shape: of a sample of numbers, such as [1, 28, 28].
            tokenizer: of `transformers`: a folder, or a name of the hub.
            max_length: tokens that longer texts are cut to; by default the tokenizer's limit.
        """
        given: dict[Kind, Any] = {"image": image, "text": text, "features": features}
        self._given = {kind: column for kind, column in given.items() if column is not None}
        if len(self._given) > 1:
            *others, last = self._given
            found, fix = f"given with {', '.join(others)}", "a sample is of one kind"
            raise UserError(f"{KEY}.{last}", found, fix)
        self._tokenizer, self._max_length = tokenizer, max_length
        fits = tokenizer is not None or max_length is None
        require(fits, f"{KEY}.max_length", max_length, "give a tokenizer, too")
        self.task: Task = "classification" if tokenizer is None else "columns"
        for key, number in (("image_size", image_size), ("length", length)):
            require(number is None or number > 0, f"{KEY}.{key}", number, "give more than 0")
        self.path, self.name, self.config = path, Path(path).name, name
        self.train_split, self.test_split = train, test
        self._label, self._group = label, group
        self.image_size, self.crop_padding, self.flip = image_size, crop_padding, flip
        self.length, self.shape = length, shape

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._labels[0]

    @cached_property
    def input_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        if self.task == "columns":
            return ()
        return tuple(self._samples("test").shape[1:])

    @cached_property
    @override
    def transform(self) -> Transform | None:
        if self.task == "columns":
            return None
        kind = self._source[0]
        found = f"given, and the samples are {kind} of the shape {self.input_shape}"
        for key in ("crop_padding", "flip"):
            fits = len(self.input_shape) == 3 or not getattr(self, key)
            require(fits, f"{KEY}.{key}", found, "leave it out")
        if kind == "text":
            return None
        return Transform(*moments(self._samples("train")), self.crop_padding, self.flip)

    @override
    def load(self, split: Split) -> Samples:
        groups = None
        if self._group is not None:
            column = column_of(self._tables["train"], self._group, "group")
            groups = coded(self._tables, column, "group", trained=False)[1][split]
        none = torch.zeros(len(self._tables[split]), dtype=torch.int64)
        y = self._labels[1].get(split, none)
        if self.task == "classification":
            return Samples(self._samples(split), y, groups)
        columns = self._tokens(split, y)
        return Samples(columns.tensors["input_ids"], y, groups, columns)

    def _tokens(self, split: Split, classes: Tensor) -> Columns:
        """The columns `input_ids`, `attention_mask` and `labels`, by the tokenizer."""
        kind, (name, *_) = self._source
        found = f"given, and the samples are {kind} in {name}"
        require(kind == "text", f"{KEY}.tokenizer", found, "name the column of texts: text")
        texts = texts_of(self._tables[split], name, split)
        given = classes if self.classes else None
        return tokenized(texts, given, str(self._tokenizer), self._max_length)

    @cached_property
    def _tables(self) -> dict[Split, Table]:
        def by(table: Table) -> str:
            return self._labelled(table) or table.column_names[0]

        return open_splits(self.path, self.train_split, self.test_split, by, name=self.config)

    def _labelled(self, table: Table) -> str | None:
        """The column of the classes; None if the labels are token ids."""
        name = self._label or next((name for name in _LABELS if name in table.column_names), None)
        if name is None and self.task == "columns":
            return None
        return column_of(table, name, "label")

    @cached_property
    def _labels(self) -> tuple[tuple[str, ...], dict[Split, Tensor]]:
        """The names of the classes, and the class of each sample; empty if there are none."""
        column = self._labelled(self._tables["train"])
        return coded(self._tables, column, "label", trained=True) if column else ((), {})

    @cached_property
    def _source(self) -> tuple[Kind, list[str]]:
        """What the samples are, and the columns they are in."""
        table = self._tables["train"]
        for kind, given in self._given.items():
            names = [given] if isinstance(given, str) else given
            return kind, [column_of(table, name, kind) for name in names]
        # pandas writes the numbers of rows to a column without a name.
        others = {self._labelled(table), self._group, "Unnamed: 0"}
        kinds = {name: _kind_of(name, table.features[name]) for name in table.column_names}
        kinds = {name: kind for name, kind in kinds.items() if kind and name not in others}
        for known in get_args(Kind):
            names = [name for name, its in kinds.items() if its == known]
            alone = known == "image" or len(names) == len(kinds)  # beside other columns
            if alone and (len(names) == 1 or (known == "features" and names)):
                return known, names
        found = f"not given, and which of the columns {', '.join(kinds)} are samples is not clear"
        raise UserError(f"{KEY}.features", found, "name them, or the column image or text")

    def _samples(self, split: Split) -> Tensor:
        """(N, ...) of a split, from the cache unless something has changed."""
        (kind, names), table = self._source, self._tables[split].select_columns(self._source[1])
        base = Path(self.path).expanduser()
        base = base if base.is_dir() else base.parent  # of relative paths in the table
        how: list[Any] = [self.shape]
        decode: Callable[[Any], np.ndarray] = partial(_numbers, shape=self.shape)
        if kind == "text":
            how, decode = [self.length], lambda text: encode([text], self.length)[0]
        elif kind == "image":
            table = _undecoded(table)
            trained = _undecoded(self._tables["train"].select_columns(names))
            grey = False  # unless the first image can be read as such
            with suppress(Exception):
                grey = bool(picture(trained[0][names[0]], base=base, grey=True).size)
            how = [grey, self.image_size]
            decode = partial(picture, base=base, grey=grey, size=self.image_size)
            if _file(table[0][names[0]]):  # files can change when their table does not
                paths = [base / (_file(value) or "") for value in table[names[0]]]
                how += [path.stat().st_mtime_ns for path in paths if path.is_file()]
        key = [table._fingerprint, kind, how]
        return torch.from_numpy(cached(key, lambda: _decoded(table, decode, kind, split)))


class CINIC10(Hub):
    """CIFAR-10's classes with images of ImageNet: 90,000 for training and 90,000 for testing.

    From ROOT/{train,test}/CLASS/*.png; the third part, `valid`, is not used. The decoded images,
    276 MB per split, are kept between runs, as those of `Hub`.
    """

    classes = CIFAR10.classes
    input_shape = (3, 32, 32)

    def __init__(self, root: str, *, augment: bool = True) -> None:
        """Read CINIC-10.

        Args:
            root: the folder that holds train and test.
            augment: crop and flip at random in training, as FlexiFed does.
        """
        super().__init__(str(Path(root).expanduser()), image="image", label="label")
        self.name, self.augment = "CINIC10", augment

    @cached_property
    @override
    def transform(self) -> Transform:
        mean, std = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)
        return Transform(mean, std, 4, True) if self.augment else Transform(mean, std)

    @override
    def load(self, split: Split) -> Samples:
        folder = Path(self.path) / split
        folders = sorted(path.name for path in folder.glob("*/"))
        found = f"{folder} holds the folders {', '.join(folders) or 'none'}"
        fix = "set root to the folder that holds train and test, as the published archive does"
        require(folders == list(self.classes), f"{KEY}.root", found, fix)
        return super().load(split)


def _kind_of(name: str, feature: Any) -> Kind | None:
    """What a column holds; None for what is none of these."""
    while hasattr(feature, "feature"):
        feature = feature.feature  # of a list
    kind, dtype = type(feature).__name__, str(getattr(feature, "dtype", ""))
    if kind == "Image" or (name == "image" and dtype.endswith("string")):
        return "image"
    if dtype.endswith("string"):
        return "text"
    is_number = dtype.startswith(("int", "uint", "float", "bool", "double"))
    return "features" if is_number and kind != "ClassLabel" else None


def _undecoded(table: Table) -> Table:
    """A column of images, or of their paths, as structs of bytes and path."""
    import datasets

    return table.cast_column(table.column_names[0], datasets.Image(decode=False))


def _decoded(
    table: Table, decode: Callable[[Any], np.ndarray], kind: Kind, split: Split
) -> np.ndarray:
    """(N, ...); a UserError names the first sample that cannot be used."""
    samples: list[np.ndarray] = []
    for number, row in enumerate(table):
        values = list(row.values())
        try:
            samples.append(decode(values if values[1:] else values[0]))
            if samples[-1].shape != samples[0].shape:
                found = f"its shape is {samples[-1].shape}, that of the first {samples[0].shape}"
                raise ValueError(found)
        except Exception as error:  # of a file, a number or a decoder
            name = " ".join(filter(None, (f"sample {number}", _file(values[0]))))
            found = " ".join(f"{split}: {name} cannot be used: {error}".split())
            raise UserError(f"{KEY}.{kind}", found, _FIXES[kind]) from error
    return np.stack(samples)


def _file(value: Any) -> str | None:
    """The file that holds an image, unless the table does."""
    return value["path"] if isinstance(value, dict) and value["bytes"] is None else None


def picture(value: Any, *, base: Path, grey: bool, size: int | None = None) -> np.ndarray:
    """(1 or 3, H, W) uint8, for a struct of bytes and path.

    `size` is height and width in pixels after a bilinear interpolation; None leaves it as it is.
    """
    from PIL import Image

    path = _file(value)
    with Image.open(io.BytesIO(value["bytes"]) if path is None else base / path) as image:
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"its levels have more than 8 bits (mode {image.mode})")
        if grey and image.mode not in ("1", "L", "LA"):
            raise ValueError("it has colours, and others have levels of grey only")
        image = image.convert("L" if grey else "RGB")  # type: ignore[assignment]
        if size is not None and image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)  # type: ignore[assignment]
        return np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)


def _numbers(value: Any, *, shape: list[int] | None) -> np.ndarray:
    """Float32; a missing number is NaN."""
    sample = np.asarray(value if isinstance(value, list) else [value], dtype=np.float32)
    return sample if shape is None else sample.reshape(shape)
