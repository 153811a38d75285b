"""Text for masked language models: WikiText-2, and the prose that comes with the interpreter.

The protocol is that of HeteroFL's published code: a vocabulary of the training text alone, the
training text folded to rows, one client for each row, windows of a row as samples. Two deviations:
the published code also trains on what is left at the end of a row, a window shorter than the
others, and takes the windows of a row in the order of the text, lightfed in random order. The test
text is one row here; there it is folded too, to the rows of a test batch.
"""

import re
from abc import abstractmethod
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from lightfed.data.datasets.dataset import Dataset, Samples, Split, Task
from lightfed.data.datasets.refusals import missing, unreadable
from lightfed.data.datasets.vocabulary import Vocabulary, fold
from lightfed.utils.errors import UserError

_WORD = re.compile(r"\w+|([^\w\s])\1*")  # a word, or a run of one sign such as `**` or `...`
_BLANK_LINES = re.compile(r"\n\s*\n")


class Text(Dataset):
    """Windows of a text, of which a model predicts every token.

    `num_classes` is the size of the vocabulary. A partitioner sees samples of a single class, and
    the rows as their natural owners: with `Natural`, a client owns a row.
    """

    classes = ("window",)
    task: Task = "masked_lm"
    _least = 1
    """How often a word of the vocabulary occurs in the training text at least."""

    def __init__(self, *, rows: int, window: int) -> None:
        for key, value in (("rows", rows), ("window", window)):
            if value < 1:
                raise UserError(f"data.dataset.init_args.{key}", f"{value}", "give at least 1")
        self.rows = rows
        self.window = window
        self.input_shape = (window,)

    @abstractmethod
    def _lines(self, split: Split) -> list[str]:
        """The lines of a split."""

    def _words(self, line: str) -> list[str]:
        return line.split()

    @cached_property
    def _training(self) -> tuple[Vocabulary, np.ndarray]:
        """The vocabulary and the tokens of the training text, which is read once."""
        lines = self._lines("train")
        # To split them twice takes less than to keep two million strings.
        vocabulary = Vocabulary(map(self._words, lines), least=self._least)
        return vocabulary, vocabulary.encode(map(self._words, lines))

    @property
    def vocabulary(self) -> Vocabulary:
        return self._training[0]

    @property
    @override
    def num_classes(self) -> int:
        return len(self.vocabulary)

    @property
    @override
    def transform(self) -> None:
        """None: tokens are numbers as they are."""

    @override
    def load(self, split: Split) -> Samples:
        vocabulary, training = self._training
        if split == "train":
            windows = fold(training, rows=self.rows, window=self.window)
        else:
            tokens = vocabulary.encode(map(self._words, self._lines("test")))
            windows = fold(tokens, rows=1, window=self.window)
        rows, per_row, _ = windows.shape
        x = torch.from_numpy(windows.reshape(rows * per_row, self.window).copy())
        groups = torch.arange(rows).repeat_interleave(per_row)
        return Samples(
            x=x,
            y=torch.zeros(len(x), dtype=torch.int64),
            groups=groups if split == "train" else None,
        )


class WikiText2(Text):
    """Good articles of Wikipedia, two million words, split at spaces.

    From ROOT/wikitext-2/wiki.{train,test}.tokens, or from the files of the hub, train-*.parquet and
    test-*.parquet, in ROOT/wikitext-2, ROOT/wikitext-2-v1 or ROOT/wikitext/wikitext-2-v1. The
    validation part is not read.
    """

    def __init__(self, root: str, *, rows: int = 100, window: int = 64) -> None:
        """Read WikiText-2.

        Args:
            root: the folder that holds wikitext-2.
            rows: how many equal rows the training text is folded to; a client owns one, or some.
            window: tokens of a sample.
        """
        super().__init__(rows=rows, window=window)
        self.root = Path(root).expanduser()

    @override
    def _lines(self, split: Split) -> list[str]:
        path = self.root / "wikitext-2" / f"wiki.{split}.tokens"
        hub = [] if path.is_file() else self._hub_files(split)
        if not hub and not path.is_file():
            raise missing(path, holds=f"wikitext-2, with this file or the hub's {split}-*.parquet")
        try:
            return _parquet_lines(hub) if hub else _text_lines(path)
        except (OSError, ValueError, KeyError) as error:
            raise unreadable(hub[0] if hub else path, error) from error

    def _hub_files(self, split: Split) -> list[Path]:
        """The parquet files of the first folder that holds some."""
        for folder in ("wikitext-2", "wikitext-2-v1", "wikitext/wikitext-2-v1"):
            if found := sorted((self.root / folder).glob(f"{split}-*.parquet")):
                return found
        return []


class Prose(Text):
    """Real prose, always there: the language reference in `pydoc_data` of the interpreter.

    A paragraph is a line, in lower case; signs are words; words that occur once are unknown. Every
    tenth topic by name is the test text. The text differs from version to version of Python.
    """

    _least = 2

    def __init__(self, *, rows: int = 100, window: int = 64) -> None:
        """Read the prose.

        Args:
            rows: how many equal rows the training text is folded to; a client owns one, or some.
            window: tokens of a sample.
        """
        super().__init__(rows=rows, window=window)

    @override
    def _lines(self, split: Split) -> list[str]:
        from pydoc_data.topics import topics

        names = sorted(topics)
        tested = set(names[::10])
        chosen = [topics[name] for name in names if (name in tested) == (split == "test")]
        return [line for text in chosen for line in _BLANK_LINES.split(text.strip())]

    @override
    def _words(self, line: str) -> list[str]:
        return [match.group() for match in _WORD.finditer(line.lower())]


def _text_lines(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return list(file)  # str.splitlines would end lines at signs that are none to a file


def _parquet_lines(paths: list[Path]) -> list[str]:
    """A row of a file is a line of the text."""
    # What `datasets` reads them with; without it nothing is copied to a cache in the home folder.
    from pyarrow.parquet import read_table  # type: ignore[import-untyped]

    lines = [line for path in paths for line in read_table(path)["text"].to_pylist()]
    if not all(isinstance(line, str) for line in lines):
        raise ValueError("the column `text` is not text")
    return lines
