"""Recordings as Speech Commands keeps them, PCM16 mono at 16 kHz, by scipy.

torchaudio 2.11 decodes with torchcodec alone, which needs the shared libraries of FFmpeg.
"""

import struct
from pathlib import Path

import numpy as np

from lightfed.data.datasets.refusals import unreadable

RATE = 16_000
"""Samples of a second, hence of a clip."""


def read_recording(path: Path) -> np.ndarray:
    """(n,) int16: a whole recording, mapped from its file.

    Raises:
        UserError: the file is not there, is damaged, or is not PCM16 mono at 16 kHz.
    """
    from scipy.io import wavfile

    try:
        # Mapped, a file that lost its end is an error; read, it would only be a warning.
        rate, samples = wavfile.read(path, mmap=True)
        if (rate, samples.dtype, samples.ndim) != (RATE, np.int16, 1):
            raise ValueError(f"{samples.dtype} samples of shape {samples.shape} at {rate} Hz")
    except (OSError, ValueError, struct.error) as error:
        fix = "every wav has to be PCM16 mono at 16 kHz, as the official ones are"
        raise unreadable(path, error, fix=fix) from error
    return samples


def read_clip(path: Path, *, start: int = 0) -> np.ndarray:
    """One second of a recording.

    Args:
        path: of the wav file.
        start: the sample of the recording that the second begins with.

    Returns:
        (16000,) int16; zeros follow where the recording ends earlier.

    Raises:
        UserError: as of `read_recording`.
    """
    samples = read_recording(path)[start : start + RATE]
    return np.pad(samples, (0, RATE - len(samples)))


def write_recording(path: Path, samples: np.ndarray) -> None:
    """Write (n,) int16 samples."""
    from scipy.io import wavfile

    wavfile.write(path, RATE, samples)
