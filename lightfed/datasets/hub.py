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
from lightfed.datasets.tables import (
    Table,
    coded,
    column_of,
    open_splits,
    texts_of,
    without_unknown_labels,
)
from lightfed.datasets.text import encode, encode_bytes, tokenized
from lightfed.datasets.vision import CIFAR10, CIFAR100, MNIST, FashionMNIST
from lightfed.utils.cache import cached
from lightfed.utils.errors import UserError

Kind = Literal["image", "text", "features"]
Alphabet = Literal["letters", "bytes"]
UnknownLabels = Literal["refuse", "drop"]

# Names by which the column of classes is found.
_LABEL_COLUMNS = ("label", "labels", "y", "target", "class")

# What to do about a sample that cannot be used.
_FIXES = {
    "image": "repair or convert the file, or set image_size",
    "text": "give a text",
    "features": "correct the table, or set shape",
}


class Hub(Dataset):
    """Samples and classes from the columns of a table.

    The samples are images (uint8), texts as characters, or numbers. They are prepared once and kept
    in the cache folder. With a tokenizer, batches of texts are dicts for a LightningModule, with
    `input_ids`, `attention_mask` and `labels` that are as long as the longest text of the batch.
    The labels are the classes, or the token ids themselves if there is no column of labels.
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
        preset: str | None = None,
        length: int = 1014,
        alphabet: Alphabet = "letters",
        shape: list[int] | None = None,
        unknown_labels: UnknownLabels = "refuse",
        tokenizer: str | None = None,
        max_length: int | None = None,
    ) -> None:
        """Describe the columns; nothing is loaded yet.

        Args:
            path: A name of the hub; a file (parquet, arrow, csv, tsv, json, jsonl); or a folder: of
                such files, of images in a folder per class, of LEAF's JSON files, or written by
                `save_to_disk`.
            name: The configuration, for a data set of the hub with several.
            train: The training split, as `datasets` reads it, such as `train[:80%]`.
            test: The test split, or a share of the training split such as 0.2, which is drawn once.
                It is the same share of every class, up to rounding, if each has two samples.
            image: The column of images.
            text: The column of texts, given as their characters, or as tokens.
            features: The column or columns of numbers. By default the samples are the only column
                of images; or all columns but `label` and `group`, if they are one text or all
                numbers.
            label: The column of classes, words or whole numbers; by default `label`, `labels`, `y`,
                `target` or `class`.
            group: The column of the natural owner of a sample, such as its writer, for `Natural`.
            image_size: The height and width in pixels to which images are resized.
            crop_padding: The pixels around a training image before a random crop to its size.
            flip: Whether training images are mirrored at random.
            preset: The constants and the augmentation of a data set of papers, instead of those
                of the training split: MNIST, FashionMNIST, CINIC10, or CIFAR10/ or CIFAR100/ with
                one of their presets, as CIFAR10/fedbcd.
            length: The characters of a text. Longer texts are cut, and shorter ones padded.
            alphabet: The characters of a text: "letters" are the 70 of CharCNN's paper in lower
                case, 1 to 70, and 0 for any other; "bytes" are those of UTF-8, 0 to 255, so that
                nothing is lost, and `length` counts them. Texts are padded with 0.
            shape: The shape of a sample of numbers, such as [1, 28, 28].
            unknown_labels: Whether test samples whose class no training sample has end the run, or
                are dropped, with a line that says how many.
            tokenizer: A tokenizer of `transformers`: a folder, or a name of the hub.
            max_length: The tokens that longer texts are cut to; by default the tokenizer's limit.
        """
        columns: dict[Kind, Any] = {"image": image, "text": text, "features": features}
        self._columns = {kind: column for kind, column in columns.items() if column is not None}
        if len(self._columns) > 1:
            *others, last = self._columns
            raise UserError(
                key=f"{KEY}.{last}",
                found=f"given with {', '.join(others)}",
                fix="give only one of them",
            )
        if tokenizer is None and max_length is not None:
            raise UserError(f"{KEY}.max_length", f"{max_length}", fix="give a tokenizer, too")
        for argument, number in (("image_size", image_size), ("length", length)):
            if number is not None and number <= 0:
                raise UserError(f"{KEY}.{argument}", f"{number}", fix="give more than 0")

        choices = (
            ("alphabet", alphabet, Alphabet),
            ("unknown_labels", unknown_labels, UnknownLabels),
        )
        for argument, value, known in choices:
            if value not in get_args(known):
                fix = f"choose one of {', '.join(get_args(known))}"
                raise UserError(f"{KEY}.{argument}", repr(value), fix)
        if alphabet != "letters" and tokenizer is not None:
            raise UserError(f"{KEY}.alphabet", "given with a tokenizer", "leave one of them out")
        if preset is not None and tokenizer is not None:
            raise UserError(f"{KEY}.preset", "given with a tokenizer", "leave one of them out")
        if preset is not None:
            _check_preset(preset, crop_padding=crop_padding, flip=flip)

        self.path = path
        self.name = Path(path).name
        self.config = name
        self.train_split = train
        self.test_split = test
        self.task: Task = "classification" if tokenizer is None else "columns"
        self.image_size = image_size
        self.crop_padding = crop_padding
        self.flip = flip
        self.preset = preset
        self.length = length
        self.alphabet: Alphabet = alphabet
        self.shape = shape
        self.unknown_labels: UnknownLabels = unknown_labels
        self._label = label
        self._group = group
        self._tokenizer = tokenizer
        self._max_length = max_length

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        names, _ = self._labels
        return names

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

        kind, _ = self._source
        is_image = len(self.input_shape) == 3
        for argument in ("crop_padding", "flip"):
            if getattr(self, argument) and not is_image:
                raise UserError(
                    key=f"{KEY}.{argument}",
                    found=f"given, but the samples are {kind} of the shape {self.input_shape}",
                    fix="leave it out",
                )

        if self.preset is not None:
            transform = presets()[self.preset]
            channels = len(transform.mean)
            if not is_image or self.input_shape[0] != channels:
                raise UserError(
                    key=f"{KEY}.preset",
                    found=f"{self.preset}, but the samples are {kind} of the shape "
                    f"{self.input_shape}",
                    fix=f"leave it out: it is for images of {channels} channels",
                )
            return transform

        # The codes of characters are not normalized.
        if kind == "text":
            return None
        mean, std = moments(self._samples("train"))
        return Transform(mean, std, self.crop_padding, self.flip)

    @override
    def load(self, split: Split) -> Samples:
        groups = None
        owners = None
        if self._group is not None:
            column = column_of(self._tables["train"], self._group, "group")
            owners, group_numbers = coded(self._tables, column, "group", trained=False)
            groups = group_numbers[split]

        _, class_numbers = self._labels
        if split in class_numbers:
            classes = class_numbers[split]
        else:
            # Without a column of labels, all samples are of one class.
            classes = torch.zeros(len(self._tables[split]), dtype=torch.int64)

        if self.task == "classification":
            return Samples(self._samples(split), classes, groups, owners=owners)
        columns = self._tokens(split, classes)
        return Samples(columns.tensors["input_ids"], classes, groups, columns, owners)

    def _tokens(self, split: Split, classes: Tensor) -> Columns:
        """Return the columns `input_ids`, `attention_mask` and `labels`, by the tokenizer.

        Args:
            split: The split.
            classes: The class of each sample, of shape (N,).
        """
        kind, names = self._source
        if kind != "text":
            raise UserError(
                key=f"{KEY}.tokenizer",
                found=f"given, but the samples are {kind} in {names[0]}",
                fix="name the column of texts: text",
            )
        texts = texts_of(self._tables[split], names[0], split)
        labels = classes if self.classes else None
        return tokenized(texts, labels, str(self._tokenizer), self._max_length)

    @cached_property
    def _tables(self) -> dict[Split, Table]:
        """The table of each split."""

        def column_to_stratify(table: Table) -> str:
            return self._label_column(table) or table.column_names[0]

        tables = open_splits(
            self.path, self.train_split, self.test_split, column_to_stratify, name=self.config
        )
        label = self._label_column(tables["train"])
        if self.unknown_labels == "drop" and label is not None:
            tables["test"] = without_unknown_labels(tables, label)
            if len(tables["test"]) == 0:
                found = "no samples of a class that training samples have"
                raise UserError(f"{KEY}.test", found, fix="name a split that has some")
        return tables

    def _label_column(self, table: Table) -> str | None:
        """Return the column of the classes; None if the labels are token ids."""
        name = self._label
        if name is None:
            usual_names = [name for name in _LABEL_COLUMNS if name in table.column_names]
            name = usual_names[0] if usual_names else None
        if name is None and self.task == "columns":
            return None
        return column_of(table, name, "label")

    @cached_property
    def _labels(self) -> tuple[tuple[str, ...], dict[Split, Tensor]]:
        """The names of the classes, and for each split the class of each sample, of shape (N,).

        Both are empty if there are no classes.
        """
        column = self._label_column(self._tables["train"])
        if column is None:
            return (), {}
        return coded(self._tables, column, "label", trained=True)

    @cached_property
    def _source(self) -> tuple[Kind, list[str]]:
        """What the samples are, and the columns that they are in."""
        table = self._tables["train"]
        for kind, column in self._columns.items():
            names = [column] if isinstance(column, str) else column
            return kind, [column_of(table, name, kind) for name in names]

        # pandas writes the numbers of rows to a column without a name.
        other_columns = {self._label_column(table), self._group, "Unnamed: 0"}
        kind_of_column: dict[str, Kind] = {}
        for name in table.column_names:
            kind_of_name = _kind_of(name, table.features[name])
            if kind_of_name is not None and name not in other_columns:
                kind_of_column[name] = kind_of_name

        for kind in get_args(Kind):
            names = [name for name, its_kind in kind_of_column.items() if its_kind == kind]
            # Images can have other columns beside them, such as captions.
            is_only_kind = len(names) == len(kind_of_column)
            can_be_several = kind == "features"
            fits = len(names) == 1 or (can_be_several and len(names) > 1)
            if fits and (kind == "image" or is_only_kind):
                return kind, names

        described = []
        for name in table.column_names:
            if name not in other_columns:
                described.append(f"{name} ({kind_of_column.get(name, table.features[name])})")
        columns = f"which of the columns {', '.join(described)} are samples is not clear"
        raise UserError(
            key=f"{KEY}.features",
            found=f"not given, and {columns if described else 'there is no column of samples'}",
            fix="name them, or the column image or text",
        )

    def _samples(self, split: Split) -> Tensor:
        """Return the samples of a split, of shape (N, ...).

        They come from the cache, unless the table or what is made of it has changed.
        """
        kind, names = self._source
        table = self._tables[split].select_columns(names)
        if self.alphabet != "letters" and kind != "text":
            found = f"{self.alphabet}, but the samples are {kind}"
            raise UserError(f"{KEY}.alphabet", found, fix="leave it out, or name text")

        decode: Callable[[Any], np.ndarray]
        options: list[Any]
        if kind == "image":
            table = _undecoded(table)
            decode, options = self._image_decoder(table, names[0])
        elif kind == "text":
            decode = partial(_characters, length=self.length, alphabet=self.alphabet)
            # Letters, the default, keep the name that they have in the cache.
            options = [self.length] if self.alphabet == "letters" else [self.length, self.alphabet]
        else:
            decode = partial(_numbers, shape=self.shape)
            options = [self.shape]

        key = [table._fingerprint, kind, options]
        return torch.from_numpy(cached(key, lambda: _decoded(table, decode, kind, split)))

    def _image_decoder(self, table: Table, column: str) -> tuple[Callable[..., Any], list[Any]]:
        """Return how the images of a table are decoded, and what the result depends on.

        Args:
            table: The table of a split, not decoded.
            column: The name of its column of images.
        """
        # Paths in a table are relative to its folder.
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            folder = folder.parent

        # Images have one channel if the first training image can be read so.
        train_table = _undecoded(self._tables["train"].select_columns([column]))
        is_gray = False
        with suppress(Exception):
            is_gray = bool(picture(train_table[0][column], base=folder, grey=True).size)

        options: list[Any] = [is_gray, self.image_size]
        if _file(table[0][column]):
            # The files can change while the table stays the same.
            for value in table[column]:
                path = folder / (_file(value) or "")
                if path.is_file():
                    options.append(path.stat().st_mtime_ns)

        decode = partial(picture, base=folder, grey=is_gray, size=self.image_size)
        return decode, options


class CINIC10(Hub):
    """CIFAR-10's classes with images of ImageNet: 90,000 for training and 90,000 for testing.

    The files are ROOT/{train,test}/CLASS/*.png; the third part, `valid`, is not used. The decoded
    images, 276 MB per split, are kept between runs, as for `Hub`.
    """

    classes = CIFAR10.classes
    input_shape = (3, 32, 32)

    def __init__(self, root: str, *, augment: bool = True) -> None:
        """Read CINIC-10.

        Args:
            root: The folder that holds train and test.
            augment: Whether to crop and flip at random in training, as FlexiFed does.
        """
        super().__init__(str(Path(root).expanduser()), image="image", label="label")
        self.name = "CINIC10"
        self.augment = augment

    @cached_property
    @override
    def transform(self) -> Transform:
        mean = (0.47889522, 0.47227842, 0.43047404)
        std = (0.24205776, 0.23828046, 0.25874835)
        if self.augment:
            return Transform(mean, std, crop_padding=4, flip=True)
        return Transform(mean, std)

    @override
    def load(self, split: Split) -> Samples:
        folder = Path(self.path) / split
        folders = sorted(path.name for path in folder.glob("*/"))
        if folders != list(self.classes):
            raise UserError(
                key=f"{KEY}.root",
                found=f"{folder} holds the folders {', '.join(folders) or 'none'}",
                fix="set root to the folder that holds train and test, "
                "as the published archive does",
            )
        return super().load(split)


