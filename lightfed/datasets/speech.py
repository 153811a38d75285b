"""Single words: recorded (Speech Commands: Warden 2018, arXiv:1804.03209), and synthetic tones.

Pictures, classes and the share of silence of Speech Commands are those of the FlexiFed author's
code, which differs in three points. Its silence is zeros, and each background recording as one
clip; here it is random seconds of the background recordings. It varies amplitude, tempo and
position of training clips at random. It does not say which clips are for testing; here the official
list does.
"""

import struct
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightfed.data.dataset import (
    KEY,
    Dataset,
    Samples,
    Split,
    Transform,
    missing,
    unreadable,
)
from lightfed.utils.cache import cached
from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.rng import numpy_generator

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
_COMMANDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
_UNKNOWN, _SILENCE = len(_COMMANDS), len(_COMMANDS) + 1
_WORDS_V1 = """
bed bird cat dog down eight five four go happy house left marvin nine no off on one right seven
sheila six stop three tree two up wow yes zero
"""
_WORDS_V2 = _WORDS_V1 + "backward follow forward learn visual"
_WORDS = {"v0.01": tuple(_WORDS_V1.split()), "v0.02": tuple(sorted(_WORDS_V2.split()))}
_SUBSETS = {"train": "training", "test": "testing"}
_BACKGROUND = "_background_noise_"
_UNPACK = "unpack the official archive there again"
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


class _Clip(NamedTuple):
    """One second of a recording."""

    path: str  # of the wav file, relative to the folder of the words
    start: int  # first sample
    label: int
    speaker: str


