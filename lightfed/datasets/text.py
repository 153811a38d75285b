"""Texts as characters, classified or continued: AG News, docstrings of packages, and prose."""

import ast
import logging
import platform
import sysconfig
import warnings
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

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
    missing,
    unreadable,
)
from lightfed.datasets.language import Prose
from lightfed.datasets.tables import column_of, open_table, texts_of
from lightfed.utils.cache import cached
from lightfed.utils.counts import rounded_up
from lightfed.utils.errors import UserError, reason
from lightfed.utils.rng import numpy_generator

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789-,;.!?:'\"/\\|_@#$%^&*~`+-=<>()[]{}\n"
"""The 70 characters as printed by Zhang et al. 2015; the hyphen is there twice, and its first
position counts."""

_PACKAGES = ("torch", "numpy", "pandas")

# Shorter docstrings, in characters, are not used.
_SHORTEST = 80

# The parts of a package that are read, if not all of it is: to read the rest would take time.
_PARTS = {"torch": ("nn", "optim", "distributed", "utils")}

# Folders that are not read.
_SKIPPED = {"test", "tests", "testing", "idle_test", "_vendor", "site-packages", "dist-packages"}

# What can have a docstring.
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def encode(texts: Sequence[str], length: int) -> np.ndarray:
    """Return the first characters of each text, in lower case, as positions in the alphabet.

    Args:
        texts: The N texts.
        length: The number of characters.

    Returns:
        A uint8 array of shape (N, length), with 1..70 for the characters of the alphabet, and 0 for
        any other character and after the end of a text.
    """
    code_of_letter = {ord(letter): ALPHABET.index(letter) + 1 for letter in ALPHABET}
    table = defaultdict(int, code_of_letter)
    codes = np.zeros((len(texts), length), dtype=np.uint8)
    for row, text in zip(codes, texts, strict=True):
        # Cut again, because a text can be longer in lower case.
        kept = text[:length].lower()[:length]
        row[: len(kept)] = bytearray(kept.translate(table), "latin-1")
    return codes


def encode_bytes(text: str, length: int) -> np.ndarray:
    """Return the first bytes of a text in UTF-8, as a uint8 array of shape (length,).

    A shorter text is followed by 0. A character at the end that does not fit whole is cut.
    """
    codes = np.zeros(length, dtype=np.uint8)
    kept = text.encode("utf-8", "surrogatepass")[:length]
    codes[: len(kept)] = bytearray(kept)
    return codes


class Characters(Dataset):
    """Texts with a class each.

    A sample is a uint8 tensor of shape (length,), see `encode`. A batch is a float32 tensor of
    shape (B, length).
    """

    transform = None  # codes are not normalized

    def __init__(self, *, length: int) -> None:
        if length < 1:
            raise UserError(f"{KEY}.length", found=f"{length}", fix="give at least 1")
        self.length = length
        self.input_shape = (length,)

    @abstractmethod
    def texts(self, split: Split) -> tuple[list[str], np.ndarray]:
        """Return the N texts of a split, and their classes as an int64 array of shape (N,)."""

    @override
    def load(self, split: Split) -> Samples:
        texts, labels = self.texts(split)
        x = torch.from_numpy(encode(texts, self.length))
        return Samples(x=x, y=torch.from_numpy(labels.copy()))


