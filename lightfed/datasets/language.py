"""Text for language models: WikiText-2, and prose that is included with Python.

The protocol is that of HeteroFL's published code. The vocabulary comes from the
training text. That text is folded to rows; a client owns a row, and its samples are windows of the
row. Two deviations: the published code also trains on the shorter window at the end of a row, and
takes the windows of a row in the order of the text, while lightfed shuffles them. The test text is
a single row here; the published code folds it to the rows of a test batch.
"""

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from lightfed.data.dataset import KEY, Dataset, Samples, Split, Task, missing, unreadable
from lightfed.utils.errors import require

Lines = Iterable[list[str]]

_WORD = re.compile(r"\w+|([^\w\s])\1*")  # a word, or repetitions of a sign such as `**` or `...`
_BLANK_LINES = re.compile(r"\n\s*\n")


class Vocabulary:
    """The words of a text by number, in the order in which they first occur.

    0 is the number of every unknown word, 1 of the end of a line.
    """

    def __init__(self, lines: Lines, *, least: int = 1) -> None:
        """Collect the words of lines.

        A word that occurs less than `least` times is unknown.
        """
        special = ("<ukn>", "<eos>")
        counts = Counter(chain.from_iterable(lines))
        frequent = (word for word, n in counts.items() if n >= least and word not in special)
        self.words = (*special, *frequent)
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, lines: Lines) -> np.ndarray:
        """(T,) int32: the words of all lines, and the end of each line."""
        number = self._numbers.get
        words = (word for line in lines for word in chain(line, ("<eos>",)))
        return np.fromiter((number(word, 0) for word in words), dtype=np.int32)


def fold(tokens: np.ndarray, *, rows: int, window: int) -> np.ndarray:
    """Cut a stream (T,) into rows of equal length, and each row into windows.

    Tokens left over at the end of the stream, and at the end of each row, are dropped. Returns
    (rows, windows of a row, window). A UserError if a row would be shorter than a window.
    """
    length = len(tokens) // rows
    found = f"{window} tokens, but a text of {len(tokens):,} tokens in rows ({rows}) has {length}"
    fix = "lower window or rows, or give a longer text"
    require(length >= window, f"{KEY}.window", f"{found} in each", fix)
    cut = tokens[: rows * length].reshape(rows, length)[:, : length // window * window]
    return cut.reshape(rows, -1, window)


class Text(Dataset):
    """Windows of a text; a model predicts every token.

    `num_classes` is the size of the vocabulary. For a partition, all samples are of a single class,
    and the rows are the natural owners: with `Natural`, a client owns a row.
    """

    classes = ("window",)
    task: Task = "masked_lm"
    transform = None  # tokens are not normalised
    _frequent: Mapping[str, int] = {}  # arguments of `Vocabulary`

    def __init__(self, *, rows: int = 100, window: int = 64) -> None:
        """Read the text.

        Args:
            rows: number of equal rows of the training text; a client owns one or more.
            window: tokens of a sample.
        """
        require(rows >= 1, f"{KEY}.rows", rows, "give at least 1")
        require(window >= 1, f"{KEY}.window", window, "give at least 1")
        self.rows, self.window = rows, window
        self.input_shape = (window,)

    @abstractmethod
    def lines(self, split: Split) -> list[str]:
        """The lines of a split."""

    def _words(self, line: str) -> list[str]:
        return line.split()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(map(self._words, self.lines("train")), **self._frequent)

    @property
    @override
    def num_classes(self) -> int:
        return len(self.vocabulary)

    @override
    def load(self, split: Split) -> Samples:
        tokens = self.vocabulary.encode(map(self._words, self.lines(split)))
        windows = fold(tokens, rows=self.rows if split == "train" else 1, window=self.window)
        rows, per_row, _ = windows.shape
        x = torch.from_numpy(windows.reshape(rows * per_row, self.window).copy())
        groups = torch.arange(rows).repeat_interleave(per_row) if split == "train" else None
        return Samples(x=x, y=torch.zeros(len(x), dtype=torch.int64), groups=groups)


class WikiText2(Text):
    """Good articles of Wikipedia, two million words, split at spaces.

    From ROOT/wikitext-2/wiki.{train,test}.tokens, or from the files of the hub, train-*.parquet and
    test-*.parquet, in ROOT/wikitext-2, ROOT/wikitext-2-v1 or ROOT/wikitext/wikitext-2-v1. The
    validation part is not used.
    """

    def __init__(self, root: str, **text: int) -> None:
        """Read WikiText-2.

        Args:
            root: the folder that holds wikitext-2.
            **text: `rows` and `window`.
        """
        super().__init__(**text)
        self.root = Path(root).expanduser()

    @override
    def lines(self, split: Split) -> list[str]:
        import pandas as pd

        path = self.root / "wikitext-2" / f"wiki.{split}.tokens"
        folders = ("wikitext-2", "wikitext-2-v1", "wikitext/wikitext-2-v1")
        found = (sorted((self.root / name).glob(f"{split}-*.parquet")) for name in folders)
        parts = [path] if path.is_file() else next(filter(None, found), [])
        if not parts:
            raise missing(path, holds=f"wikitext-2, with this file or the hub's {split}-*.parquet")
        try:
            if parts != [path]:
                return pd.concat(map(pd.read_parquet, parts))["text"].tolist()
            with path.open(encoding="utf-8") as file:
                return list(file)  # unlike str.splitlines, ends lines at line breaks only
        except Exception as error:  # pandas and pyarrow have their own
            raise unreadable(parts[0], error) from error


class Prose(Text):
    """Real prose that needs no files: Python's language reference, from `pydoc_data`.

    A paragraph is a line, in lower case. Punctuation marks are words. Words that occur once are
    unknown. Every tenth topic by name is test text. The text depends on the version of Python.
    """

    _frequent = {"least": 2}

    @override
    def lines(self, split: Split) -> list[str]:
        from pydoc_data.topics import topics

        names = sorted(topics)
        tested = set(names[::10])
        chosen = [topics[name] for name in names if (name in tested) == (split == "test")]
        return [line for text in chosen for line in _BLANK_LINES.split(text.strip())]

    @override
    def _words(self, line: str) -> list[str]:
        return [match.group() for match in _WORD.finditer(line.lower())]