class SpeechCommands(Dataset):
    """Single words as log-mel pictures of 1x32x32; 65,000 clips (v0.01) or 106,000 (v0.02).

    From ROOT/SpeechCommands/speech_commands_VERSION/WORD/SPEAKER_nohash_N.wav. Clips in
    testing_list.txt are for testing, and those in neither that list nor validation_list.txt for
    training, so that no speaker is in both. Speakers are the natural owners of the clips. The
    pictures are computed once and kept in the cache folder.
    """

    input_shape = SHAPE
    transform = NORMALISE
    keeps = True

    def __init__(
        self,
        root: str,
        *,
        version: Literal["v0.01", "v0.02"] = "v0.01",
        protocol: Literal["commands", "words"] = "commands",
    ) -> None:
        """Read Speech Commands; nothing is fetched.

        Args:
            root: the folder that holds SpeechCommands/speech_commands_VERSION.
            version: the FlexiFed experiments use v0.01.
            protocol: "commands" has 12 classes: yes, no, up, down, left, right, on, off, stop, go,
                `unknown` for all other words, and `silence`, one for every ten clips; "words" has
                a class per word, 30 in v0.01, 35 in v0.02.
        """
        self.root = Path(root).expanduser()
        self.version, self.protocol = version, protocol
        self._folder = self.root / "SpeechCommands" / f"speech_commands_{version}"
        commands = (*_COMMANDS, "unknown", "silence")
        self.classes = commands if protocol == "commands" else _WORDS[version]

    @override
    def load(self, split: Split) -> Samples:
        if not self._folder.is_dir():
            raise missing(self._folder, holds=f"SpeechCommands/{self._folder.name}/WORD/*.wav")
        try:
            clips = self._spoken(split)
            if self.protocol == "commands":
                clips += self._silence(split, clips)
            trained = clips if split == "train" else self._spoken("train")
            pictures = self._pictures(clips)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise unreadable(self._folder, error, fix=_UNPACK) from error
        speakers = sorted({clip.speaker for clip in trained})
        # Test speakers have numbers of their own.
        speakers += sorted({clip.speaker for clip in clips} - {*speakers})
        numbers = {speaker: number for number, speaker in enumerate(speakers)}
        return Samples(
            x=pictures,
            y=torch.tensor([clip.label for clip in clips]),
            groups=torch.tensor([numbers[clip.speaker] for clip in clips]),
        )

    def _spoken(self, split: Split) -> list[_Clip]:
        """The clips of a split, in the order of torchaudio."""
        kind = _torchaudio("datasets").SPEECHCOMMANDS
        name = self._folder.name
        reader: Any = kind(self.root, url=name, subset=_SUBSETS[split])
        found = [reader.get_metadata(i) for i in range(len(reader))]
        strange = {word for _, _, word, _, _ in found} - {*_WORDS[self.version]}
        what = f"{self._folder} holds {', '.join(sorted(strange))}, which {self.version} has not"
        require(not strange, f"{KEY}.root", what, "set version to that of the files")
        labels = {word: label for label, word in enumerate(self.classes)}
        return [
            _Clip(str(Path(path).relative_to(name)), 0, labels.get(word, _UNKNOWN), speaker)
            for path, _, word, speaker, _ in found
        ]

    def _silence(self, split: Split, spoken: list[_Clip]) -> list[_Clip]:
        """One second of background for every ten clips, drawn with a constant seed.

        The last tenth of each recording is for testing. Each second belongs to the speaker of a
        random clip, so that the natural split deals silence in proportion to the clips.
        """
        backgrounds = []  # paths, and the first samples that a second of the split can have
        for path in sorted((self._folder / _BACKGROUND).glob("*.wav")):
            samples = len(read_recording(path))
            border = samples * 9 // 10
            first, end = (0, border) if split == "train" else (border, samples)
            starts = range(first, max(first, end - RATE + 1))
            backgrounds.append((f"{_BACKGROUND}/{path.name}", starts))
        rng = numpy_generator(0, f"speech/silence/{split}")
        owners = rng.permutation(len(spoken))[: len(spoken) // 10]
        sizes = np.array([len(starts) for _, starts in backgrounds] or [0])
        found = f"{self._folder / _BACKGROUND} holds no recording of ten seconds"
        require(sizes.sum() > 0, f"{KEY}.root", found, _UNPACK)
        chosen = rng.choice(len(backgrounds), size=len(owners), p=sizes / sizes.sum())
        clips = []
        for owner, background in zip(owners, chosen, strict=True):
            name, starts = backgrounds[background]
            start = starts[int(rng.integers(len(starts)))]
            clips.append(_Clip(name, start, _SILENCE, spoken[owner].speaker))
        return clips

    def _pictures(self, clips: list[_Clip]) -> Tensor:
        """(N, 1, 32, 32) uint8, from the cache unless the folders have changed since."""

        def make() -> np.ndarray:
            recordings = ((read_recording(self._folder / c.path), c.start) for c in clips)
            return log_mel(samples[start : start + RATE] for samples, start in recordings)

        folders = sorted(path for path in self._folder.iterdir() if path.is_dir())
        times = [path.stat().st_mtime_ns for path in folders]
        key = [FORMAT, str(self._folder), [clip[:2] for clip in clips], times]
        return torch.from_numpy(cached(key, make))


class Tones(Dataset):
    """Synthetic words of two gliding formants, as log-mel pictures of 1x32x32; needs no files.

    A word glides from one vowel to another: two tones, the formants, modulated by the pitch of a
    voice. Speakers differ in pitch and in the length of the vocal tract, which scales the formants.
    Clips differ in the start, length and loudness of the word, and in noise. Everything is drawn
    from named generators, so that a clip is the same on every machine. Speakers are the natural
    owners. Every fifth speaker is used only for testing.

    Attributes:
        word: (clips,) int64, of each clip; a speaker says all words before the next one does.
        speaker: (clips,) int64.
    """

    input_shape = SHAPE
    synthetic = True
    transform = NORMALISE

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
        self.word = np.arange(clips) % words
        self.speaker = np.arange(clips) // words % speakers
        self.classes = tuple(f"tone {word}" for word in range(words))

    @override
    def load(self, split: Split) -> Samples:
        tested = self.speaker % _TEST_EVERY == _TEST_EVERY - 1
        chosen = np.flatnonzero(tested == (split == "test"))
        return Samples(
            x=torch.from_numpy(log_mel(self.recordings(chosen))),
            y=torch.from_numpy(self.word[chosen]),
            groups=torch.from_numpy(self.speaker[chosen]),
        )

    def recordings(self, clips: np.ndarray) -> Iterator[np.ndarray]:
        """The recordings of some clips, (n,) int16 each; n is 16000, or 12800 for one in five."""
        for clip in clips.tolist():
            yield _record(clip, int(self.word[clip]), int(self.speaker[clip]))


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


def _torchaudio(part: str) -> Any:
    """A module of torchaudio, imported here alone: it may refuse the torch that is installed.

    Its last version, 2.11.0, does so beside a torch of another CUDA, as 2.15 is.
    """
    try:
        return import_module(f"torchaudio.{part}")
    except Exception as error:  # ImportError, OSError or RuntimeError, by how it finds out
        found = f"torchaudio cannot be imported beside torch {torch.__version__} ({reason(error)})"
        fix = "speech data need it: install a torch that it takes, from 2.11 to 2.14"
        raise UserError("data.dataset", found, fix) from error


def read_recording(path: Path) -> np.ndarray:
    """A whole recording, (n,) int16, mapped from its file.

    Not by torchaudio 2.11, which can only decode with the shared libraries of FFmpeg. An OSError or
    a ValueError if the file is missing, damaged or not PCM16 mono at 16 kHz.
    """
    from scipy.io import wavfile

    try:
        # A truncated file is an error if it is mapped, and only a warning if it is read.
        rate, samples = wavfile.read(path, mmap=True)
        if (rate, samples.dtype, samples.ndim) != (RATE, np.int16, 1):
            raise ValueError(f"{samples.dtype} samples of shape {samples.shape} at {rate} Hz")
    except (ValueError, struct.error) as error:
        raise ValueError(f"{path} is not PCM16 mono at 16 kHz: {error}") from error
    return samples


def log_mel(recordings: Iterable[np.ndarray]) -> np.ndarray:
    """The pictures of recordings, computed batch by batch, on a GPU if there is one.

    A cell is one byte: 0 for -80 dB, 255 for 0 dB. The error of at most 0.16 dB is far below the
    tens of dB that distinguish words, and float16 would take twice the memory. A recording is (n,)
    levels of -32768 to 32767, of a second or less, and then zeros. Returns (N, 1, 32, 32) uint8.
    """
    to_decibel = _torchaudio("functional").amplitude_to_DB
    mel_spectrogram = _torchaudio("transforms").MelSpectrogram

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spectrogram = mel_spectrogram(
        RATE, n_fft=2048, hop_length=512, n_mels=32, norm="slaney", mel_scale="slaney"
    ).to(device)
    seconds = (np.pad(samples, (0, RATE - len(samples))) for samples in recordings)
    pictures = []
    while batch := list(islice(seconds, BATCH)):
        levels = torch.from_numpy(np.stack(batch)).to(device).float()
        power = spectrogram(levels / 32768)  # (B, 32, 32)
        # No top_db: with three axes, torchaudio would apply it relative to the whole batch.
        decibel = to_decibel(power, multiplier=10.0, amin=1e-10, db_multiplier=0.0)
        decibel -= decibel.amax(dim=(1, 2), keepdim=True)
        level = (decibel / _FLOOR_DB + 1).clamp_(min=0) * 255
        pictures.append(level.round_().to(torch.uint8).unsqueeze(1).cpu().numpy())
    return np.concatenate(pictures)
