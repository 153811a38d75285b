"""A file that is written atomically is on the disk before it has its name."""

import os
from pathlib import Path
from typing import Any

import pytest

from lightfed.utils.atomic_io import write_atomically


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed and renamed, in order."""
    done: list[str] = []
    replace = os.replace

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        size = "" if path.is_dir() else f" of {path.stat().st_size} bytes"
        done.append(f"flush {path.name.partition('.')[0]}{size}")

    def renamed(source: Any, target: Any) -> None:
        done.append(f"rename {Path(source).name.partition('.')[0]}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", renamed)
    return done


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux")
def test_the_content_is_flushed_before_the_name_and_the_name_after(
    tmp_path: Path, calls: list[str]
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    write_atomically(folder / "last.ckpt", lambda file: file.write(b"seven..") and None)
    assert calls == ["flush last of 7 bytes", "rename last", "flush checkpoints"]
    assert (folder / "last.ckpt").read_bytes() == b"seven.."
