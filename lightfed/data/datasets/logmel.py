"""Log-mel pictures of one-second recordings, 32 bands by 32 frames.

The constants are those of the FlexiFed author's code, which takes them from librosa: windows of
2048 samples every 512, 32 mel bands (Slaney's scale and normalisation), power in dB relative to the
loudest cell of the clip, and at most 80 dB below it.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from lightfed.data.datasets.dataset import Transform
from lightfed.data.datasets.recording import RATE

SHAPE = (1, 32, 32)
"""Channel, bands from low to high, frames."""

FORMAT = "n_fft 2048, hop 512, 32 slaney mels, 80 dB, uint8"
"""Names pictures that are kept: change it with whatever changes them."""

NORMALISE = Transform(mean=(0.5,), std=(0.25,))
"""A fixed map of [-80, 0] dB to [-2, 2]; the author's code feeds a network the dB themselves."""

BATCH = 64
"""Recordings that are transformed together; more of them leave the caches of a CPU."""

_FLOOR_DB = 80.0


def log_mel(batches: Iterable[np.ndarray]) -> Tensor:
    """The pictures of recordings, computed batch by batch, on a GPU if there is one.

    A cell is kept in one byte, 0 for -80 dB and 255 for 0 dB. The error of at most 0.16 dB is far
    below the tens of dB that tell words apart, and float16 would take twice the memory.

    Args:
        batches: (B, 16000) int16 each.

    Returns:
        (N, 1, 32, 32) uint8 on the CPU.
    """
    from torchaudio.functional import amplitude_to_DB
    from torchaudio.transforms import MelSpectrogram

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spectrogram = MelSpectrogram(
        RATE, n_fft=2048, hop_length=512, n_mels=32, norm="slaney", mel_scale="slaney"
    ).to(device)
    pictures = [torch.empty(0, *SHAPE, dtype=torch.uint8)]
    for batch in batches:
        power = spectrogram(torch.from_numpy(batch).to(device).float() / 32768)  # (B, 32, 32)
        # Without top_db: on three axes torchaudio would count it from the whole batch's loudest.
        decibel = amplitude_to_DB(power, multiplier=10.0, amin=1e-10, db_multiplier=0.0)
        decibel -= decibel.amax(dim=(1, 2), keepdim=True)
        level = (decibel / _FLOOR_DB + 1).clamp_(min=0) * 255
        pictures.append(level.round_().to(torch.uint8).unsqueeze(1).cpu())
    return torch.cat(pictures)
