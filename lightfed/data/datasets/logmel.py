"""One-second recordings, and their log-mel pictures of 32 bands by 32 frames.

The constants are those of the FlexiFed author's code, which takes them from librosa: windows of
2048 samples every 512, 32 mel bands (Slaney's scale and normalisation), power in dB relative to the
loudest cell of the clip, and at most 80 dB below it.
"""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from lightfed.data.datasets.dataset import Transform, unreadable

RATE = 16_000
"""Samples per second, hence of a clip."""

SHAPE = (1, 32, 32)
"""Channel, bands from low to high, frames."""

FORMAT = "n_fft 2048, hop 512, 32 slaney mels, 80 dB, uint8"
"""Part of the key of cached pictures; it must change whenever they do."""

NORMALISE = Transform(mean=(0.5,), std=(0.25,))
"""Maps [-80, 0] dB to [-2, 2]; the author's code feeds dB to the network."""

BATCH = 64
"""Recordings transformed at once; more do not fit in the caches of a CPU."""

_FLOOR_DB = 80.0


def read_recording(path: Path) -> np.ndarray:
    """A whole recording, (n,) int16, mapped from its file.

    torchaudio 2.11 can only decode with torchcodec, which needs the shared libraries of FFmpeg. A
    UserError if the file is missing, damaged or not PCM16 mono at 16 kHz.
    """
    from scipy.io import wavfile

    try:
        # A truncated file is an error if it is mapped, and only a warning if it is read.
        rate, samples = wavfile.read(path, mmap=True)
        if (rate, samples.dtype, samples.ndim) != (RATE, np.int16, 1):
            raise ValueError(f"{samples.dtype} samples of shape {samples.shape} at {rate} Hz")
    except (OSError, ValueError, struct.error) as error:
        fix = "every wav has to be PCM16 mono at 16 kHz, as the official ones are"
        raise unreadable(path, error, fix=fix) from error
    return samples


def read_clip(path: Path, *, start: int = 0) -> np.ndarray:
    """A second of a recording from `start`: (16000,) int16; errors as of `read_recording`."""
    samples = read_recording(path)[start : start + RATE]
    return np.pad(samples, (0, RATE - len(samples)))


def log_mel(batches: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The pictures of recordings, computed batch by batch, on a GPU if there is one.

    A cell is one byte: 0 for -80 dB, 255 for 0 dB. The error of at most 0.16 dB is far below the
    tens of dB that distinguish words, and float16 would take twice the memory. From (B, n) levels
    of -32768 to 32767 each it yields (B, 1, 32, 1 + n // 512) uint8.
    """
    from torchaudio.functional import amplitude_to_DB
    from torchaudio.transforms import MelSpectrogram

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spectrogram = MelSpectrogram(
        RATE, n_fft=2048, hop_length=512, n_mels=32, norm="slaney", mel_scale="slaney"
    ).to(device)
    for batch in batches:
        power = spectrogram(torch.from_numpy(batch).to(device).float() / 32768)  # (B, 32, 32)
        # No top_db: with three axes, torchaudio would apply it relative to the whole batch.
        decibel = amplitude_to_DB(power, multiplier=10.0, amin=1e-10, db_multiplier=0.0)
        decibel -= decibel.amax(dim=(1, 2), keepdim=True)
        level = (decibel / _FLOOR_DB + 1).clamp_(min=0) * 255
        yield level.round_().to(torch.uint8).unsqueeze(1).cpu().numpy()
