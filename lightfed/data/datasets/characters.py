"""Text as characters: the alphabet of CharCNN, and how texts become rows of small numbers."""

from collections.abc import Sequence

import numpy as np

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789-,;.!?:'\"/\\|_@#$%^&*~`+-=<>()[]{}\n"
"""As printed by Zhang et al. 2015: 70 letters, of which the hyphen is there twice."""


def _table() -> np.ndarray:
    """(256,) uint8: of a code point the number of its letter, counted from 1; 0 if it is none."""
    table = np.zeros(256, dtype=np.uint8)
    for number, letter in reversed(list(enumerate(ALPHABET, start=1))):  # a first hyphen counts
        table[ord(letter)] = number
    return table


_TABLE = _table()


def encode(texts: Sequence[str], length: int) -> np.ndarray:
    """The first characters of texts, in lower case, as numbers of letters.

    Args:
        texts: any.
        length: characters that are kept of each.

    Returns:
        (N, length) uint8: 1..70, and 0 behind the end of a text or for a character that is none of
        the alphabet.
    """
    kept = [text[:length].lower()[:length] for text in texts]  # some grow in lower case
    sizes = np.fromiter(map(len, kept), dtype=np.int64, count=len(kept))
    points = np.frombuffer("".join(kept).encode("utf-32-le", "surrogatepass"), dtype="<u4")
    codes = np.zeros((len(kept), length), dtype=np.uint8)
    codes[np.arange(length) < sizes[:, None]] = _TABLE[np.minimum(points, 255)]
    return codes
