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
from itertools import chain
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
from lightfed.utils.cache import cached
from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.rng import numpy_generator

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789-,;.!?:'\"/\\|_@#$%^&*~`+-=<>()[]{}\n"
"""As printed by Zhang et al. 2015: 70 characters; the hyphen occurs twice, and its first place
counts."""

_PACKAGES = ("torch", "numpy", "pandas")
_SHORTEST = 80  # characters
_PARTS = {"torch": ("nn", "optim", "distributed", "utils")}  # enough; the rest would take time
_SKIPPED = {"test", "tests", "testing", "idle_test", "_vendor", "site-packages", "dist-packages"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def encode(texts: Sequence[str], length: int) -> np.ndarray:
    """The first characters of each text, in lower case, as places in the alphabet.

    Returns (N, length) uint8: 1..70, and 0 after the end of a text or for any other character.
    """
    table = defaultdict(int, {ord(letter): ALPHABET.index(letter) + 1 for letter in ALPHABET})
    codes = np.zeros((len(texts), length), dtype=np.uint8)
    for row, text in zip(codes, texts, strict=True):
        kept = text[:length].lower()[:length]  # lower case can be longer
        row[: len(kept)] = bytearray(kept.translate(table), "latin-1")
    return codes


class Characters(Dataset):
    """Texts with a class each.

    A sample is (length,) uint8, see `encode`. A batch is float32, (B, length).
    """

    transform = None  # codes are not normalised

    def __init__(self, *, length: int) -> None:
        require(length >= 1, f"{KEY}.length", length, "give at least 1")
        self.length = length
        self.input_shape = (length,)

    @abstractmethod
    def texts(self, split: Split) -> tuple[list[str], np.ndarray]:
        """The texts of a split, and their classes, (N,) int64."""

    @override
    def load(self, split: Split) -> Samples:
        texts, labels = self.texts(split)
        x = torch.from_numpy(encode(texts, self.length))
        return Samples(x=x, y=torch.from_numpy(labels.copy()))


class AGNews(Characters):
    """127,600 news items of four classes: 120,000 for training, 7,600 for testing.

    From ROOT/ag_news_csv/{train,test}.csv, the published files; a text is the title, a space and
    the description. `Hub` reads the files of the hub.
    """

    classes = ("World", "Sports", "Business", "Sci/Tech")

    def __init__(self, root: str, *, length: int = 1014) -> None:
        """Read AG News.

        Args:
            root: the folder that holds ag_news_csv.
            length: characters of a sample: 1014 for CharCNN, 1024 for VDCNN in the papers. Longer
                texts are cut, shorter ones padded.
        """
        super().__init__(length=length)
        self.root = Path(root).expanduser()

    @override
    def texts(self, split: Split) -> tuple[list[str], np.ndarray]:
        import pandas as pd

        path = self.root / "ag_news_csv" / f"{split}.csv"
        if not path.is_file():
            raise missing(path, holds="ag_news_csv")
        columns: Any = {"label": int, "title": str, "text": str}
        try:
            table = pd.read_csv(path, names=[*columns], dtype=columns, keep_default_na=False)
        except Exception as error:  # pandas has its own
            raise unreadable(path, error) from error
        return (table.title + " " + table.text).tolist(), table.label.to_numpy(np.int64) - 1


class Docstrings(Characters):
    """Which package does a docstring belong to: the standard library, torch, numpy or pandas?

    Different docstrings of at least 80 characters, equally many per class; a fifth is the test
    split. The samples depend only on the versions of the packages. Reading the sources takes ten
    seconds, once for all runs (`lightfed.utils.cache`).
    """

    classes = ("stdlib", *_PACKAGES)
    keeps = True

    def __init__(
        self, *, length: int = 1014, per_class: int = 1200, tokenizer: str | None = None
    ) -> None:
        """Read the docstrings.

        Args:
            length: characters of a sample; longer texts are cut, shorter ones padded.
            per_class: texts of each class in both splits together; less if a package has fewer.
            tokenizer: of `transformers`, as of `Hub`; samples are then its columns, with the class
                as `labels`, and `length` counts tokens.
        """
        super().__init__(length=length)
        self._tokenizer = tokenizer
        if tokenizer is not None:
            self.task, self.input_shape = "columns", ()
        require(per_class >= 5, f"{KEY}.per_class", f"{per_class} texts", "give at least 5")
        self.per_class = per_class

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
        texts, labels = self._found
        count = min(self.per_class, *np.bincount(labels, minlength=self.num_classes).tolist())
        found = f"not all of {', '.join(self.classes)} are installed with documented *.py files"
        require(count >= 5, "data.dataset", found, "take AGNews, or install them from wheels")
        rng = numpy_generator(0, "docstrings/split")
        part = slice(count // 5) if split == "test" else slice(count // 5, count)
        chosen = [
            rng.permutation(np.flatnonzero(labels == c))[part] for c in range(len(self.classes))
        ]
        index = rng.permutation(np.concatenate(chosen))
        return [texts[i] for i in index], labels[index]

    @cached_property
    def _found(self) -> tuple[list[str], np.ndarray]:
        """The different texts of all classes, and their classes, (N,) int64."""

        def scanned() -> dict[str, int]:
            texts: dict[str, int] = {}
            folders = source_folders()
            for label, name in enumerate(self.classes):
                for text in chain.from_iterable(map(docstrings, folders[name])):
                    texts.setdefault(text, label)
            return texts

        versions = [platform.python_version(), *map(version, _PACKAGES)]  # what texts depend on
        texts: dict[str, int] = cached(["docstrings", versions], scanned)
        return list(texts), np.array(list(texts.values()), dtype=np.int64)


def source_folders() -> dict[str, list[Path]]:
    """The source folders of each class."""
    folders = {"stdlib": [Path(sysconfig.get_path("stdlib"))]}
    for name in _PACKAGES:
        root = Path(str(files(name)))
        folders[name] = [root / part for part in _PARTS.get(name, ("",))]
    return folders


def docstrings(folder: Path) -> Iterator[str]:
    """The docstrings of at least 80 characters in a folder, in the order of files and lines."""
    for path in sorted(folder.rglob("*.py")):
        if not _SKIPPED.isdisjoint(path.relative_to(folder).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about backslashes in strings
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # some sources are templates, or for another version of Python
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
            if text is not None and len(text) >= _SHORTEST:
                yield text


class NextCharacter(Dataset):
    """The texts of `Prose` or `Docstrings` in windows, for a causal model of `transformers`.

    Both have one alphabet, 71 tokens: see `encode`. The columns `input_ids` and `labels` are equal,
    (window,) int64. The classes of docstrings are packages, and prose is one class. A window has
    text of one class.
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
            window: Characters of a sample; those left over at the end of a class are dropped.
            per_class: Docstrings of each class in both splits together, as of `Docstrings`.
        """
        require(window >= 2, f"{KEY}.window", window, "give at least 2")
        self._docstrings = Docstrings(per_class=per_class) if text == "docstrings" else None
        self.classes = self._docstrings.classes if self._docstrings else ("prose",)
        self.window = window

    @override
    def load(self, split: Split) -> Samples:
        streams = [Prose().lines(split)]
        if self._docstrings:
            texts, labels = self._docstrings.texts(split)
            streams = [
                [texts[i] for i in np.flatnonzero(labels == c)] for c in range(len(self.classes))
            ]
        windows = []
        for stream in streams:
            text = "\n".join(stream)
            whole = encode([text], len(text) // self.window * self.window)
            windows.append(torch.from_numpy(whole.reshape(-1, self.window)).long())
        x, y = torch.cat(windows), torch.arange(len(windows))
        y = y.repeat_interleave(torch.tensor([len(part) for part in windows]))
        return Samples(x, y, None, Columns({"input_ids": x, "labels": x}, {}, dict))


def tokenized(
    texts: Sequence[str], classes: Tensor | None, tokenizer: str, max_length: int | None
) -> Columns:
    """The columns `input_ids`, `attention_mask` and `labels` of texts, by a tokenizer.

    Args:
        texts: N of them.
        classes: (N,) int64 labels; None: the token ids are the labels.
        tokenizer: of `transformers`: a folder, or a name of the hub.
        max_length: tokens that longer texts are cut to; None for the limit of the tokenizer.
    """
    made = tokenizer_of(tokenizer)
    most, own = max_length, made.model_max_length
    fits, found = most is None or 1 <= most <= own, f"{most}, and the tokenizer takes {own}"
    require(fits, f"{KEY}.max_length", found, "give 1 to that many")
    most = most or (own if own < 1 << 30 else None)  # a huge one means none
    rows = made([*texts], truncation=most is not None, max_length=most)["input_ids"]
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    masks = [torch.ones_like(row) for row in ids]
    labels = ids if classes is None else list(classes)
    samples = {"input_ids": ids, "attention_mask": masks, "labels": labels}
    return Columns.of(samples, input_ids=made.pad_token_id or 0)


@cache
def tokenizer_of(path: str) -> Any:
    """The tokenizer in a folder, or of a name of the hub; a UserError if there is none."""
    key = f"{KEY}.tokenizer"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        found = f"{path}, and transformers is not installed"
        raise UserError(key, found, "pip install lightfed[hf]") from error
    logging.getLogger("transformers").setLevel(logging.CRITICAL)  # what fails is raised, too
    local = Path(path).expanduser()
    fix = "give the folder of a tokenizer, or a name of the hub that is in the cache"
    there = local.exists() or not path.startswith(("/", ".", "~"))
    require(there, key, f"{path} is not there", fix)
    try:
        return AutoTokenizer.from_pretrained(str(local) if local.exists() else path)
    except Exception as error:  # of a file, or of the hub
        raise UserError(key, f"{path} cannot be loaded ({reason(error)})", fix) from error
