"""Texts that are classified by their characters: AG News, and a base class for others."""

import csv
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from lightfed.data.datasets.dataset import KEY, Dataset, Samples, Split, missing, unreadable
from lightfed.data.datasets.tables import texts_of
from lightfed.utils.errors import require

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789-,;.!?:'\"/\\|_@#$%^&*~`+-=<>()[]{}\n"
"""As printed by Zhang et al. 2015: 70 characters; the hyphen occurs twice, and its first place
counts."""


def encode(texts: Sequence[str], length: int) -> np.ndarray:
    """The first characters of each text, in lower case, as places in the alphabet.

    Returns (N, length) uint8: 1..70, and 0 after the end of a text or for any other character.
    """
    table = np.zeros(256, dtype=np.uint8)
    for letter in ALPHABET:
        table[ord(letter)] = ALPHABET.index(letter) + 1
    kept = [text[:length].lower()[:length] for text in texts]  # lower case can be longer
    sizes = np.array([len(text) for text in kept], dtype=np.int64)
    points = np.frombuffer("".join(kept).encode("utf-32-le", "surrogatepass"), dtype="<u4")
    codes = np.zeros((len(kept), length), dtype=np.uint8)
    codes[np.arange(length) < sizes[:, None]] = table[np.minimum(points, 255)]
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
    def _texts(self, split: Split) -> tuple[list[str], np.ndarray]:
        """The texts of a split, and their classes, (N,) int64."""

    @override
    def load(self, split: Split) -> Samples:
        texts, labels = self._texts(split)
        x = torch.from_numpy(encode(texts, self.length))
        return Samples(x=x, y=torch.from_numpy(labels.copy()))


class AGNews(Characters):
    """127,600 news items of four classes: 120,000 for training, 7,600 for testing.

    From ROOT/ag_news_csv/{train,test}.csv, the published files, where a text is the title, a space
    and the description; or from the files of the hub, ROOT/ag_news/data/{train,test}-*.parquet.
    """

    classes = ("World", "Sports", "Business", "Sci/Tech")

    def __init__(self, root: str, *, length: int = 1014) -> None:
        """Read AG News.

        Args:
            root: the folder that holds ag_news_csv, or ag_news.
            length: characters of a sample: 1014 for CharCNN, 1024 for VDCNN in the papers. Longer
                texts are cut, shorter ones padded.
        """
        super().__init__(length=length)
        self.root = Path(root).expanduser()

    @override
    def _texts(self, split: Split) -> tuple[list[str], np.ndarray]:
        path = self.root / "ag_news_csv" / f"{split}.csv"
        hub = self.root / "ag_news"
        if path.is_file():
            try:
                texts, labels = _read_csv(path)
            except (OSError, ValueError, csv.Error) as error:
                raise unreadable(path, error) from error
        elif any((hub / "data").glob(f"{split}-*.parquet")):
            texts, labels = texts_of(hub, split, "text", "label")
        else:
            raise missing(path, holds="ag_news_csv, or ag_news of the hub")
        return texts, np.array(labels, dtype=np.int64)


def _read_csv(path: Path) -> tuple[list[str], list[int]]:
    """Rows of class 1..4, title and description."""
    texts, labels = [], []
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if len(row) < 3:
                found = f"row {number} has {len(row)} columns: class, title, text are three"
                raise ValueError(found)
            labels.append(int(row[0]) - 1)
            texts.append(" ".join(row[1:]))
    return texts, labels
