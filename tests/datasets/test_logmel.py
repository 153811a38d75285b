"""The pictures against librosa's formulas, written out with numpy in float64."""

from collections.abc import Iterable

import numpy as np
import torch

from lightfed.datasets.speech import RATE, SHAPE, log_mel
from tests.datasets.audio import needs_torchaudio

pytestmark = needs_torchaudio


def hz_of_mel(mel: np.ndarray) -> np.ndarray:
    """Slaney's scale: linear to 1 kHz = 15 mel, then 27 mel for a factor of 6.4."""
    return np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))


def decibel(clip: np.ndarray) -> np.ndarray:
    """(16000,) -> (32, 32) dB below the loudest cell, at most 80."""
    padded = np.pad(clip / 32768, 1024, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(2048) / 2048)
    frames = np.stack([padded[512 * i : 512 * i + 2048] * window for i in range(32)])
    power = np.abs(np.fft.rfft(frames)) ** 2  # (32, 1025)
    top = 15 + 27 * np.log(8.0) / np.log(6.4)  # of 8 kHz
    edges = hz_of_mel(np.linspace(0, top, 34))
    hz = np.arange(1025) * RATE / 2048
    rising = (hz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hz) / (edges[2:] - edges[1:-1])[:, None]
    bands = np.minimum(rising, falling).clip(0) * 2 / (edges[2:] - edges[:-2])[:, None]
    level = 10 * np.log10(np.maximum(bands @ power.T, 1e-10))
    return np.maximum(level - level.max(), -80)


def clips() -> np.ndarray:
    """(7, 16000) int16: noise, a tone, a click, a fading noise, a glide, a hum, a faint click."""
    rng, t = np.random.default_rng(0), np.arange(RATE) / RATE
    noise = rng.standard_normal(RATE)
    click = np.zeros(RATE)
    click[5000] = 30_000
    glide = np.sin(2 * np.pi * (300 * t + 900 * t**2)) * np.sin(np.pi * t) ** 2
    rows = [
        noise * 3000,
        np.sin(2 * np.pi * 1000 * t) * 10_000,
        click,
        noise * 8000 * 10 ** (-5 * t),
        glide * 9000 + noise * 30,
        np.sign(np.sin(2 * np.pi * 440 * t)) * 32767,
        click / 30_000,  # its power is little above 1e-10, the least that counts
    ]
    return np.clip(np.stack(rows), -32768, 32767).astype(np.int16)


def pictures_of(recordings: Iterable[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(log_mel(recordings))


def test_pictures_are_those_of_librosas_formulas() -> None:
    pictures = pictures_of(clips())
    assert pictures.shape == (7, *SHAPE)
    assert pictures.dtype == torch.uint8
    for picture, clip in zip(pictures, clips(), strict=True):
        exact = (decibel(clip) + 80) * 255 / 80
        # half a step of rounding; float32 adds its own where the power is next to nothing
        assert np.abs(picture[0].numpy() - exact).max() < 0.55


def test_a_picture_does_not_depend_on_other_clips() -> None:
    quiet = (clips()[4] // 300).astype(np.int16)
    alone = pictures_of(quiet[None])
    together = pictures_of(np.stack([clips()[5], quiet]))[1:]
    assert (alone.int() - together.int()).abs().max() <= 1
    assert alone.float().std() > 10


def test_a_short_recording_ends_in_zeros() -> None:
    short = clips()[0, :6000]
    assert torch.equal(pictures_of([short]), pictures_of([np.pad(short, (0, RATE - 6000))]))


def test_digital_silence_is_even() -> None:
    assert (pictures_of(np.zeros((1, RATE), dtype=np.int16)) == 255).all()
