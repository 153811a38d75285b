"""What environment.json says has run."""

import platform
from importlib.metadata import PackageNotFoundError, version

from lightfed.runs.environment import software
from lightfed.utils import __version__


def test_it_names_the_version_of_what_a_result_depends_on() -> None:
    found = software()
    for package in ("torch", "torchvision", "triton", "lightning", "numpy"):
        assert found[package] == version(package)

    # docs/versions.md says to remove it where torch is newer than it takes.
    try:
        expected = version("torchaudio")
    except PackageNotFoundError:
        expected = None
    assert found.get("torchaudio") == expected
    assert found["python"] == platform.python_version()
    assert found["lightfed"] == __version__
