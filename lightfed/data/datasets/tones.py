"""Synthetic words for the path of spoken ones: nobody said them, and whatever uses them says so.

A word glides from one vowel to another: the two formants of each, as tones that a voice's pitch
modulates. Speakers differ in pitch and in the length of the vocal tract, which scales the formants;
clips in where the word begins, how long it takes, how loud it is, and in noise. All of it is drawn
from named generators, so that a clip is the same wherever it is made.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from lightfed.data.datasets import logmel
from lightfed.data.datasets.dataset import Dataset, Samples, Split
from lightfed.data.datasets.recording import RATE, write_recording
from lightfed.utils.errors import UserError
from lightfed.utils.rng import derive_seed, numpy_generator

SYNTHETIC = "SYNTHETIC.txt"
"""A file beside the words of a tree that is not real; see `write_tones`."""

# First and second formant in Hz, men's means: Peterson and Barney 1952, table II.
_VOWELS = np.array(
    [
        (270, 2290),
        (390, 1990),
        (530, 1840),
        (660, 1720),
        (730, 1090),
        (570, 840),
        (440, 1020),
        (300, 870),
    ],
    dtype=np.float32,
)
# Word w goes from vowel w % 8 to the one this many further on: large steps first.
_STEPS = (4, 3, 5, 2, 6, 1, 7)
_MOST_WORDS = len(_VOWELS) * len(_STEPS)
_TEST_EVERY = 5
_SHORT = RATE * 4 // 5  # samples of some clips; the official ones are not all a second long either
_NOISE = 0.01  # standard deviation; the loudest word has amplitude 1


class Tones(Dataset):
    """Synthetic words of two gliding formants, as log-mel pictures of 1x32x32; made, not read.

    Speakers are the natural owners. Every fifth speaker is a test speaker, heard by no client.
    """

    input_shape = logmel.SHAPE
    synthetic = True
    transform = logmel.NORMALISE

    def __init__(self, *, words: int = 10, clips: int = 2000, speakers: int = 40) -> None:
        """Say how many there are.

        Args:
            words: different ones, the classes; 2 to 56.
            clips: of all words and speakers together, training and test.
            speakers: of all clips; every fifth is a test speaker.
        """
        self._check("words", words, least=2, most=_MOST_WORDS)
        self._check("speakers", speakers, least=_TEST_EVERY, most=None)
        self._check("clips", clips, least=words * speakers, most=None)
        self.words, self.clips, self.speakers = words, clips, speakers
        self.classes = tuple(f"tone {word}" for word in range(words))

    @staticmethod
    def _check(name: str, value: int, *, least: int, most: int | None) -> None:
        if value < least or (most is not None and value > most):
            reach = f"at least {least}" if most is None else f"{least} to {most}"
            raise UserError(f"data.dataset.init_args.{name}", f"{value}", f"give {reach}")

    @override
    def load(self, split: Split) -> Samples:
        chosen = np.flatnonzero(self.tested() == (split == "test"))
        return Samples(
            x=logmel.log_mel(self._batches(chosen)),
            y=torch.from_numpy(self.word()[chosen]),
            groups=torch.from_numpy(self.speaker()[chosen]),
        )

    def word(self) -> np.ndarray:
        """(clips,) int64: a speaker says all words, then the next one does, and so on."""
        return np.arange(self.clips) % self.words

    def speaker(self) -> np.ndarray:
        """(clips,) int64."""
        return np.arange(self.clips) // self.words % self.speakers

    def tested(self) -> np.ndarray:
        """(clips,) bool: whether the speaker is a test speaker."""
        return self.speaker() % _TEST_EVERY == _TEST_EVERY - 1

    def recordings(self, clips: np.ndarray) -> Iterator[np.ndarray]:
        """Some of the clips: (n,) int16 each, n being 16000 or, of one in five, 12800."""
        words, speakers = self.word()[clips].tolist(), self.speaker()[clips].tolist()
        for clip, word, speaker in zip(clips.tolist(), words, speakers, strict=True):
            yield _record(clip, word, speaker)

    def _batches(self, clips: np.ndarray) -> Iterator[np.ndarray]:
        """(B, 16000) int16: the recordings, filled up with zeros."""
        for start in range(0, len(clips), logmel.BATCH):
            part = clips[start : start + logmel.BATCH]
            batch = np.zeros((len(part), RATE), dtype=np.int16)
            for row, recording in zip(batch, self.recordings(part), strict=True):
                row[: len(recording)] = recording
            yield batch


def write_tones(root: Path, tones: Tones, *, words: Sequence[str], version: str = "v0.01") -> None:
    """Write the clips as ROOT/SpeechCommands/speech_commands_VERSION, in the official layout.

    The test speakers are in testing_list.txt, the first speaker in validation_list.txt, and two
    recordings of noise in _background_noise_. A file says that the tree is synthetic, and the data
    set that reads it says so too.

    Args:
        root: the folder of the tree.
        tones: what to write.
        words: the names of the folders, one for each word.
        version: of Speech Commands whose place the tree takes.
    """
    folder = root / "SpeechCommands" / f"speech_commands_{version}"
    noises = folder / "_background_noise_"
    for new in (noises, *(folder / word for word in words)):
        new.mkdir(parents=True)
    (folder / SYNTHETIC).write_text("Synthetic tones, not speech; written by lightfed.\n")
    paths = []
    for clip, speaker in enumerate(tones.speaker().tolist()):
        name = f"{derive_seed(0, 'tones/name', client=speaker) & 0xFFFFFFFF:08x}"
        utterance = clip // (tones.words * tones.speakers)
        paths.append(f"{words[clip % tones.words]}/{name}_nohash_{utterance}.wav")
    for path, recording in zip(paths, tones.recordings(np.arange(tones.clips)), strict=True):
        write_recording(folder / path, recording)
    _write_list(folder / "testing_list.txt", paths, tones.tested())
    _write_list(folder / "validation_list.txt", paths, tones.speaker() == 0)
    for colour, steps in (("white", 1), ("brown", 200)):
        noise = numpy_generator(0, f"tones/{colour}").normal(0, 2000, 15 * RATE)
        smooth = np.convolve(noise, np.ones(steps) / steps**0.5, mode="same")
        write_recording(noises / f"{colour}_noise.wav", smooth.astype(np.int16))


def _write_list(path: Path, clips: list[str], listed: np.ndarray) -> None:
    path.write_text("".join(f"{clips[i]}\n" for i in np.flatnonzero(listed)))


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