def presets() -> dict[str, Transform]:
    """Return the constants and augmentation of the data sets of papers, by their names."""
    transforms = {
        "MNIST": MNIST.transform,
        "FashionMNIST": FashionMNIST.transform,
        "CINIC10": CINIC10("").transform,
    }
    for kind in (CIFAR10, CIFAR100):
        for preset, transform in kind.presets.items():
            transforms[f"{kind.__name__}/{preset}"] = transform
    return transforms


def _check_preset(preset: str, *, crop_padding: int, flip: bool) -> None:
    """Refuse an unknown preset, and augmentation beside one, which has its own."""
    known = presets()
    if preset not in known:
        raise UserError(
            key=f"{KEY}.preset",
            found=f"no preset {preset!r}",
            fix=f"choose one of {', '.join(known)}",
        )
    for argument, value in (("crop_padding", crop_padding), ("flip", flip)):
        if value:
            fix = "leave one of them out: the preset says how images are augmented"
            raise UserError(f"{KEY}.{argument}", f"given with the preset {preset}", fix)


def _kind_of(name: str, feature: Any) -> Kind | None:
    """Return what a column holds; None if it can be no samples.

    Args:
        name: The name of the column.
        feature: Its type, as `datasets` has it.
    """
    # Other writers than `datasets` store pictures as their bytes, alone or with a path.
    if isinstance(feature, dict):
        is_picture = "bytes" in feature and feature.keys() <= {"bytes", "path"}
        return "image" if is_picture and _is_binary(feature["bytes"]) else None
    if _is_binary(feature):
        return "image"

    # The type of a list holds that of its items.
    while hasattr(feature, "feature"):
        feature = feature.feature

    dtype = str(getattr(feature, "dtype", ""))
    is_text = dtype.endswith("string")
    is_path_of_image = name == "image" and is_text
    if type(feature).__name__ == "Image" or is_path_of_image:
        return "image"
    if is_text:
        return "text"
    is_number = dtype.startswith(("int", "uint", "float", "bool", "double"))
    if is_number and type(feature).__name__ != "ClassLabel":
        return "features"
    return None


