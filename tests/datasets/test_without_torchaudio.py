"""Where torchaudio cannot be imported, speech data say so, and nothing else needs it."""

from pathlib import Path

import pytest

from lightfed.datasets import speech
from lightfed.datasets.speech import SpeechCommands, Tones
from lightfed.utils.errors import UserError
from tests.datasets import tiny


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_without_torchaudio_speech_says_so_in_one_line(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside torch 2.15, whose CUDA is another; how torchaudio finds out depends on both."""
    said = "was built for CUDA 13.0,\nand torch for 13.2"

    def refuses(name: str) -> None:
        raise error(f"{name} {said}")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny.speech_commands(tmp_path, speakers=5)
    monkeypatch.setattr(speech, "import_module", refuses)
    for dataset in (SpeechCommands(str(tmp_path)), Tones(words=3, clips=15, speakers=5)):
        with pytest.raises(UserError) as found:
            dataset.load("train")
        line = found.value.line
        assert line.startswith("data.dataset: torchaudio cannot be imported beside torch ")
        assert "built for CUDA 13.0, and torch for 13.2" in line
        assert "\n" not in line
