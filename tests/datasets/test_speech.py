import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from lightfed.data.dataset import Samples
from lightfed.datasets import speech
from lightfed.datasets.speech import NORMALISE, RATE, SpeechCommands, Tones
from tests.datasets import tiny
from tests.datasets.audio import needs_torchaudio
from tests.datasets.kit import refused
from tests.datasets.tiny import write_recording

pytestmark = needs_torchaudio

COMMANDS = ["yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tones]:
    root = tmp_path_factory.mktemp("speech")
    return root, tiny.speech_commands(root, speakers=5)


@pytest.fixture
def root(written: tuple[Path, Tones], tmp_path: Path) -> Path:
    """A separate tree, which the test may change."""
    return shutil.copytree(written[0], tmp_path / "root")


def folder(root: Path) -> Path:
    return root / "SpeechCommands" / "speech_commands_v0.01"


def commands(root: Path) -> SpeechCommands:
    return SpeechCommands(str(root))


def said(samples: Samples, names: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """The word and picture of each sample of a split, sorted."""
    pairs = zip(samples.y.tolist(), samples.x, strict=True)
    return sorted((names[label], picture.numpy().tobytes()) for label, picture in pairs)


def test_the_official_tree_is_read_clip_for_clip(written: tuple[Path, Tones]) -> None:
    root, tones = written
    dataset = SpeechCommands(str(root), protocol="words")
    heard = tones.load("train")
    assert heard.groups is not None
    kept = heard.groups != 0  # the first speaker is in the validation list
    expected = Samples(heard.x[kept], heard.y[kept])
    train, test = dataset.load("train"), dataset.load("test")
    assert said(train, dataset.classes) == said(expected, tuple(tiny.SPOKEN))
    assert said(test, dataset.classes) == said(tones.load("test"), tuple(tiny.SPOKEN))
    assert (len(train), len(test)) == (2 * 12 * 3, 2 * 12)
    assert train.y.dtype == torch.int64
    assert train.x.shape[1:] == dataset.input_shape
    assert dataset.transform == NORMALISE
    # Its groups are the speakers: each has one number, and none is in both splits.
    assert train.groups is not None
    assert test.groups is not None
    spoken = dict(zip((p.numpy().tobytes() for p in heard.x), heard.groups.tolist(), strict=True))
    speakers = [spoken[picture.numpy().tobytes()] for picture in train.x]
    assert len(set(zip(train.groups.tolist(), speakers, strict=True))) == 3
    assert len(train.groups.unique()) == len(set(speakers)) == 3
    assert len(torch.cat((train.groups, test.groups)).unique()) == 3 + 1


def test_commands_are_twelve_classes(written: tuple[Path, Tones]) -> None:
    root, _ = written
    dataset = SpeechCommands(str(root))
    assert dataset.classes == (*COMMANDS, "unknown", "silence")
    words = SpeechCommands(str(root), protocol="words")
    for split, clips in (("train", 72), ("test", 24)):
        samples, all_words = dataset.load(split), words.load(split)
        assert samples.y.bincount().tolist() == [clips // 12] * 10 + [clips // 6, clips // 10]
        assert torch.equal(samples.x[:clips], all_words.x)
        names = [words.classes[label] for label in all_words.y]
        expected = [COMMANDS.index(n) if n in COMMANDS else 10 for n in names]
        assert samples.y[:clips].tolist() == expected


def test_silence_for_testing_is_never_used_for_training(root: Path) -> None:
    """The first nine tenths of one background hum low, the last tenth high; the other is short."""
    t = np.arange(20 * RATE) / RATE
    hum = np.sin(2 * np.pi * np.where(t < 18, 300, 3000) * t) * 8000
    backgrounds = folder(root) / "_background_noise_"
    write_recording(backgrounds / "white_noise.wav", hum.astype(np.int16))
    write_recording(backgrounds / "brown_noise.wav", np.zeros(RATE // 2, dtype=np.int16))
    dataset = SpeechCommands(str(root))
    for split, bands in (("train", range(2, 5)), ("test", range(20, 25))):
        samples = dataset.load(split)
        silence = samples.x[samples.y == 11]
        brightest = silence[:, 0].long().sum(2).argmax(1)
        assert all(band in bands for band in brightest.tolist())


def test_silence_is_deterministic_and_belongs_to_speakers(root: Path) -> None:
    shutil.rmtree(folder(root) / "bed")  # of two words only one is left: another number of clips
    one, other = SpeechCommands(str(root)).load("train"), SpeechCommands(str(root)).load("train")
    assert torch.equal(one.x, other.x)
    assert one.groups is not None
    silent = one.y == 11
    assert int(silent.sum()) == 66 // 10
    pictures = one.x[silent].flatten(1).unique(dim=0)
    assert len(pictures) == 6
    assert len(set(one.groups[silent].tolist())) > 1
    assert int(one.groups.max()) == 2  # silence is of no speaker of its own


def test_all_words_are_thirty_or_thirty_five_classes(tmp_path: Path) -> None:
    first = SpeechCommands("x", protocol="words")
    second = SpeechCommands("x", version="v0.02", protocol="words")
    assert (first.num_classes, second.num_classes) == (30, 35)
    assert list(first.classes) == sorted(set(first.classes))
    assert list(second.classes) == sorted({*first.classes, *second.classes})
    assert set(COMMANDS) < set(first.classes)
    tiny.speech_commands(tmp_path, version="v0.02", speakers=5)
    samples = SpeechCommands(str(tmp_path), version="v0.02", protocol="words").load("test")
    assert {second.classes[label] for label in samples.y.tolist()} == set(tiny.SPOKEN)


def test_pictures_are_computed_once_unless_a_recording_changes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = SpeechCommands(str(root))
    dataset.fetch()
    with monkeypatch.context() as patch:
        patch.setattr(speech, "log_mel", lambda _: pytest.fail("computed again"))
        before = [dataset.load("train"), dataset.load("test")]
        other = SpeechCommands(str(root), protocol="words")
        with pytest.raises(pytest.fail.Exception):
            other.load("train")
    write_recording(folder(root) / "yes" / "feedcafe_nohash_0.wav", np.zeros(9, dtype=np.int16))
    assert len(dataset.load("train")) == len(before[0]) + 1
    path = folder(root) / (folder(root) / "testing_list.txt").read_text().split()[0]
    path.unlink()
    write_recording(path, np.zeros(RATE, dtype=np.int16))
    changed = (dataset.load("test").x != before[1].x).flatten(1).any(1)
    assert changed.tolist() == [True] + [False] * (len(before[1]) - 1)


def test_missing_and_damaged_folders_are_named(root: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    line = refused("root", SpeechCommands(str(nowhere)).load, "train")
    assert f"expected {folder(nowhere)}, which is not there" in line
    (folder(root) / "go").rename(folder(root) / "forward")
    line = refused("root", commands(root).load, "train")
    assert "holds forward, which v0.01 does not have" in line
    for name in {*tiny.SPOKEN, "forward"} - {"go"}:
        shutil.rmtree(folder(root) / name)
    assert "cannot be read (ValueError" in refused("root", commands(root).load, "train")


def test_a_list_that_is_not_of_the_clips_is_refused(root: Path) -> None:
    clips = folder(root) / "testing_list.txt"
    first = clips.read_text().split()[0]
    (folder(root) / first).unlink()
    assert first in refused("root", commands(root).load, "test")
    clips.write_text("yes/noise.wav\n")
    assert "cannot be read (ValueError" in refused("root", commands(root).load, "test")
    clips.unlink()
    assert "testing_list.txt" in refused("root", commands(root).load, "train")


def test_silence_needs_a_long_background(root: Path) -> None:
    for path in (folder(root) / "_background_noise_").iterdir():
        write_recording(path, np.zeros(10 * RATE - 10, dtype=np.int16))
    assert len(commands(root).load("train")) == 72 + 7
    assert "no recording of ten seconds" in refused("root", commands(root).load, "test")
    shutil.rmtree(folder(root) / "_background_noise_")
    refused("root", commands(root).load, "train")
    assert len(SpeechCommands(str(root), protocol="words").load("train")) == 72


def test_what_is_no_pcm_wave_of_16_khz_is_refused(root: Path) -> None:
    path = folder(root) / (folder(root) / "testing_list.txt").read_text().split()[0]
    waves = []
    for rate, kind in ((8000, np.int16), (RATE, np.uint8)):
        wavfile.write(path, rate, np.zeros(100, dtype=kind))
        waves.append(path.read_bytes())
    for content in (b"", b"fLaC" + bytes(60), b"RIFF\x24\0\0\0WAVE", *waves):
        path.write_bytes(content)
        line = refused("root", commands(root).load, "test")
        assert f"{path} is not PCM16 mono at 16 kHz" in line
