"""Recordings as Speech Commands keeps them, PCM16 mono at 16 kHz, by the standard library's `wave`.

torchaudio 2.11 decodes with torchcodec alone, which needs the shared libraries of FFmpeg.
"""

import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lightfed.utils.errors import UserError

RATE = 16_000
"""Samples of a second, hence of a clip."""


def read_clip(path: Path, *, start: int = 0) -> np.ndarray:
    """One second of a recording.

    Args:
        path: of the wav file.
        start: the sample of the recording that the second begins with.

    Returns:
        (16000,) int16; zeros follow where the recording ends earlier.

    Raises:
        UserError: the file is not there, is damaged, or is not PCM16 mono at 16 kHz.
    """
    clip = np.zeros(RATE, dtype=np.int16)
    with _opened(path) as file:
        file.setpos(start)
        wanted = min(RATE, file.getnframes() - start)
        data = file.readframes(wanted)
    if len(data) != 2 * wanted:
        raise _refusal(path, "is cut short")
    clip[:wanted] = np.frombuffer(data, dtype="<i2")
    return clip


def count_samples(path: Path) -> int:
    """Samples of a whole recording.

    Raises:
        UserError: as of `read_clip`.
    """
    with _opened(path) as file:
        return file.getnframes()


def write_recording(path: Path, samples: np.ndarray) -> None:
    """Write (n,) int16 samples."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.astype("<i2").tobytes())


@contextmanager
def _opened(path: Path) -> Iterator[wave.Wave_read]:
    try:
        with wave.open(str(path), "rb") as file:
            bits, channels = 8 * file.getsampwidth(), file.getnchannels()
            if (bits, channels, file.getframerate()) != (16, 1, RATE):
                found = f"is PCM{bits} of {channels} channels at {file.getframerate()} Hz"
                raise _refusal(path, found)
            yield file
    except OSError as error:
        raise _refusal(path, f"cannot be read ({error.strerror})") from error
    except (wave.Error, EOFError) as error:
        reason = str(error) or "its header is cut short"
        raise _refusal(path, f"is not such a file ({reason})") from error


def _refusal(path: Path, found: str) -> UserError:
    return UserError(
        "data.dataset.init_args.root",
        f"{path} {found}",
        "every wav has to be PCM16 mono at 16 kHz, as the official ones are",
    )
