import struct
import wave
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightfed.data.datasets.recording import RATE, count_samples, read_clip, write_recording
from lightfed.utils.errors import UserError


def write(path: Path, *, width: int = 2, channels: int = 1, rate: int = RATE) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(bytes(range(100)) * width * channels)
    return path


@given(length=st.integers(0, 2 * RATE), data=st.data())
def test_a_clip_is_a_second_from_its_start_then_zeros(
    length: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "clip.wav"
    samples = (np.arange(length) * 7919 % 65_535 - 32_767).astype(np.int16)
    write_recording(path, samples)
    start = data.draw(st.integers(0, length))
    clip = read_clip(path, start=start)
    kept = samples[start : start + RATE]
    assert clip.dtype == np.int16
    assert count_samples(path) == length
    np.testing.assert_array_equal(clip, np.pad(kept, (0, RATE - len(kept))))


def test_samples_are_little_endian(tmp_path: Path) -> None:
    write_recording(tmp_path / "a.wav", np.array([1, -2, 300], dtype=np.int16))
    assert (tmp_path / "a.wav").read_bytes().endswith(struct.pack("<hhh", 1, -2, 300))


@pytest.mark.parametrize(
    ("form", "found"),
    [
        ({"channels": 2}, "is PCM16 of 2 channels at 16000 Hz"),
        ({"width": 1}, "is PCM8 of 1 channels at 16000 Hz"),
        ({"width": 3}, "is PCM24 of 1 channels at 16000 Hz"),
        ({"rate": 8000}, "is PCM16 of 1 channels at 8000 Hz"),
    ],
)
def test_another_format_is_refused(form: dict[str, int], found: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", **form)
    for read in (read_clip, count_samples):
        with pytest.raises(UserError) as error:
            read(path)
        assert error.value.key == "data.dataset.init_args.root"
        assert error.value.found == f"{path} {found}"
        assert "PCM16 mono at 16 kHz" in error.value.fix


def test_numbers_of_floating_point_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav")
    content = bytearray(path.read_bytes())
    content[20:22] = struct.pack("<H", 3)  # WAVE_FORMAT_IEEE_FLOAT
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.wav is not such a file \(unknown format: 3"):
        read_clip(path)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "its header is cut short"),
        (b"fLaC" + bytes(60), "does not start with RIFF"),
        (b"RIFF\x24\0\0\0WAVE", "fmt chunk and/or data chunk missing"),
    ],
)
def test_what_is_no_wav_is_refused(content: bytes, found: str, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    with pytest.raises(UserError, match=found) as error:
        read_clip(path)
    assert str(path) in error.value.found
    assert "\n" not in str(error.value)


def test_a_file_that_lost_its_end_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"a\.wav is cut short"):
        read_clip(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.wav cannot be read \(No such file or directory"):
        read_clip(tmp_path / "gone.wav")
