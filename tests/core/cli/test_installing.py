"""What an installation holds: configurations, kernels, the version, help for every key."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from lightfed import __version__
from lightfed.cli import command_line, commands, shipped
from lightfed.cli.usage import COMMANDS
from lightfed.utils.errors import UserError

ROOT = Path(__file__).parents[3]


def wheel(source: Path, folder: Path) -> ZipFile:
    """Built from a copy, without the network."""
    copy = folder / "source"
    for name in ("lightfed", "kernels", "configs", "pyproject.toml", "README.md", "LICENSE"):
        if (source / name).is_dir():
            unused = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source / name, copy / name, symlinks=True, ignore=unused)
        elif (source / name).is_file():
            copy.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, copy / name)
    if source.name == "kernels":
        unused = shutil.ignore_patterns("__pycache__")
        for name in ("lightfed_kernels", "bench"):
            shutil.copytree(source / name, copy / name, ignore=unused)
    build = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    words = [sys.executable, "-c", build, str(folder)]
    subprocess.run(words, cwd=copy, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return ZipFile(built)


def test_the_wheel_has_configurations_templates_and_kernels(tmp_path: Path) -> None:
    with wheel(ROOT, tmp_path) as built:
        names = set(built.namelist())
        built.extractall(tmp_path / "installed")
    configs = {str(p.relative_to(ROOT)) for p in (ROOT / "configs").rglob("*") if p.is_file()}
    assert {f"lightfed/{name}" for name in configs} <= names
    assert {"lightfed_kernels/__init__.py", "lightfed_kernels/py.typed"} <= names
    assert any(name.startswith("lightfed/lab/drawing/templates/") for name in names)
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"lightfed", "lightfed_kernels"}  # and no tests, no benchmarks
    empty = tmp_path / "empty"
    empty.mkdir()
    listed = subprocess.run(
        [sys.executable, "-m", "lightfed", "configs"],
        cwd=empty,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert listed.stdout.startswith("quickstart ")


def test_the_kernels_have_a_wheel_of_their_own(tmp_path: Path) -> None:
    with wheel(ROOT / "kernels", tmp_path) as built:
        names = built.namelist()
        (about,) = (built.read(name).decode() for name in names if name.endswith("METADATA"))
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lightfed_kernels"}
    needed = re.findall(r"Requires-Dist: ([a-z]+)", about)
    assert sorted(needed) == ["numpy", "torch", "triton"]
    assert f"Version: {__version__}" in about


def test_a_configuration_is_found_by_its_name_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = shipped.with_paths(["fit", "--config", "lightfed:quickstart", "--model.seed", "1"])
    assert Path(found[2]).samefile(ROOT / "configs" / "quickstart.yaml")
    assert shipped.with_paths(["--config=lightfed:digits/fedavg"])[0].endswith("digits/fedavg.yaml")
    with pytest.raises(UserError, match=r"--config: .*did you mean digits/fedavg"):
        shipped.path_of("fedavg")
    assert shipped.main(["copy", "digits"]) == 0
    assert Path("configs/digits/fedavg.yaml").is_file()
    with pytest.raises(UserError, match="exists"):
        shipped.main(["copy", "digits"])


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    command_line.main(["--version"])
    assert capsys.readouterr().out == f"lightfed {__version__}\n"
    assert set(commands.COMMANDS) <= set(COMMANDS)


def test_every_key_of_fit_has_a_description(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit, match="0"):
        command_line.main(["fit", "--help"])
    entries = re.split(r"\n  (?=-)", capsys.readouterr().out)[1:]
    assert len(entries) > 70
    for entry in entries:
        described = re.sub(r"\(type: .*", "", " ".join(entry.split()))
        assert len(described.split()) >= 3, entry


def test_a_reader_may_stop_early() -> None:
    script = (
        f"{sys.executable} -c 'import lightfed.cli.command_line as c; c.main()' configs | head -n 1"
    )
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert done.stderr == ""