def _is_binary(feature: Any) -> bool:
    """Return whether a column holds bytes."""
    return str(getattr(feature, "dtype", "")) in ("binary", "large_binary")


def _undecoded(table: Table) -> Table:
    """Return a column of images, or of their paths, as structs of bytes and path."""
    import datasets

    return table.cast_column(table.column_names[0], datasets.Image(decode=False))


def _decoded(
    table: Table, decode: Callable[[Any], np.ndarray], kind: Kind, split: Split
) -> np.ndarray:
    """Return the decoded samples of a table, of shape (N, ...).

    Args:
        table: The columns of the samples.
        decode: Decodes a value, or a list of values if there are several columns.
        kind: What the samples are.
        split: The split, for the error.

    Raises:
        UserError: Names the first sample that cannot be used.
    """
    samples: list[np.ndarray] = []
    for position, row in enumerate(table):
        values = list(row.values())
        try:
            sample = decode(values if len(values) > 1 else values[0])
            samples.append(sample)
            if sample.shape != samples[0].shape:
                raise ValueError(
                    f"its shape is {sample.shape}, that of the first {samples[0].shape}"
                )
        except Exception as error:  # of a file, a number or a decoder
            name = f"sample {position}"
            file = _file(values[0])
            if file:
                name += f" {file}"
            # The text of an error can have several lines.
            found = " ".join(f"{split}: {name} cannot be used: {error}".split())
            raise UserError(f"{KEY}.{kind}", found, _FIXES[kind]) from error
    return np.stack(samples)


