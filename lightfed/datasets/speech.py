"""Single words: recorded (Speech Commands: Warden 2018, arXiv:1804.03209), and synthetic tones.

Pictures, classes and the share of silence of Speech Commands are those of the FlexiFed author's
code. There are three deviations. Its silence is zeros, and each background recording as one clip;
here it is random seconds of the background recordings. It varies amplitude, tempo and position of
training clips at random, and this does not. It does not say which clips are for testing; here the
official list does.
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
from lightfed.utils.errors import UserError, reason
from lightfed.utils.rng import numpy_generator

RATE = 16_000
"""Samples per second, and so of a clip."""

SHAPE = (1, 32, 32)
"""Channel, bands from low to high, frames."""

FORMAT = "n_fft 2048, hop 512, 32 slaney mels, 80 dB, uint8"
"""Part of the key of cached pictures; it must change whenever they do."""

NORMALISE = Transform(mean=(0.5,), std=(0.25,))
"""Maps [-80, 0] dB to [-2, 2]; the author's code feeds dB to the network."""

BATCH = 64
"""Recordings that are transformed at once; more do not fit in the caches of a CPU."""

# The quietest level of a picture is this far below the loudest.
_FLOOR_DB = 80.0

# The words of the protocol "commands", and the labels of its two other classes.
_COMMANDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
_UNKNOWN = len(_COMMANDS)
_SILENCE = len(_COMMANDS) + 1

_WORDS_V1 = """
bed bird cat dog down eight five four go happy house left marvin nine no off on one right seven
sheila six stop three tree two up wow yes zero
"""
_WORDS_V2 = _WORDS_V1 + "backward follow forward learn visual"
_WORDS = {"v0.01": tuple(_WORDS_V1.split()), "v0.02": tuple(sorted(_WORDS_V2.split()))}
_SUBSETS = {"train": "training", "test": "testing"}
_BACKGROUND = "_background_noise_"
_UNPACK = "unpack the official archive there again"

# First and second formant of vowels in Hz, means of men: Peterson and Barney 1952, table II.
_VOWELS = np.array(
    [[270, 390, 530, 660, 730, 570, 440, 300], [2290, 1990, 1840, 1720, 1090, 840, 1020, 870]],
    dtype=np.float32,
).T

# Word w glides from vowel w % 8 to the one that is this many positions later; large steps first.
_STEPS = (4, 3, 5, 2, 6, 1, 7)
_MOST_WORDS = len(_VOWELS) * len(_STEPS)

# Of so many speakers, the last one is for testing.
_TEST_EVERY = 5

# Samples of some clips of tones: the official clips are not all a second long either.
_SHORT = RATE * 4 // 5

# Standard deviation of the noise in tones; the loudest word has amplitude 1.
_NOISE = 0.01


class _Clip(NamedTuple):
    """One second of a recording.

    Attributes:
        path: The wav file, relative to the folder of the words.
        start: The first sample.
        label: The class.
        speaker: The name of the speaker.
    """

    path: str
    start: int
    label: int
    speaker: str