class AGNews(Characters):
    """127,600 news items of four classes: 120,000 for training, 7,600 for testing.

    The published files are ROOT/ag_news_csv/{train,test}.csv. Without them ROOT/ag_news is read, a
    folder with the files of the Hugging Face hub. A text is the title, a space and the description.
    """

    classes = ("World", "Sports", "Business", "Sci/Tech")

    def __init__(self, root: str, *, length: int = 1014) -> None:
        """Read AG News.

        Args:
            root: The folder that holds ag_news_csv, or ag_news of the hub.
            length: The number of characters in a sample: 1014 for CharCNN, 1024 for VDCNN in the
                papers. Longer texts are cut, and shorter ones padded.
        """
        super().__init__(length=length)
        self.root = Path(root).expanduser()

    @override
    def texts(self, split: Split) -> tuple[list[str], np.ndarray]:
        import pandas as pd

        path = self.root / "ag_news_csv" / f"{split}.csv"
        of_hub = self.root / "ag_news"
        if not path.parent.is_dir() and of_hub.is_dir():
            return self._texts_of_hub(of_hub, split)
        if not path.is_file():
            raise missing(path, holds="ag_news_csv, or ag_news of the hub")

        columns: Any = {"label": int, "title": str, "text": str}
        try:
            table = pd.read_csv(path, names=list(columns), dtype=columns, keep_default_na=False)
        except Exception as error:  # pandas has errors of its own
            raise unreadable(path, error) from error

        texts = (table.title + " " + table.text).tolist()
        # The file counts classes from 1.
        labels = table.label.to_numpy(np.int64) - 1
        return texts, labels

    def _texts_of_hub(self, folder: Path, split: Split) -> tuple[list[str], np.ndarray]:
        """Return the texts and classes of a split as the hub has them: columns text and label."""
        fix = "fetch ag_news of the hub again"
        try:
            table = open_table(str(folder), split, key="root")
        except UserError as error:
            raise UserError(f"{KEY}.root", error.found, fix) from error

        names = list(table.column_names)
        if "text" not in names or "label" not in names:
            found = f"{folder} has the columns {', '.join(names)}, not text and label"
            raise UserError(f"{KEY}.root", found, fix)
        labels = np.asarray(table["label"][:])
        if labels.dtype.kind not in "iu":
            raise UserError(f"{KEY}.root", f"{folder}: its labels are no whole numbers", fix)
        return texts_of(table, "text", split), labels.astype(np.int64)


