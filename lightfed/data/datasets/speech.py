"""Speech Commands: recordings of single words by many speakers (Warden 2018, arXiv:1804.03209).

Pictures, classes and the share of silence are those of the FlexiFed author's code. Deviations: that
code takes zeros for silence (and the six background recordings for a clip each), lightfed seconds
of the background recordings; it changes amplitude, tempo and position of training clips at random,
lightfed does not; it leaves open which clips are tested, lightfed takes the official list.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightfed.data.datasets import logmel
from lightfed.data.datasets.cache import cached
from lightfed.data.datasets.dataset import Dataset, Samples, Split
from lightfed.data.datasets.recording import RATE, read_clip, read_recording
from lightfed.data.datasets.refusals import ROOT, missing, unreadable
from lightfed.data.datasets.tones import SYNTHETIC
from lightfed.utils.errors import UserError
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


@dataclass(frozen=True)
class _Clip:
    """One second of a recording.

    Attributes:
        path: of the wav file, from the folder of the words.
        start: its first sample.
        label: the class.
        speaker: by the official name.
    """

    path: str
    start: int
    label: int
    speaker: str


class SpeechCommands(Dataset):
    """Single words as log-mel pictures of 1x32x32; 65,000 clips (v0.01) or 106,000 (v0.02).

    From ROOT/SpeechCommands/speech_commands_VERSION/WORD/SPEAKER_nohash_N.wav. Trained on are the
    clips of neither validation_list.txt nor testing_list.txt, tested those of the latter; the
    official test speakers train nobody. The speakers are the natural owners of the clips. The
    pictures are computed once and kept in the cache folder.
    """

    input_shape = logmel.SHAPE
    transform = logmel.NORMALISE

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
            version: v0.01 is the one of the FlexiFed experiments.
            protocol: "commands" has 12 classes: yes, no, up, down, left, right, on, off, stop, go,
                all other words as `unknown`, and `silence`, one for every ten clips; "words" has
                all words as classes, 30 in v0.01, 35 in v0.02.
        """
        self.root = Path(root).expanduser()
        self.version = version
        self.protocol = protocol
        self._folder = self.root / "SpeechCommands" / f"speech_commands_{version}"
        commands = (*_COMMANDS, "unknown", "silence")
        self.classes = commands if protocol == "commands" else _WORDS[version]
        self.synthetic = (self._folder / SYNTHETIC).is_file()

    @override
    def fetch(self) -> None:
        """Compute the pictures, so that the other processes of the node find them in the cache."""
        self.load("train")
        self.load("test")

    @override
    def load(self, split: Split) -> Samples:
        clips = self._spoken(split)
        if self.protocol == "commands":
            clips += self._silence(split, clips)
        _, groups = np.unique([clip.speaker for clip in clips], return_inverse=True)
        return Samples(
            x=self._pictures(clips),
            y=torch.tensor([clip.label for clip in clips]),
            groups=torch.from_numpy(groups),
        )

    def _spoken(self, split: Split) -> list[_Clip]:
        """The clips of the official lists, in the order of torchaudio."""
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
        if word not in _WORDS[self.version]:
            found = f"{self._folder} holds the word {word!r}, which {self.version} does not have"
            raise UserError(ROOT, found, "set version to that of the files")
        if self.protocol == "words":
            return self.classes.index(word)
        return _COMMANDS.index(word) if word in _COMMANDS else _UNKNOWN

    def _silence(self, split: Split, spoken: list[_Clip]) -> list[_Clip]:
        """One second of background for every ten clips, drawn by a constant.

        The last tenth of each recording is for the test. A second of silence belongs to the speaker
        of some clip, so that the natural split deals it out in proportion to the clips.
        """
        backgrounds = self._backgrounds(split)
        rng = numpy_generator(0, f"speech/silence/{split}")
        owners = rng.permutation(len(spoken))[: len(spoken) // 10]
        sizes = np.array([len(starts) for _, starts in backgrounds])
        chosen = rng.choice(len(backgrounds), size=len(owners), p=sizes / sizes.sum())
        clips = []
        for owner, (path, starts) in zip(owners, (backgrounds[i] for i in chosen), strict=True):
            start = starts[int(rng.integers(len(starts)))]
            clips.append(_Clip(path, start, _SILENCE, spoken[owner].speaker))
        return clips

    def _backgrounds(self, split: Split) -> list[tuple[str, range]]:
        """Each recording of noise, and where a second of the split may begin in it."""
        ranges = []
        for path in sorted((self._folder / _NOISE).glob("*.wav")):
            samples = len(read_recording(path))
            border = samples * 9 // 10
            first, end = (0, border) if split == "train" else (border, samples)
            ranges.append((f"{_NOISE}/{path.name}", range(first, max(first, end - RATE + 1))))
        if not any(starts for _, starts in ranges):
            found = (
                f"{self._folder / _NOISE} holds no recording of ten seconds, to cut silence from"
            )
            raise UserError(ROOT, found, f"{_UNPACK}, or set protocol: words")
        return ranges

    def _pictures(self, clips: list[_Clip]) -> Tensor:
        """(N, 1, 32, 32) uint8, from the cache if the tree has not changed since."""

        def make() -> dict[str, Tensor]:
            parts = (clips[i : i + logmel.BATCH] for i in range(0, len(clips), logmel.BATCH))
            waves = ([read_clip(self._folder / c.path, start=c.start) for c in p] for p in parts)
            return {"pictures": logmel.log_mel(map(np.stack, waves))}

        folders = sorted(path for path in self._folder.iterdir() if path.is_dir())
        key = {
            "format": logmel.FORMAT,
            "clips": [(clip.path, clip.start) for clip in clips],
            "folders": [path.stat().st_mtime_ns for path in folders],
        }
        return cached(self._folder.name, key, make)["pictures"]
