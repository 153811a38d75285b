"""Own sentences by their authors, for language models."""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from lightfed.data.datasets.columns import Codes
from lightfed.data.datasets.dataset import KEY, Samples, Split
from lightfed.data.datasets.language import Text, Vocabulary
from lightfed.data.datasets.tables import Table, hold_out, open_table, require_apart
from lightfed.utils.errors import require


class Sentences(Text):
    """Sentences of a table with a column of their authors, such as Stack Overflow's.

    The sentences of an author make one stream of words, cut into windows. The words that are left
    over are dropped, so that an author with fewer words than a window has no sample.
    """

    def __init__(
        self,
        path: str,
        *,
        text: str,
        group: str,
        train: str = "train",
        test: float | str = "test",
        words: int = 10_000,
        window: int = 20,
    ) -> None:
        """Describe the table; nothing is loaded yet.

        Args:
            path: a file, a folder or a name of the hub, as for `Hub`.
            text: the column of sentences, split at spaces, in lower case.
            group: the column of authors, for `Natural`.
            train: the training split, as `datasets` reads it, such as `train[:80%]`.
            test: the test split, or a share of every author's sentences such as 0.2.
            words: size of the vocabulary: the most frequent words of the training split.
            window: words of a sample.
        """
        super().__init__(window=window)
        fits = isinstance(test, str) or 0 < test < 1
        require(fits, f"{KEY}.test", test, "name a split, or give a share such as 0.2")
        require(words >= 1, f"{KEY}.words", words, "give at least 1")
        self.path, self.most, self._splits = path, words, (train, test)
        self._columns = {"text": text, "group": group}

    @property
    @override
    def name(self) -> str:
        return Path(self.path).name

    @cached_property
    def _tables(self) -> dict[Split, Table]:
        first, second = self._splits
        train = open_table(self.path, first, key="train")
        for key, column in self._columns.items():
            known = train.column_names
            found = f"no column {column}, there are {', '.join(known)}"
            require(column in known, f"{KEY}.{key}", found, "name one of them")
        if isinstance(second, str):
            test = open_table(self.path, second, key="test")
            require_apart(train, splits=(first, second))
            return {"train": train, "test": test}
        train, test = hold_out(train, second, self._columns["group"])
        return {"train": train, "test": test}

    @override
    def _lines(self, split: Split) -> list[str]:
        column = self._columns["text"]
        lines = self._tables[split][column][:]
        bad = next((i for i, line in enumerate(lines) if not isinstance(line, str)), None)
        found = "" if bad is None else f"{split}: sample {bad} has {lines[bad]!r}"
        require(bad is None, f"{KEY}.text", found, "give a sentence")
        return lines

    @override
    def _words(self, line: str) -> list[str]:
        return line.lower().split()

    @cached_property
    def _training(self) -> tuple[Vocabulary, np.ndarray]:
        lines = self._lines("train")
        vocabulary = Vocabulary(map(self._words, lines), most=self.most)
        return vocabulary, np.empty(0, dtype=np.int32)  # streams are per author

    @override
    def load(self, split: Split) -> Samples:
        codes = Codes(self._tables, column=self._columns["group"], key="group")  # type: ignore[arg-type]
        owners = codes.encode(self._tables[split], split).numpy()
        lines, windows, groups = self._lines(split), [], []
        order = np.argsort(owners, kind="stable")
        for own in np.split(order, np.flatnonzero(np.diff(owners[order])) + 1):
            stream = self.vocabulary.encode(self._words(lines[i]) for i in own)
            rows = len(stream) // self.window
            windows.append(stream[: rows * self.window].reshape(rows, self.window))
            groups.append(np.full(rows, owners[own[0]]))
        x, owner = np.concatenate(windows), np.concatenate(groups)
        found = f"{self.window} words, but no author of the {split} split has as many"
        require(len(x) > 0, f"{KEY}.window", found, "lower it")
        return Samples(
            torch.from_numpy(x), torch.zeros(len(x), dtype=torch.int64), torch.from_numpy(owner)
        )
