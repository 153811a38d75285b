from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.io import wavfile

from lightfed.data.datasets.logmel import RATE, read_clip, read_recording
from lightfed.utils.errors import UserError
from tests.data.tiny import write_recording


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
    np.testing.assert_array_equal(read_recording(path), samples)
    np.testing.assert_array_equal(clip, np.pad(kept, (0, RATE - len(kept))))


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read_clip(path)
    assert error.value.key == "data.dataset.init_args.root"
    assert "PCM16 mono at 16 kHz" in error.value.fix
    assert "\n" not in str(error.value)
    assert str(path) in error.value.found
    return error.value.found


@pytest.mark.parametrize(
    ("rate", "dtype", "shape"),
    [
        (RATE, np.int16, (100, 2)),
        (RATE, np.uint8, (100,)),
        (RATE, np.float32, (100,)),
        (8000, np.int16, (100,)),
    ],
)
def test_another_format_is_refused(
    rate: int, dtype: type, shape: tuple[int, ...], tmp_path: Path
) -> None:
    wavfile.write(tmp_path / "a.wav", rate, np.zeros(shape, dtype=dtype))
    assert f"at {rate} Hz" in refused(tmp_path / "a.wav")


@pytest.mark.parametrize("content", [b"", b"fLaC" + bytes(60), b"RIFF\x24\0\0\0WAVE", b"RIFF"])
def test_other_files_than_wav_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(content)
    refused(tmp_path / "a.wav")


def test_missing_and_truncated_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    assert "No such file" in refused(path)
    write_recording(path, np.zeros(100, dtype=np.int16))
    path.write_bytes(path.read_bytes()[:-3])
    refused(path)
