"""Words as numbers, and a stream of numbers as windows."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from lightfed.utils.errors import UserError

Lines = Iterable[list[str]]

UNKNOWN = "<ukn>"
END_OF_LINE = "<eos>"


class Vocabulary:
    """The words of a text, in the order in which they first occur.

    Number 0 stands for every word that is not among them, number 1 for the end of a line.

    Attributes:
        words: the word of each number.
    """

    def __init__(self, lines: Lines, *, least: int = 1) -> None:
        """Collect the words of a text.

        Args:
            lines: the words of each line.
            least: how often a word occurs at least, or else it is unknown.
        """
        counts = Counter(chain.from_iterable(lines))
        special = (UNKNOWN, END_OF_LINE)
        frequent = (word for word, n in counts.items() if n >= least and word not in special)
        self.words = (*special, *frequent)
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, lines: Lines) -> np.ndarray:
        """(T,) int32: the words of all lines, an end after each line."""
        return np.fromiter(self._stream(lines), dtype=np.int32)

    def _stream(self, lines: Lines) -> Iterator[int]:
        number = self._numbers.get
        for words in lines:
            for word in words:
                yield number(word, 0)
            yield 1


def fold(tokens: np.ndarray, *, rows: int, window: int) -> np.ndarray:
    """Cut a stream into rows of equal length, and each row into windows.

    What is left over at the end of the stream, and at the end of each row, is dropped.

    Args:
        tokens: (T,).
        rows: how many rows.
        window: tokens of a window.

    Returns:
        (rows, windows of a row, window).

    Raises:
        UserError: a row would be shorter than a window.
    """
    length = len(tokens) // rows
    if length < window:
        raise UserError(
            "data.dataset.init_args.window",
            f"{window} tokens, but a text of {len(tokens):,} tokens in rows ({rows}) has {length} "
            "in each",
            "lower window or rows, or give a longer text",
        )
    windows = length // window
    cut = tokens[: rows * length].reshape(rows, length)[:, : windows * window]
    return cut.reshape(rows, windows, window)
