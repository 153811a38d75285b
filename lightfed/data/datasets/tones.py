"""Synthetic words in place of recorded ones; every report says that they are synthetic.

A word glides from one vowel to another: two tones, the formants, modulated by the pitch of a voice.
Speakers differ in pitch and in the length of the vocal tract, which scales the formants. Clips
differ in the start, length and loudness of the word, and in noise. Everything is drawn from named
generators, so that a clip is the same on every machine.
"""

from collections.abc import Iterator

import numpy as np
import torch
from typing_extensions import override

from lightfed.data.datasets import logmel
from lightfed.data.datasets.dataset import KEY, Dataset, Samples, Split
from lightfed.data.datasets.logmel import RATE
from lightfed.utils.errors import require
from lightfed.utils.rng import numpy_generator

# First and second formant in Hz, men's means: Peterson and Barney 1952, table II.
_VOWELS = np.array(
    [[270, 390, 530, 660, 730, 570, 440, 300], [2290, 1990, 1840, 1720, 1090, 840, 1020, 870]],
    dtype=np.float32,
).T
# Word w glides from vowel w % 8 to another one, this many places later; large steps first.
_STEPS = (4, 3, 5, 2, 6, 1, 7)
_MOST_WORDS = len(_VOWELS) * len(_STEPS)
_TEST_EVERY = 5
_SHORT = RATE * 4 // 5  # samples of some clips; the official ones are not all a second long either
_NOISE = 0.01  # standard deviation; the loudest word has amplitude 1


class Tones(Dataset):
    """Synthetic words of two gliding formants, as log-mel pictures of 1x32x32; needs no files.

    Speakers are the natural owners. Every fifth speaker is used only for testing.
    """

    input_shape = logmel.SHAPE
    synthetic = True
    transform = logmel.NORMALISE

    def __init__(self, *, words: int = 10, clips: int = 2000, speakers: int = 40) -> None:
        """Generate words.

        Args:
            words: number of different words, the classes; 2 to 56.
            clips: number of training and test clips in total.
            speakers: number of speakers in total.
        """
        require(2 <= words <= _MOST_WORDS, f"{KEY}.words", words, f"give 2 to {_MOST_WORDS}")
        for name, value, least in (
            ("speakers", speakers, _TEST_EVERY),
            ("clips", clips, words * speakers),
        ):
            require(value >= least, f"{KEY}.{name}", value, f"give at least {least}")
        self.words, self.clips, self.speakers = words, clips, speakers
        self.classes = tuple(f"tone {word}" for word in range(words))

    @override
    def load(self, split: Split) -> Samples:
        chosen = np.flatnonzero(self.tested() == (split == "test"))
        return Samples(
            x=torch.from_numpy(np.concatenate(list(logmel.log_mel(self._batches(chosen))))),
            y=torch.from_numpy(self.word()[chosen]),
            groups=torch.from_numpy(self.speaker()[chosen]),
        )

    def word(self) -> np.ndarray:
        """(clips,) int64: each speaker says all words before the next one does."""
        return np.arange(self.clips) % self.words

    def speaker(self) -> np.ndarray:
        """(clips,) int64."""
        return np.arange(self.clips) // self.words % self.speakers

    def tested(self) -> np.ndarray:
        """(clips,) bool: whether the speaker is a test speaker."""
        return self.speaker() % _TEST_EVERY == _TEST_EVERY - 1

    def recordings(self, clips: np.ndarray) -> Iterator[np.ndarray]:
        """The recordings of some clips, (n,) int16 each; n is 16000, or 12800 for one in five."""
        words, speakers = self.word()[clips].tolist(), self.speaker()[clips].tolist()
        for clip, word, speaker in zip(clips.tolist(), words, speakers, strict=True):
            yield _record(clip, word, speaker)

    def _batches(self, clips: np.ndarray) -> Iterator[np.ndarray]:
        """Recordings, (B, 16000) int16, padded with zeros."""
        for start in range(0, len(clips), logmel.BATCH):
            part = self.recordings(clips[start : start + logmel.BATCH])
            yield np.stack([np.pad(recording, (0, RATE - len(recording))) for recording in part])


def _record(clip: int, word: int, speaker: int) -> np.ndarray:
    """(n,) int16: one utterance, which ends within 0.8 s."""
    person = numpy_generator(0, "tones/speaker", client=speaker)
    pitch, tract = person.uniform(90, 240), person.normal(1.0, 0.07)
    rng = numpy_generator(0, "tones/clip", client=clip)
    begin, seconds, loudness = rng.uniform((0.05, 0.35, 0.2), (0.3, 0.5, 1.0))
    first, step = word % len(_VOWELS), _STEPS[word // len(_VOWELS)]
    ends = _VOWELS[[first, (first + step) % len(_VOWELS)]] * tract * rng.normal(1.0, 0.02, (2, 2))

    time = np.arange(int(seconds * RATE), dtype=np.float32) / RATE
    place = time / time[-1]
    # The phase is the integral of a frequency that changes linearly.
    cycles = ends[0, :, None] * time + (ends[1] - ends[0])[:, None] * time * place / 2  # (2, n)
    formants = np.sin(2 * np.pi * cycles)
    voice = 1 + 0.8 * np.sin(2 * np.pi * pitch * time)
    sound = np.sin(np.pi * place) ** 2 * voice * (formants[0] + 0.5 * formants[1])

    recording = rng.normal(0.0, _NOISE, RATE if rng.random() < 0.8 else _SHORT)
    start = int(begin * RATE)
    recording[start : start + len(sound)] += loudness * sound / 2.7  # at most 1.8 * 1.5
    return (recording.clip(-1, 1) * 32767).astype(np.int16)
