"""Text for language models: WikiText-2, and prose that is included with Python.

The protocol is that of HeteroFL's published code. The vocabulary comes from the training text. That
text is folded to rows. A client owns a row, and its samples are windows of the row.

There are three deviations. The published code also trains on the shorter window at the end of a
row. It takes the windows of a row in the order of the text, while lightfed shuffles them. And it
folds the test text to the rows of a test batch, while here it is a single row.
"""

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from lightfed.data.dataset import KEY, Dataset, Samples, Split, Task, missing, unreadable
from lightfed.utils.errors import UserError

Lines = Iterable[list[str]]

# A word, or repetitions of a sign such as `**` or `...`.
_WORD = re.compile(r"\w+|([^\w\s])\1*")

_BLANK_LINES = re.compile(r"\n\s*\n")


class Vocabulary:
    """The words of a text and their numbers, in the order in which they first occur.

    0 is the number of every unknown word, and 1 the number of the end of a line.

    Args:
        lines: The words of each line.
        least: A word that occurs fewer times is unknown.

    Attributes:
        words: The words by their numbers.
    """

    def __init__(self, lines: Lines, *, least: int = 1) -> None:
        special = ("<ukn>", "<eos>")
        counts = Counter(chain.from_iterable(lines))
        frequent = [
            word for word, count in counts.items() if count >= least and word not in special
        ]
        self.words = (*special, *frequent)
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, lines: Lines) -> np.ndarray:
        """Return the numbers of the words of all lines, with the end of each line.

        Args:
            lines: The words of each line.

        Returns:
            An int32 array of shape (T,).
        """
        numbers = []
        for line in lines:
            for word in line:
                numbers.append(self._numbers.get(word, 0))
            numbers.append(self._numbers["<eos>"])
        return np.array(numbers, dtype=np.int32)


def fold(tokens: np.ndarray, *, rows: int, window: int) -> np.ndarray:
    """Cut a stream of tokens into rows of equal length, and each row into windows.

    Tokens left over at the end of the stream, and at the end of each row, are dropped.

    Args:
        tokens: The stream, of shape (T,).
        rows: The number of rows.
        window: The number of tokens in a window.

    Returns:
        The windows, of shape (rows, windows of a row, window).

    Raises:
        UserError: A row would be shorter than a window.
    """
    length = len(tokens) // rows
    if length < window:
        raise UserError(
            key=f"{KEY}.window",
            found=f"{window} tokens, but a text of {len(tokens):,} tokens in rows ({rows}) has "
            f"{length} in each",
            fix="lower window or rows, or give a longer text",
        )

    windows_of_row = length // window
    row_tokens = tokens[: rows * length].reshape(rows, length)
    return row_tokens[:, : windows_of_row * window].reshape(rows, windows_of_row, window)


class Text(Dataset):
    """Windows of a text; a model predicts every token.

    `num_classes` is the size of the vocabulary. For a partition, all samples are of a single class.
    The rows are the natural owners: with `Natural`, a client owns a row.
    """

    classes = ("window",)
    task: Task = "masked_lm"
    transform = None  # tokens are not normalized

    # A word that occurs fewer times in the training text is unknown.
    _least = 1

    def __init__(self, *, rows: int = 100, window: int = 64) -> None:
        """Read the text.

        Args:
            rows: The number of equal rows of the training text; a client owns one or more.
            window: The number of tokens in a sample.
        """
        if rows < 1:
            raise UserError(f"{KEY}.rows", found=f"{rows}", fix="give at least 1")
        if window < 1:
            raise UserError(f"{KEY}.window", found=f"{window}", fix="give at least 1")
        self.rows = rows
        self.window = window
        self.input_shape = (window,)

    @abstractmethod
    def lines(self, split: Split) -> list[str]:
        """Return the lines of a split."""

    def _words(self, line: str) -> list[str]:
        """Return the words of a line."""
        return line.split()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The words of the training text."""
        return Vocabulary(map(self._words, self.lines("train")), least=self._least)

    @property
    @override
    def num_classes(self) -> int:
        return len(self.vocabulary)

    @override
    def load(self, split: Split) -> Samples:
        is_train = split == "train"
        tokens = self.vocabulary.encode(map(self._words, self.lines(split)))
        windows = fold(tokens, rows=self.rows if is_train else 1, window=self.window)

        rows, windows_of_row, _ = windows.shape
        x = torch.from_numpy(windows.reshape(rows * windows_of_row, self.window).copy())
        y = torch.zeros(len(x), dtype=torch.int64)
        groups = torch.arange(rows).repeat_interleave(windows_of_row) if is_train else None
        return Samples(x=x, y=y, groups=groups)


class WikiText2(Text):
    """Good articles of Wikipedia, two million words, split at spaces.

    The files are ROOT/wikitext-2/wiki.{train,test}.tokens, or those of the hub, train-*.parquet and
    test-*.parquet, in ROOT/wikitext-2, ROOT/wikitext-2-v1 or ROOT/wikitext/wikitext-2-v1. The
    validation part is not used.
    """

    def __init__(self, root: str, **text: int) -> None:
        """Read WikiText-2.

        Args:
            root: The folder that holds wikitext-2.
            **text: `rows` and `window`.
        """
        super().__init__(**text)
        self.root = Path(root).expanduser()

    @override
    def lines(self, split: Split) -> list[str]:
        import pandas as pd

        path = self.root / "wikitext-2" / f"wiki.{split}.tokens"
        if path.is_file():
            try:
                with path.open(encoding="utf-8") as file:
                    # Unlike `str.splitlines`, this ends lines at line breaks only.
                    return list(file)
            except (OSError, ValueError) as error:
                raise unreadable(path, error) from error

        for folder in ("wikitext-2", "wikitext-2-v1", "wikitext/wikitext-2-v1"):
            parts = sorted((self.root / folder).glob(f"{split}-*.parquet"))
            if not parts:
                continue
            try:
                return pd.concat(map(pd.read_parquet, parts))["text"].tolist()
            except Exception as error:  # pandas and pyarrow have errors of their own
                raise unreadable(parts[0], error) from error

        raise missing(path, holds=f"wikitext-2, with this file or the hub's {split}-*.parquet")


class Prose(Text):
    """Real prose that needs no files: Python's language reference, from `pydoc_data`.

    A paragraph is a line, in lower case. Punctuation marks are words. Words that occur once are
    unknown. Every tenth topic by name is test text. The text depends on the version of Python.
    """

    _least = 2

    @override
    def lines(self, split: Split) -> list[str]:
        from pydoc_data.topics import topics

        paragraphs = []
        for position, name in enumerate(sorted(topics)):
            is_test = position % 10 == 0
            if is_test == (split == "test"):
                paragraphs += _BLANK_LINES.split(topics[name].strip())
        return paragraphs

    @override
    def _words(self, line: str) -> list[str]:
        return [match.group() for match in _WORD.finditer(line.lower())]
