"""Columns of a table as compact samples: images, texts, recordings, numbers, and classes.

Samples are prepared in blocks, kept in the cache folder and mapped from there, so that a table may
be larger than memory.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightfed.data.datasets.cache import cached
from lightfed.data.datasets.dataset import KEY
from lightfed.data.datasets.logmel import RATE, log_mel
from lightfed.data.datasets.tables import Table
from lightfed.data.datasets.text import encode
from lightfed.utils.errors import UserError

BLOCK = 256  # samples written together

_FIXES = {
    "image": "repair or convert the file, or set image_size",
    "audio": "repair the file",
    "text": "give a text",
    "features": "correct the table, or set shape",
}

Decode = Callable[[Any], np.ndarray]
"""The value of a sample, or its values if there are several columns, to an array."""


class Where(NamedTuple):
    """What the samples are, for errors, and where their files are."""

    split: str
    kind: str
    base: Path  # the folder of the relative paths in the table


def kind_of(name: str, feature: Any) -> str | None:
    """What a column holds: image, audio, text or features (numbers); None for anything else."""
    while hasattr(feature, "feature"):
        feature = feature.feature  # of a list
    kind, dtype = type(feature).__name__.lower(), str(getattr(feature, "dtype", ""))
    if kind in ("image", "audio"):
        return kind
    if dtype in ("string", "large_string"):
        return name if name in ("image", "audio") else "text"
    is_number = dtype.startswith(("int", "uint", "float", "bool", "double"))
    return "features" if is_number and kind != "classlabel" else None


def ascends(table: Table, name: str) -> bool:
    """Whether a column is of whole numbers, every one larger than that before."""
    is_whole = str(getattr(table.features[name], "dtype", "")).startswith(("int", "uint"))
    if not is_whole or len(table) < 3:
        return False
    return bool((np.diff(np.array(table[name][:], dtype=float)) > 0).all())


def prepared(
    table: Table, columns: Sequence[str], decode: Decode, where: Where, *, how: object
) -> Tensor:
    """All samples of a table, (N, ...), from the cache if nothing has changed.

    The values of the columns make a sample; all must have one shape. `where` names the key in
    errors, and `how` is all that `decode` depends on. A UserError names the key, the split and the
    first sample that cannot be used.
    """
    chosen = undecoded(table, columns)
    key = [1, table._fingerprint, list(columns), how, _files(chosen, columns[0], where)]
    return cached("table", key, lambda: _blocks(chosen, decode, where))


def _blocks(table: Table, decode: Decode, where: Where) -> Iterator[np.ndarray]:
    shape: tuple[int, ...] | None = None
    for start in range(0, len(table), BLOCK):
        rows = zip(*table[start : start + BLOCK].values(), strict=True)
        block = []
        for number, row in enumerate(rows, start):
            try:
                sample = decode(row if row[1:] else row[0])
                shape = shape or sample.shape
                if sample.shape != shape:
                    raise ValueError(f"its shape is {sample.shape}, that of the first {shape}")
            except Exception as error:  # of a file, a number or a decoder
                file = row[0]["path"] if isinstance(row[0], dict) else None
                name = f"sample {number} ({file})" if file else f"sample {number}"
                found = " ".join(f"{name} cannot be used: {error}".split())
                key, fix = f"{KEY}.{where.kind}", _FIXES[where.kind]
                raise UserError(key, f"{where.split}: {found}", fix) from error
            block.append(sample)
        yield np.stack(block)


def _files(table: Table, column: str, where: Where) -> list[Any]:
    """Files outside the table, which can change when it does not: their sizes and times."""
    if where.kind not in ("image", "audio"):
        return []
    first = table[0][column]
    if isinstance(first, dict) and first["bytes"] is not None:
        return []
    values = table[column]
    names = [value["path"] if isinstance(value, dict) else str(value) for value in values]
    files = [where.base / name for name in names if name]
    stats = [(str(path), path.stat()) for path in files if path.is_file()]
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def undecoded(table: Table, columns: Sequence[str]) -> Table:
    """Some columns; images and recordings are left as bytes or paths."""
    table = table.select_columns(list(columns))
    for name in columns:
        if kind_of("", table.features[name]) in ("image", "audio"):
            table = table.cast_column(name, type(table.features[name])(decode=False))
    return table


def content(value: Any, base: Path) -> Any:
    """What an image or a recording is read from: a file, or bytes in memory.

    `value` is a path below `base`, or the struct of bytes and path that `datasets` stores.
    """
    found = value if isinstance(value, str) else value["bytes"] or value["path"]
    return base / found if isinstance(found, str) else io.BytesIO(found)


def picture(value: Any, *, base: Path, grey: bool, size: int | None = None) -> np.ndarray:
    """(1 or 3, H, W) uint8, for a value as of `content`.

    `size` is height and width in pixels after a bilinear interpolation; None leaves it as it is.
    """
    from PIL import Image

    with Image.open(content(value, base)) as image:
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"its levels have more than 8 bits (mode {image.mode})")
        if grey and image.mode not in ("1", "L", "LA"):
            raise ValueError("it has colours, and others have levels of grey only")
        image = image.convert("L" if grey else "RGB")  # type: ignore[assignment]
        if size is not None and image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)  # type: ignore[assignment]
        return np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)


def is_grey(table: Table, column: str, base: Path) -> bool:
    """Whether a few images all have levels of grey only; False for what is no image."""
    from PIL import Image

    images, places = undecoded(table, [column]), range(0, len(table), -(-len(table) // 16))
    try:
        for place in places:
            with Image.open(content(images[place][column], base)) as image:
                if image.mode not in ("1", "L"):
                    return False
    except (OSError, TypeError):
        return False
    return True


def recording(value: Any, *, base: Path, seconds: float) -> np.ndarray:
    """The log-mel picture of a recording, (1, 32, frames) uint8, see `logmel`.

    Several channels become one. A recording is resampled to 16 kHz, then cut or padded with zeros.
    A ValueError if the file is no wave file, and FFmpeg or torchcodec is missing.
    """
    from torchaudio.functional import resample

    source = content(value, base)
    waves, rate = _waves(source)
    wave = resample(waves.mean(0), rate, RATE)[: round(seconds * RATE)]
    padded = torch.zeros(round(seconds * RATE))
    padded[: len(wave)] = wave
    (picture,) = log_mel([(padded[None] * 32768).numpy()])
    return picture[0]


def _waves(source: Any) -> tuple[Tensor, int]:
    """(channels, n) float32 in -1..1, and the samples per second."""
    from scipy.io import wavfile

    try:
        rate, samples = wavfile.read(source)
    except ValueError as error:
        try:
            from torchcodec.decoders import AudioDecoder
        except (ImportError, RuntimeError) as missing:
            found = f"{error}; what is not PCM wave needs FFmpeg and pip install 'lightfed[audio]'"
            raise ValueError(found) from missing
        decoded = AudioDecoder(source).get_all_samples()
        return decoded.data, decoded.sample_rate
    samples = np.atleast_2d(samples.T)
    if samples.dtype == np.uint8:
        return torch.from_numpy(samples).float() / 128 - 1, rate
    unit = 1.0 if samples.dtype.kind == "f" else -float(np.iinfo(samples.dtype).min)
    return torch.from_numpy(samples / unit).float(), rate


def letters(value: str, *, length: int) -> np.ndarray:
    """(length,) uint8, see `encode`."""
    return encode([value], length)[0]


def numbers(value: Any, *, shape: Sequence[int] | None) -> np.ndarray:
    """Float32; a missing number is NaN."""
    values = value if isinstance(value, (tuple, list)) else [value]
    sample = np.asarray(values, dtype=np.float32)
    return sample if shape is None else sample.reshape(shape)


class Codes:
    """The distinct values of a column as numbers 0, 1, ...

    A column of named classes keeps its own. In another split these may have other numbers, so names
    count.
    """

    def __init__(self, tables: Mapping[str, Table], *, column: str, key: str) -> None:
        """Number the values of one split after the other, those of each in ascending order.

        A UserError names the first value that is missing or a fraction.
        """
        self._column, self._key = column, key
        first, *_ = tables.values()
        given = getattr(first.features[column], "names", None) or ()
        self._numbers: dict[Any, int] = {n: i for i, name in enumerate(given) for n in (i, name)}
        for split, table in {} if given else tables.items():
            for value in sorted(set(self._values(table, split)) - set(self._numbers)):
                self._numbers[value] = len(self._numbers)
        self.names = tuple(given or map(str, self._numbers))

    def encode(self, table: Table, split: str) -> Tensor:
        """(N,) int64; a UserError names the first value that has no number."""
        values = self._values(table, split)
        bad = next((i for i, value in enumerate(values) if value not in self._numbers), None)
        if bad is not None:
            found = f"{split}: sample {bad} has {values[bad]!r}, which no training sample has"
            fix = "correct it, or train on samples of every class"
            raise UserError(f"{KEY}.{self._key}", found, fix)
        return torch.tensor([self._numbers[value] for value in values], dtype=torch.int64)

    def _values(self, table: Table, split: str) -> list[Any]:
        values = table[self._column][:]
        bad = next((i for i, value in enumerate(values) if not _is_name(value)), None)
        if bad is not None:
            found = f"{split}: sample {bad} has {values[bad]!r}, which names nothing"
            raise UserError(f"{KEY}.{self._key}", found, "give whole numbers or words")
        names = getattr(table.features[self._column], "names", None) or ()
        return [names[v] if v in range(len(names)) else v for v in values] if names else values


def _is_name(value: Any) -> bool:
    return isinstance(value, (str, int)) or (isinstance(value, float) and value % 1 == 0)
