"""What environment.json says has run."""

import platform
from importlib.metadata import version

from lightfed.runs.environment import software
from lightfed.utils import __version__


def test_it_names_the_version_of_what_a_result_depends_on() -> None:
    found = software()
    for package in ("torch", "torchvision", "torchaudio", "triton", "lightning", "numpy"):
        assert found[package] == version(package)
    assert found["python"] == platform.python_version()
    assert found["lightfed"] == __version__