class SpeechCommands(Dataset):
    """Single words as log-mel pictures of 1x32x32; 65,000 clips (v0.01) or 106,000 (v0.02).

    The files are ROOT/SpeechCommands/speech_commands_VERSION/WORD/SPEAKER_nohash_N.wav. Clips in
    testing_list.txt are for testing. Those in neither that list nor validation_list.txt are for
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
            root: The folder that holds SpeechCommands/speech_commands_VERSION.
            version: The version of the data set. The FlexiFed experiments use v0.01.
            protocol: "commands" has 12 classes: yes, no, up, down, left, right, on, off, stop, go,
                `unknown` for all other words, and `silence`, one for every ten clips. "words" has
                a class per word, 30 in v0.01, 35 in v0.02.
        """
        self.root = Path(root).expanduser()
        self.version = version
        self.protocol = protocol
        self._folder = self.root / "SpeechCommands" / f"speech_commands_{version}"
        if protocol == "commands":
            self.classes = (*_COMMANDS, "unknown", "silence")
        else:
            self.classes = _WORDS[version]

    @override
    def load(self, split: Split) -> Samples:
        if not self._folder.is_dir():
            raise missing(self._folder, holds=f"SpeechCommands/{self._folder.name}/WORD/*.wav")
        try:
            clips = self._spoken(split)
            if self.protocol == "commands":
                clips += self._silence(split, clips)
            train_clips = clips if split == "train" else self._spoken("train")
            pictures = self._pictures(clips)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise unreadable(self._folder, error, fix=_UNPACK) from error

        # Speakers of the training split have the first numbers, so that those of a test split
        # without a training clip have others.
        train_speakers = {clip.speaker for clip in train_clips}
        other_speakers = {clip.speaker for clip in clips} - train_speakers
        all_speakers = sorted(train_speakers) + sorted(other_speakers)
        number_of = {speaker: number for number, speaker in enumerate(all_speakers)}
        return Samples(
            x=pictures,
            y=torch.tensor([clip.label for clip in clips]),
            groups=torch.tensor([number_of[clip.speaker] for clip in clips]),
            owners=tuple(all_speakers),
        )

    def _spoken(self, split: Split) -> list[_Clip]:
        """Return the clips of words of a split, in the order of torchaudio."""
        name = self._folder.name
        reader: Any = _torchaudio("datasets").SPEECHCOMMANDS(
            self.root, url=name, subset=_SUBSETS[split]
        )
        label_of = {word: label for label, word in enumerate(self.classes)}

        clips = []
        words = set()
        for position in range(len(reader)):
            path, _, word, speaker, _ = reader.get_metadata(position)
            words.add(word)
            label = label_of.get(word, _UNKNOWN)
            clips.append(_Clip(str(Path(path).relative_to(name)), 0, label, speaker))

        unknown_words = words - set(_WORDS[self.version])
        if unknown_words:
            listed = ", ".join(sorted(unknown_words))
            raise UserError(
                key=f"{KEY}.root",
                found=f"{self._folder} holds {listed}, which {self.version} does not have",
                fix="set version to the version of the files",
            )
        return clips

    def _silence(self, split: Split, spoken: list[_Clip]) -> list[_Clip]:
        """Return one second of background for every ten clips, drawn with a constant seed.

        The last tenth of each recording is for testing. Each second belongs to the speaker of a
        random clip, so that the natural split deals silence in proportion to the clips.

        Args:
            split: The split.
            spoken: The clips of words.
        """
        names = []
        # For each recording, the first samples that a second of the split can have.
        starts_of_recording = []
        for path in sorted((self._folder / _BACKGROUND).glob("*.wav")):
            samples = len(read_recording(path))
            border = samples * 9 // 10
            if split == "train":
                first = 0
                end = border
            else:
                first = border
                end = samples
            names.append(f"{_BACKGROUND}/{path.name}")
            starts_of_recording.append(range(first, max(first, end - RATE + 1)))

        rng = numpy_generator(0, f"speech/silence/{split}")
        owners = rng.permutation(len(spoken))[: len(spoken) // 10]

        sizes = np.array([len(starts) for starts in starts_of_recording])
        if sizes.sum() == 0:
            found = f"{self._folder / _BACKGROUND} holds no recording of ten seconds"
            raise UserError(f"{KEY}.root", found, _UNPACK)
        chosen = rng.choice(len(names), size=len(owners), p=sizes / sizes.sum())

        clips = []
        for owner, recording in zip(owners, chosen, strict=True):
            starts = starts_of_recording[recording]
            start = starts[int(rng.integers(len(starts)))]
            clips.append(_Clip(names[recording], start, _SILENCE, spoken[owner].speaker))
        return clips

    def _pictures(self, clips: list[_Clip]) -> Tensor:
        """Return the pictures of clips as a uint8 tensor of shape (N, 1, 32, 32).

        They come from the cache, unless the folders have changed since.
        """

        def seconds() -> Iterator[np.ndarray]:
            for clip in clips:
                recording = read_recording(self._folder / clip.path)
                yield recording[clip.start : clip.start + RATE]

        folders = sorted(path for path in self._folder.iterdir() if path.is_dir())
        times = [path.stat().st_mtime_ns for path in folders]
        seconds_of_clips = [(clip.path, clip.start) for clip in clips]
        key = [FORMAT, str(self._folder), seconds_of_clips, times]
        return torch.from_numpy(cached(key, lambda: log_mel(seconds())))


class Tones(Dataset):
    """Synthetic words of two gliding formants, as log-mel pictures of 1x32x32; needs no files.

    A word glides from one vowel to another: two tones, the formants, are modulated by the pitch of
    a voice. Speakers differ in pitch and in the length of the vocal tract, which scales the
    formants. Clips differ in the start, length and loudness of the word, and in noise. Everything
    is drawn from named generators, so that a clip is the same on every machine. Speakers are the
    natural owners. Every fifth speaker is used only for testing.

    Attributes:
        word: The word of each clip, an int64 array of shape (clips,). A speaker says all words
            before the next one does.
        speaker: The speaker of each clip, an int64 array of shape (clips,).
    """

    input_shape = SHAPE
    synthetic = True
    transform = NORMALISE

    def __init__(self, *, words: int = 10, clips: int = 2000, speakers: int = 40) -> None:
        """Generate words.

        Args:
            words: The number of different words, the classes; 2 to 56.
            clips: The number of training and test clips in total.
            speakers: The number of speakers in total.
        """
        if not 2 <= words <= _MOST_WORDS:
            raise UserError(f"{KEY}.words", found=f"{words}", fix=f"give 2 to {_MOST_WORDS}")
        if speakers < _TEST_EVERY:
            fix = f"give at least {_TEST_EVERY}"
            raise UserError(f"{KEY}.speakers", found=f"{speakers}", fix=fix)
        if clips < words * speakers:
            fix = f"give at least {words * speakers}"
            raise UserError(f"{KEY}.clips", found=f"{clips}", fix=fix)

        self.words = words
        self.clips = clips
        self.speakers = speakers
        self.word = np.arange(clips) % words
        self.speaker = np.arange(clips) // words % speakers
        self.classes = tuple(f"tone {word}" for word in range(words))

    @override
    def load(self, split: Split) -> Samples:
        is_test = self.speaker % _TEST_EVERY == _TEST_EVERY - 1
        chosen = np.flatnonzero(is_test == (split == "test"))
        return Samples(
            x=torch.from_numpy(log_mel(self.recordings(chosen))),
            y=torch.from_numpy(self.word[chosen]),
            groups=torch.from_numpy(self.speaker[chosen]),
            owners=tuple(f"speaker {number}" for number in range(self.speakers)),
        )

    def recordings(self, clips: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the recordings of some clips.

        Each is an int16 array of shape (n,); n is 16000, or 12800 for one in five.
        """
        for clip in clips.tolist():
            yield _record(clip, int(self.word[clip]), int(self.speaker[clip]))


def _record(clip: int, word: int, speaker: int) -> np.ndarray:
    """Return one utterance, which ends within 0.8 s, as an int16 array of shape (n,)."""
    speaker_rng = numpy_generator(0, "tones/speaker", client=speaker)
    pitch = speaker_rng.uniform(90, 240)
    tract = speaker_rng.normal(1.0, 0.07)

    rng = numpy_generator(0, "tones/clip", client=clip)
    start_seconds, seconds, loudness = rng.uniform((0.05, 0.35, 0.2), (0.3, 0.5, 1.0))

    # The formants at the beginning and at the end of the word, of shape (2 ends, 2 formants).
    first_vowel = word % len(_VOWELS)
    last_vowel = (first_vowel + _STEPS[word // len(_VOWELS)]) % len(_VOWELS)
    frequencies = _VOWELS[[first_vowel, last_vowel]] * tract * rng.normal(1.0, 0.02, (2, 2))
    first_frequencies = frequencies[0]
    change = frequencies[1] - frequencies[0]

    time = np.arange(int(seconds * RATE), dtype=np.float32) / RATE  # (n,)
    progress = time / time[-1]

    # The phase is the integral of a frequency that changes linearly. Cycles are of shape (2, n).
    cycles = first_frequencies[:, None] * time + change[:, None] * time * progress / 2
    formants = np.sin(2 * np.pi * cycles)
    voice = 1 + 0.8 * np.sin(2 * np.pi * pitch * time)
    sound = np.sin(np.pi * progress) ** 2 * voice * (formants[0] + 0.5 * formants[1])

    recording = rng.normal(0.0, _NOISE, RATE if rng.random() < 0.8 else _SHORT)
    start = int(start_seconds * RATE)
    # A sound is at most 1.8 * 1.5, the voice times the formants.
    recording[start : start + len(sound)] += loudness * sound / 2.7
    return (recording.clip(-1, 1) * 32767).astype(np.int16)


def _torchaudio(part: str) -> Any:
    """Return a module of torchaudio.

    It is imported nowhere else, because it can refuse the torch that is installed. Its last
    version, 2.11.0, does so beside a torch that was built for another CUDA, such as 2.15.

    Raises:
        UserError: It cannot be imported.
    """
    try:
        return import_module(f"torchaudio.{part}")
    except Exception as error:  # ImportError, OSError or RuntimeError, by how it finds out
        raise UserError(
            key="data.dataset",
            found=f"torchaudio cannot be imported beside torch {torch.__version__} "
            f"({reason(error)})",
            fix="speech data need it: install a torch that it takes, from 2.11 to 2.14",
        ) from error


def read_recording(path: Path) -> np.ndarray:
    """Return a whole recording as an int16 array of shape (n,), mapped from its file.

    torchaudio 2.11 could only decode it with the shared libraries of FFmpeg.

    Raises:
        OSError: The file is missing.
        ValueError: It is damaged, or not PCM16 mono at 16 kHz.
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
    """Return the log-mel pictures of recordings, computed batch by batch, on a GPU if there is one.

    A cell is one byte: 0 for -80 dB, and 255 for 0 dB. The error of at most 0.16 dB is far below
    the tens of dB that distinguish words, and float16 would take twice the memory.

    Args:
        recordings: Recordings of a second or less, arrays of shape (n,) with levels of -32768 to
            32767. Shorter ones are followed by zeros.

    Returns:
        A uint8 array of shape (N, 1, 32, 32).
    """
    to_decibel = _torchaudio("functional").amplitude_to_DB
    mel_spectrogram = _torchaudio("transforms").MelSpectrogram

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spectrogram = mel_spectrogram(
        RATE, n_fft=2048, hop_length=512, n_mels=32, norm="slaney", mel_scale="slaney"
    ).to(device)

    pictures = []
    padded = (np.pad(samples, (0, RATE - len(samples))) for samples in recordings)
    while batch := list(islice(padded, BATCH)):
        levels = torch.from_numpy(np.stack(batch)).to(device).float()
        power = spectrogram(levels / 32768)  # (B, 32, 32)
        # No top_db: with three axes, torchaudio would apply it relative to the whole batch.
        decibel = to_decibel(power, multiplier=10.0, amin=1e-10, db_multiplier=0.0)
        decibel -= decibel.amax(dim=(1, 2), keepdim=True)
        cells = (decibel / _FLOOR_DB + 1).clamp_(min=0) * 255
        pictures.append(cells.round_().to(torch.uint8).unsqueeze(1).cpu().numpy())
    return np.concatenate(pictures)
