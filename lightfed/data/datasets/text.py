"""Texts that are classified by their characters: AG News, and what such data sets share."""

import csv
from abc import abstractmethod
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from lightfed.data.datasets.characters import encode
from lightfed.data.datasets.dataset import Dataset, Samples, Split
from lightfed.data.datasets.refusals import ROOT, missing, unreadable
from lightfed.utils.errors import UserError


class Characters(Dataset):
    """Texts with a class each.

    A sample is (length,), letters of `lightfed.data.datasets.characters`.

    They stay uint8 on the device. A batch is float32, (B, length), of which a model makes indices.
    """

    def __init__(self, *, length: int) -> None:
        if length < 1:
            raise UserError("data.dataset.init_args.length", f"{length}", "give at least 1")
        self.length = length
        self.input_shape = (length,)

    @abstractmethod
    def _texts(self, split: Split) -> tuple[list[str], np.ndarray]:
        """The texts of a split, and (N,) int64, their classes."""

    @property
    @override
    def transform(self) -> None:
        """None: letters are numbers as they are."""

    @override
    def load(self, split: Split) -> Samples:
        texts, labels = self._texts(split)
        return Samples(
            x=torch.from_numpy(encode(texts, self.length)), y=torch.from_numpy(labels.copy())
        )


class AGNews(Characters):
    """127,600 news of four classes: 120,000 to train on, 7,600 to test.

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
        hub = sorted((self.root / "ag_news" / "data").glob(f"{split}-*.parquet"))
        if not path.is_file() and not hub:
            raise missing(path, holds="ag_news_csv, or ag_news of the hub")
        source = path if path.is_file() else hub[0]
        try:
            texts, labels = _read_csv(path) if path.is_file() else _read_parquet(hub)
        except (OSError, ValueError, csv.Error) as error:
            raise unreadable(source, error) from error
        y = np.array(labels, dtype=np.int64)
        if len(y) == 0 or y.min() < 0 or y.max() >= self.num_classes:
            found = (
                f"classes {y.min()} to {y.max()}, where 0 to 3 are known" if len(y) else "no text"
            )
            raise UserError(ROOT, f"{source} holds {found}", "point root at the published files")
        return texts, y


def _read_csv(path: Path) -> tuple[list[str], list[int]]:
    """Rows of class 1..4, title, description, each in quotes."""
    texts, labels = [], []
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if len(row) < 3:
                raise ValueError(
                    f"row {number} has {len(row)} columns: class, title, text are three"
                )
            labels.append(int(row[0]) - 1)
            texts.append(" ".join(row[1:]))
    return texts, labels


def _read_parquet(paths: list[Path]) -> tuple[list[str], list[int]]:
    """Columns text and label, 0..3."""
    # What `datasets` reads them with; without it nothing is copied to a cache in the home folder.
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow.parquet import read_table  # type: ignore[import-untyped]

    types = {"text": pyarrow.string(), "label": pyarrow.int64()}
    schema = pyarrow.schema([pyarrow.field(*pair, nullable=False) for pair in types.items()])
    table = read_table(paths, columns=schema.names).cast(schema)
    return table["text"].to_pylist(), table["label"].to_pylist()
