"""Any data set that Hugging Face `datasets` loads: of its hub, or local tables and folders."""

from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from lightfed.data.datasets import columns, logmel
from lightfed.data.datasets.columns import Codes, Decode, kind_of, prepared
from lightfed.data.datasets.dataset import KEY, Dataset, Samples, Split, Transform, moments
from lightfed.data.datasets.logmel import RATE
from lightfed.data.datasets.tables import Table, hold_out, open_table, require_apart
from lightfed.utils.errors import UserError, require
from lightfed.utils.memory import require_memory

_LABELS = ("label", "labels", "y", "target", "class")


class Hub(Dataset):
    """Samples and classes from the columns of a table.

    The samples are images (uint8), texts as characters, recordings as log-mel pictures, or numbers.
    What is prepared is kept in the cache folder, so that the samples may be larger than memory.
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
        audio: str | None = None,
        features: str | list[str] | None = None,
        label: str | None = None,
        group: str | None = None,
        image_size: int | None = None,
        crop_padding: int = 0,
        flip: bool = False,
        length: int = 1014,
        seconds: float = 1.0,
        shape: list[int] | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
    ) -> None:
        """Describe the columns; nothing is loaded yet.

        Args:
            path: a name of the hub; a file (parquet, arrow, csv, tsv, json, jsonl); or a folder: of
                such files, of images or recordings in a folder per class, of LEAF's JSON files, or
                written by `save_to_disk`.
            name: of the configuration, for a data set of the hub with several.
            train: the training split, as `datasets` reads it, such as `train[:80%]`.
            test: the test split, or a share of the training split such as 0.2, drawn once, the same
                share of every class up to rounding.
            image: the column of images.
            text: the column of texts, classified by their characters.
            audio: the column of recordings: PCM wave; other formats need FFmpeg and the extra
                `audio`.
            features: the column or columns of numbers. By default the samples are the only column
                of images or recordings; or all columns but `label` and `group`, if they are one
                text or all numbers.
            label: the column of classes, words or whole numbers; by default `label`, `labels`, `y`,
                `target` or `class`.
            group: the column of the natural owner of a sample, such as its writer, for `Natural`.
            image_size: height and width in pixels to which images are resized.
            crop_padding: pixels around a training image before a random crop to its size.
            flip: mirror training images at random.
            length: characters of a text; longer ones are cut, shorter ones padded.
            seconds: of a recording; longer ones are cut, shorter ones padded.
            shape: of a sample of numbers, such as [1, 28, 28].
            mean: of images / 255, one value per channel, or of numbers; by default that of the
                training samples.
            std: likewise.
        """
        given = {"image": image, "text": text, "audio": audio, "features": features}
        chosen = [kind for kind, column in given.items() if column is not None]
        found, fix = f"given with {', '.join(chosen[:-1])}", "a sample is of one kind"
        require(len(chosen) < 2, f"{KEY}.{chosen[-1] if chosen else ''}", found, fix)
        fits = isinstance(test, str) or 0 < test < 1
        require(fits, f"{KEY}.test", test, "name a split, or give a share such as 0.2")
        for key, number, size in (  # and bytes of a sample, at least
            ("image_size", image_size, (image_size or 0) ** 2),
            ("length", length, length),
            ("seconds", seconds, seconds * RATE),
        ):
            require(number is None or number > 0, f"{KEY}.{key}", number, "give more than 0")
            require_memory(size, f"{KEY}.{key}", f"samples with {key} {number}", "lower it")
        self.path, self.config, self.train_split, self.test_split = path, name, train, test
        self._given = given
        self._label, self._group = label, group
        self.image_size, self.crop_padding, self.flip = image_size, crop_padding, flip
        self.length, self.seconds, self.shape = length, seconds, shape
        self._mean, self._std = mean, std

    @property
    @override
    def name(self) -> str:
        return Path(self.path).name

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._classes.names

    @cached_property
    def input_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self._samples("test").shape[1:])

    @cached_property
    @override
    def transform(self) -> Transform | None:
        kind = self._source[0]
        self._check_transform(kind)
        if kind in ("text", "audio"):
            return None if kind == "text" else logmel.NORMALISE
        mean, std = tuple(self._mean or ()), tuple(self._std or ())
        if not mean or not std:
            found = moments(self._samples("train"))
            mean, std = mean or found[0], std or found[1]
        return Transform(mean, std, self.crop_padding, self.flip)

    def _check_transform(self, kind: str) -> None:
        """Refuse arguments that samples of a kind have no use for."""
        fixed, flat = kind in ("text", "audio"), len(self.input_shape) != 3
        for key, value, useless in (
            ("mean", self._mean, fixed),
            ("std", self._std, fixed),
            ("crop_padding", self.crop_padding, fixed or flat),
            ("flip", self.flip, fixed or flat),
        ):
            found = f"{value}, and the samples are {kind} of the shape {self.input_shape}"
            require(not (value and useless), f"{KEY}.{key}", found, "leave it out")

    @override
    def load(self, split: Split) -> Samples:
        groups = self._groups
        return Samples(
            x=self._samples(split),
            y=self._classes.encode(self._tables[split], split),
            groups=None if groups is None else groups.encode(self._tables[split], split),
        )

    @cached_property
    def _tables(self) -> dict[str, Table]:
        train = open_table(self.path, self.train_split, key="train", name=self.config)
        if isinstance(self.test_split, str):
            test = open_table(self.path, self.test_split, key="test", name=self.config)
            require_apart(train, splits=(self.train_split, self.test_split))
        else:
            train, test = hold_out(train, self.test_split, self._column(train, "label"))
        for split, table in (("train", train), ("test", test)):
            require(len(table) > 0, f"{KEY}.{split}", "no samples", "name a split that has some")
        return {"train": train, "test": test}

    @cached_property
    def _classes(self) -> Codes:
        train = self._tables["train"]
        return Codes({"train": train}, column=self._column(train, "label"), key="label")

    @cached_property
    def _groups(self) -> Codes | None:
        if self._group is None:
            return None
        column = self._column(self._tables["train"], "group")
        return Codes(self._tables, column=column, key="group")

    def _column(self, table: Table, key: Literal["label", "group"]) -> str:
        """The column of the classes or of the owners."""
        wanted = self._label if key == "label" else self._group
        names = list(table.column_names)
        if wanted is None:
            wanted = next((name for name in _LABELS if name in names), None)
        found = f"{wanted or 'none given'}, the columns are {', '.join(names)}"
        require(wanted in names, f"{KEY}.{key}", found, "name one of them")
        return str(wanted)

    @cached_property
    def _source(self) -> tuple[str, list[str]]:
        """What the samples are, and the columns they are in."""
        table = self._tables["train"]
        for kind, given in self._given.items():
            if given is not None:
                names = [given] if isinstance(given, str) else given
                missing = [name for name in names if name not in table.column_names]
                known = ", ".join(table.column_names)
                found = f"no column {', '.join(missing)}, there are {known}"
                require(not missing, f"{KEY}.{kind}", found, "name one of them")
                return kind, names
        others = {self._column(table, "label"), self._group}
        kinds = {name: kind_of(name, feature) for name, feature in table.features.items()}
        kinds = {name: kind for name, kind in kinds.items() if kind and name not in others}
        for kind in ("image", "audio", "text", "features"):
            names = [name for name, its in kinds.items() if its == kind]
            alone = kind in ("image", "audio") or len(names) == len(kinds)  # beside other columns
            if alone and (len(names) == 1 or (kind == "features" and names)):
                counter = next((n for n in names if columns.ascends(table, n)), None)
                found = f"not given, and {counter} is a number of the sample: it ascends"
                require(counter is None, f"{KEY}.features", found, "name the columns of samples")
                return kind, names
        found = f"not given, and which of the columns {', '.join(kinds)} are samples is not clear"
        raise UserError(f"{KEY}.features", found, "name them, or the column image, text or audio")

    def _samples(self, split: Split) -> Tensor:
        kind, names = self._source
        base = Path(self.path).expanduser()
        base = base if base.is_dir() else base.parent
        how: dict[str, Any]
        decode: Decode
        if kind == "image":
            grey = columns.is_grey(self._tables["train"], names[0], base)
            how = {"grey": grey, "size": self.image_size}
            at_once = min(columns.BLOCK, len(self._tables[split]))
            size = at_once * (1 if grey else 3) * (self.image_size or 0) ** 2
            what = f"{at_once} images of {self.image_size}x{self.image_size} pixels"
            require_memory(size, f"{KEY}.image_size", what, "lower it")
            decode = partial(columns.picture, base=base, **how)
        elif kind == "audio":
            how = {"seconds": self.seconds, "format": logmel.FORMAT}
            decode = partial(columns.recording, base=base, seconds=self.seconds)
        elif kind == "text":
            how = {"length": self.length}
            decode = partial(columns.letters, **how)
        else:
            how = {"shape": self.shape}
            decode = partial(columns.numbers, **how)
        where = columns.Where(split, kind, base)
        return prepared(self._tables[split], names, decode, where, how=how)