def _file(value: Any) -> str | None:
    """Return the file that holds an image; None if the table holds it."""
    is_in_file = isinstance(value, dict) and value["bytes"] is None
    return value["path"] if is_in_file else None


def picture(value: Any, *, base: Path, grey: bool, size: int | None = None) -> np.ndarray:
    """Return an image as a uint8 array of shape (1 or 3, H, W).

    Args:
        value: A struct of bytes and path.
        base: The folder that the path is relative to.
        grey: Whether to return one channel; then an image with colors is an error.
        size: The height and width in pixels, by bilinear interpolation; None for those of the
            image.

    Raises:
        ValueError: The image has more than 8 bits a level, or colors although `grey`.
        OSError: It cannot be read.
    """
    from PIL import Image

    path = _file(value)
    source = io.BytesIO(value["bytes"]) if path is None else base / path
    with Image.open(source) as image:
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"its levels have more than 8 bits (mode {image.mode})")
        if grey and image.mode not in ("1", "L", "LA"):
            raise ValueError("it has colors, and others have levels of gray only")
        image = image.convert("L" if grey else "RGB")  # type: ignore[assignment]
        if size is not None and image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)  # type: ignore[assignment]
        return np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)


def _characters(text: str, *, length: int, alphabet: Alphabet) -> np.ndarray:
    """Return the codes of a text as a uint8 array of shape (length,)."""
    if alphabet == "bytes":
        return encode_bytes(text, length)
    return encode([text], length)[0]


def _numbers(value: Any, *, shape: list[int] | None) -> np.ndarray:
    """Return a number or a list of numbers as a float32 array; a missing number is NaN."""
    sample = np.asarray(value if isinstance(value, list) else [value], dtype=np.float32)
    return sample if shape is None else sample.reshape(shape)