class Docstrings(Characters):
    """Which package does a docstring belong to: the standard library, torch, numpy or pandas?

    The texts are different docstrings of at least 80 characters, equally many per class. A fifth of
    them is the test split. The samples depend only on the versions of the packages. Reading the
    sources takes ten seconds, once for all runs (`lightfed.utils.cache`).
    """

    classes = ("stdlib", *_PACKAGES)
    keeps = True

    def __init__(
        self, *, length: int = 1014, per_class: int = 1200, tokenizer: str | None = None
    ) -> None:
        """Read the docstrings.

        Args:
            length: The number of characters in a sample. Longer texts are cut, and shorter ones
                padded.
            per_class: The number of texts of each class in both splits together; fewer if a package
                has fewer.
            tokenizer: A tokenizer of `transformers`, as for `Hub`. Samples are then its columns,
                with the class as `labels`, and `length` counts tokens.
        """
        super().__init__(length=length)
        if per_class < 5:
            fix = "give at least 5"
            raise UserError(f"{KEY}.per_class", found=f"{per_class} texts", fix=fix)
        self.per_class = per_class
        self._tokenizer = tokenizer
        if tokenizer is not None:
            self.task = "columns"
            self.input_shape = ()

    @override
    def load(self, split: Split) -> Samples:
        if self._tokenizer is None:
            return super().load(split)
        texts, labels = self.texts(split)
        classes = torch.from_numpy(labels)
        columns = tokenized(texts, classes, self._tokenizer, self.length)
        return Samples(columns.tensors["input_ids"], classes, None, columns)

    @override
    def texts(self, split: Split) -> tuple[list[str], np.ndarray]:
        texts, labels = self._all_texts
        texts_of_class = np.bincount(labels, minlength=self.num_classes).tolist()
        count = min(self.per_class, *texts_of_class)
        if count < 5:
            names = ", ".join(self.classes)
            raise UserError(
                key="data.dataset",
                found=f"not all of {names} are installed with documented *.py files",
                fix="take AGNews, or install them from wheels",
            )

        part = slice(count // 5) if split == "test" else slice(count // 5, count)
        rng = numpy_generator(0, "docstrings/split")
        chosen = []
        for label in range(len(self.classes)):
            shuffled = rng.permutation(np.flatnonzero(labels == label))
            chosen.append(shuffled[part])
        positions = rng.permutation(np.concatenate(chosen))
        return [texts[position] for position in positions], labels[positions]

    @cached_property
    def _all_texts(self) -> tuple[list[str], np.ndarray]:
        """The N different texts of all classes, and their classes as an int64 array (N,)."""

        def scan() -> dict[str, int]:
            # A text that several packages have belongs to the first of them.
            label_of_text: dict[str, int] = {}
            folders_of_class = source_folders()
            for label, name in enumerate(self.classes):
                for folder in folders_of_class[name]:
                    for text in docstrings(folder):
                        label_of_text.setdefault(text, label)
            return label_of_text

        versions = [platform.python_version(), *map(version, _PACKAGES)]
        label_of_text: dict[str, int] = cached(["docstrings", versions], scan)
        return list(label_of_text), np.array(list(label_of_text.values()), dtype=np.int64)


def source_folders() -> dict[str, list[Path]]:
    """Return the source folders of each class."""
    folders = {"stdlib": [Path(sysconfig.get_path("stdlib"))]}
    for name in _PACKAGES:
        root = Path(str(files(name)))
        folders[name] = [root / part for part in _PARTS.get(name, ("",))]
    return folders


def docstrings(folder: Path) -> Iterator[str]:
    """Yield the docstrings of at least 80 characters in a folder, by the order of its files."""
    for path in sorted(folder.rglob("*.py")):
        if not _SKIPPED.isdisjoint(path.relative_to(folder).parts):
            continue
        try:
            with warnings.catch_warnings():
                # Some sources have backslashes in strings.
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            # Some sources are templates, or for another version of Python.
            continue

        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
            if text is not None and len(text) >= _SHORTEST:
                yield text


class NextCharacter(Dataset):
    """The texts of `Prose` or `Docstrings` in windows, for a causal model of `transformers`.

    Both have one alphabet of 71 tokens; see `encode`. The columns `input_ids` and `labels` are
    equal; for a sample, they are int64 tensors of shape (window,). The classes of docstrings are
    packages, and prose is one class. A window has text of one class.
    """

    task = "columns"
    input_shape = ()
    transform = None
    keeps = True

    def __init__(
        self, text: Literal["prose", "docstrings"], *, window: int = 64, per_class: int = 1200
    ) -> None:
        """Choose a text.

        Args:
            text: prose, for a base, or docstrings, to which it is adapted.
            window: The number of characters in a sample; those left over at the end of a class are
                dropped.
            per_class: The number of docstrings of each class in both splits together, as for
                `Docstrings`.
        """
        if window < 2:
            raise UserError(f"{KEY}.window", found=f"{window}", fix="give at least 2")
        self.window = window
        self._docstrings: Docstrings | None = None
        self.classes = ("prose",)
        if text == "docstrings":
            self._docstrings = Docstrings(per_class=per_class)
            self.classes = self._docstrings.classes

    @override
    def load(self, split: Split) -> Samples:
        windows_of_class = []
        for texts in self._texts_of_classes(split):
            text = "\n".join(texts)
            whole_windows = len(text) // self.window
            codes = encode([text], whole_windows * self.window)
            windows_of_class.append(torch.from_numpy(codes.reshape(-1, self.window)).long())

        x = torch.cat(windows_of_class)
        counts = torch.tensor([len(windows) for windows in windows_of_class])
        y = torch.arange(len(windows_of_class)).repeat_interleave(counts)
        return Samples(x, y, None, Columns({"input_ids": x, "labels": x}, {}, dict))

    def _texts_of_classes(self, split: Split) -> list[list[str]]:
        """Return the texts of each class."""
        if self._docstrings is None:
            return [Prose().lines(split)]

        texts, labels = self._docstrings.texts(split)
        texts_of_classes: list[list[str]] = [[] for _ in self.classes]
        for text, label in zip(texts, labels.tolist(), strict=True):
            texts_of_classes[label].append(text)
        return texts_of_classes


class OwnedText(Dataset):
    """The text of natural owners, such as the roles of a play, in windows of characters.

    A table has a text and its owner in each row. The texts of an owner are joined in their order;
    the last part of it is for testing. Windows are as of `NextCharacter`: for a causal model of
    `transformers`, in the alphabet of `encode`. The owners are the groups of `Natural`, in both
    splits, and are numbered by name.
    """

    task = "columns"
    input_shape = ()
    transform = None
    classes = ("text",)
    keeps = True

    def __init__(
        self,
        path: str,
        *,
        text: str = "text",
        owner: str = "owner",
        owners: int | None = None,
        window: int = 64,
        test: float = 0.2,
    ) -> None:
        """Describe the table; nothing is loaded yet.

        Args:
            path: The table, as for `Hub`: a file, a folder, or a name of the hub.
            text: The column of texts.
            owner: The column of owners.
            owners: The number of owners with the longest text to keep; all by default.
            window: The number of characters in a sample.
            test: The share of an owner's windows that are for testing, the last ones, rounded up.
        """
        if window < 2:
            raise UserError(f"{KEY}.window", found=f"{window}", fix="give at least 2")
        if not 0 < test < 1:
            raise UserError(f"{KEY}.test", found=f"{test}", fix="give a share such as 0.2")
        self.path = path
        self.window = window
        self._text = text
        self._owner = owner
        self._owners = owners
        self._test = test

    @override
    def load(self, split: Split) -> Samples:
        windows_of_owners = []
        for text in self._texts.values():
            whole_windows = len(text) // self.window
            codes = encode([text], whole_windows * self.window)
            windows = torch.from_numpy(codes.reshape(-1, self.window)).long()

            tested = rounded_up(self._test * whole_windows)
            is_train = split == "train"
            windows_of_owners.append(windows[:-tested] if is_train else windows[-tested:])

        x = torch.cat(windows_of_owners)
        counts = torch.tensor([len(windows) for windows in windows_of_owners])
        owners = torch.arange(len(windows_of_owners)).repeat_interleave(counts)
        columns = Columns({"input_ids": x, "labels": x}, {}, dict)
        classes = torch.zeros(len(x), dtype=torch.int64)
        return Samples(x, classes, owners, columns, tuple(self._texts))

    @cached_property
    def _texts(self) -> dict[str, str]:
        """The text of each owner that is kept, in the order of their names.

        Raises:
            UserError: The table cannot be read, has no such column, or has too few owners with two
                windows of text.
        """
        table = open_table(self.path, "train", key="path")
        texts = texts_of(table, column_of(table, self._text, "text"), "train")
        names = table[column_of(table, self._owner, "owner")][:]

        of_owners: dict[str, list[str]] = {}
        for name, text in zip(names, texts, strict=True):
            of_owners.setdefault(str(name), []).append(text)
        joined = {name: "\n".join(parts) for name, parts in of_owners.items()}

        # One window to train on, and one to test.
        long_enough = [name for name, text in joined.items() if len(text) >= 2 * self.window]
        kept = len(long_enough) if self._owners is None else self._owners
        if not 1 <= kept <= len(long_enough):
            found = f"{kept}, and {len(long_enough)} owners have two windows of {self.window}"
            raise UserError(f"{KEY}.owners", found, "give fewer, or shorter windows")
        by_length = sorted(long_enough, key=lambda name: (-len(joined[name]), name))
        return {name: joined[name] for name in sorted(by_length[:kept])}


def tokenized(
    texts: Sequence[str], classes: Tensor | None, tokenizer: str, max_length: int | None
) -> Columns:
    """Return the columns `input_ids`, `attention_mask` and `labels` of texts, by a tokenizer.

    Args:
        texts: The N texts.
        classes: The labels, an int64 tensor of shape (N,). None if the token ids are the labels.
        tokenizer: A tokenizer of `transformers`: a folder, or a name of the hub.
        max_length: The tokens that longer texts are cut to; None for the limit of the tokenizer.

    Raises:
        UserError: There is no such tokenizer, or it takes fewer tokens.
    """
    tokenize = tokenizer_of(tokenizer)
    limit = tokenize.model_max_length
    if max_length is not None and not 1 <= max_length <= limit:
        raise UserError(
            key=f"{KEY}.max_length",
            found=f"{max_length}, and the tokenizer takes {limit}",
            fix="give 1 to that many",
        )

    # A tokenizer without a limit has a huge number in its place.
    has_limit = limit < 1 << 30
    if max_length is None and has_limit:
        max_length = limit

    token_ids = tokenize(list(texts), truncation=max_length is not None, max_length=max_length)
    input_ids = [torch.tensor(ids, dtype=torch.int64) for ids in token_ids["input_ids"]]
    samples = {
        "input_ids": input_ids,
        "attention_mask": [torch.ones_like(ids) for ids in input_ids],
        "labels": input_ids if classes is None else list(classes),
    }
    return Columns.of(samples, input_ids=tokenize.pad_token_id or 0)


@cache
def tokenizer_of(path: str) -> Any:
    """Return the tokenizer in a folder, or of a name of the hub.

    Raises:
        UserError: There is none, or `transformers` is not installed.
    """
    key = f"{KEY}.tokenizer"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        found = f"{path}, and transformers is not installed"
        raise UserError(key, found, fix="pip install transformers peft") from error

    # What fails is raised, too, so that the library need not print it.
    logging.getLogger("transformers").setLevel(logging.CRITICAL)

    local = Path(path).expanduser()
    fix = "give the folder of a tokenizer, or a name of the hub that is in the cache"
    looks_local = path.startswith(("/", ".", "~"))
    if looks_local and not local.exists():
        raise UserError(key, found=f"{path} does not exist", fix=fix)
    try:
        return AutoTokenizer.from_pretrained(str(local) if local.exists() else path)
    except Exception as error:  # of a file, or of the hub
        raise UserError(key, f"{path} cannot be loaded ({reason(error)})", fix) from error
