"""Whether speech data can be read here."""

from importlib import import_module

import pytest
import torch


def _refusal() -> str:
    """Why torchaudio cannot be imported; empty if it can, or if its torch is one that it takes."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < (2, 15):
        return ""  # there it has to work
    try:
        import_module("torchaudio.transforms")
    except Exception as error:
        return f"torchaudio refuses torch {torch.__version__}: {type(error).__name__}"
    return ""


_why = _refusal()
needs_torchaudio = pytest.mark.skipif(bool(_why), reason=_why or "torchaudio is there")
