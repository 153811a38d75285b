"""Speech Commands: recordings of single words by many speakers (Warden 2018, arXiv:1804.03209).

Pictures, classes and the share of silence are those of the FlexiFed author's code, which differs in
three points. Its silence is zeros, and each background recording as one clip; here it is random
seconds of the background recordings. It varies amplitude, tempo and position of training clips at
random. It does not say which clips are for testing; here the official list does.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightfed.data.datasets import logmel
from lightfed.data.datasets.cache import cached
from lightfed.data.datasets.dataset import KEY, Dataset, Samples, Split, missing, unreadable
from lightfed.data.datasets.logmel import RATE, read_clip, read_recording
from lightfed.utils.errors import require
from lightfed.utils.rng import numpy_generator

_COMMANDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
_UNKNOWN, _SILENCE = len(_COMMANDS), len(_COMMANDS) + 1
_WORDS_V1 = """
bed bird cat dog down eight five four go happy house left marvin nine no off on one right seven
sheila six stop three tree two up wow yes zero
"""
_WORDS_V2 = _WORDS_V1 + "backward follow forward learn visual"
_WORDS = {"v0.01": tuple(_WORDS_V1.split()), "v0.02": tuple(sorted(_WORDS_V2.split()))}
_SUBSETS = {"train": "training", "test": "testing"}
_NOISE = "_background_noise_"
_UNPACK = "unpack the official archive there again"

SYNTHETIC = "SYNTHETIC.txt"
"""A file in the folder of the words; it marks recordings that are not real."""


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

    input_shape = logmel.SHAPE
    transform = logmel.NORMALISE
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
        self.synthetic = (self._folder / SYNTHETIC).is_file()

    @override
    def load(self, split: Split) -> Samples:
        clips = self._spoken(split)
        if self.protocol == "commands":
            clips += self._silence(split, clips)
        trained = clips if split == "train" else self._spoken("train")
        speakers = sorted({clip.speaker for clip in trained})
        # Test speakers have numbers of their own, for a union of both splits.
        speakers += sorted({clip.speaker for clip in clips} - {*speakers})
        numbers = {speaker: number for number, speaker in enumerate(speakers)}
        return Samples(
            x=self._pictures(clips),
            y=torch.tensor([clip.label for clip in clips]),
            groups=torch.tensor([numbers[clip.speaker] for clip in clips]),
        )

    def _spoken(self, split: Split) -> list[_Clip]:
        """The clips of a split, in the order of torchaudio."""
        from torchaudio.datasets import SPEECHCOMMANDS

        name = self._folder.name
        if not self._folder.is_dir():
            raise missing(self._folder, holds=f"SpeechCommands/{name}/WORD/*.wav")
        try:
            reader: Any = SPEECHCOMMANDS(self.root, url=name, subset=_SUBSETS[split])
            found = [reader.get_metadata(i) for i in range(len(reader))]
            if not found:
                raise ValueError(f"no {_SUBSETS[split]} clips")
        except (OSError, ValueError) as error:
            raise unreadable(self._folder, error, fix=_UNPACK) from error
        return [
            _Clip(str(Path(path).relative_to(name)), 0, self._label(word), speaker)
            for path, _, word, speaker, _ in found
        ]

    def _label(self, word: str) -> int:
        found = f"{self._folder} holds the word {word!r}, which {self.version} does not have"
        fix = "set version to that of the files"
        require(word in _WORDS[self.version], f"{KEY}.root", found, fix)
        if self.protocol == "words":
            return self.classes.index(word)
        return _COMMANDS.index(word) if word in _COMMANDS else _UNKNOWN

    def _silence(self, split: Split, spoken: list[_Clip]) -> list[_Clip]:
        """One second of background for every ten clips, drawn with a constant seed.

        The last tenth of each recording is for testing. Each second belongs to the speaker of a
        random clip, so that the natural split deals silence in proportion to the clips.
        """
        backgrounds = self._backgrounds(split)
        rng = numpy_generator(0, f"speech/silence/{split}")
        owners = rng.permutation(len(spoken))[: len(spoken) // 10]
        sizes = np.array([len(starts) for _, starts in backgrounds])
        chosen = rng.choice(len(backgrounds), size=len(owners), p=sizes / sizes.sum())
        clips = []
        for owner, background in zip(owners, chosen, strict=True):
            path, starts = backgrounds[background]
            start = starts[int(rng.integers(len(starts)))]
            clips.append(_Clip(path, start, _SILENCE, spoken[owner].speaker))
        return clips

    def _backgrounds(self, split: Split) -> list[tuple[str, range]]:
        """Each background recording, and the first samples that a second of the split can have."""
        ranges = []
        for path in sorted((self._folder / _NOISE).glob("*.wav")):
            samples = len(read_recording(path))
            border = samples * 9 // 10
            first, end = (0, border) if split == "train" else (border, samples)
            ranges.append((f"{_NOISE}/{path.name}", range(first, max(first, end - RATE + 1))))
        found = f"{self._folder / _NOISE} holds no recording of ten seconds, to cut silence from"
        fix = f"{_UNPACK}, or set protocol: words"
        require(any(starts for _, starts in ranges), f"{KEY}.root", found, fix)
        return ranges

    def _pictures(self, clips: list[_Clip]) -> Tensor:
        """(N, 1, 32, 32) uint8, from the cache unless the folders have changed since."""

        def make() -> Iterator[np.ndarray]:
            parts = (clips[i : i + logmel.BATCH] for i in range(0, len(clips), logmel.BATCH))
            waves = ([read_clip(self._folder / c.path, start=c.start) for c in p] for p in parts)
            return logmel.log_mel(map(np.stack, waves))

        folders = sorted(path for path in self._folder.iterdir() if path.is_dir())
        key = {
            "format": logmel.FORMAT,
            "clips": [(clip.path, clip.start) for clip in clips],
            "folders": [path.stat().st_mtime_ns for path in folders],
        }
        return cached(self._folder.name, key, make)
