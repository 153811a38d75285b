"""A run of edited code is another run: what was trained before the edit is not used again."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lightfed.cli.wanted import Wanted
from lightfed.utils import record
from lightfed.utils.code_files import code_of_users, edited

LIMITS = {"max_epochs": 2, "max_time": None}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an imported module of a user, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "method_of_a_user.py"
    path.write_text("RATE = 1\n")
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    import_module(path.stem)
    return path


def wanted() -> Wanted:
    options = {"model.seed": 1}
    return Wanted(("fit",), Path("runs"), "run", options, LIMITS, ranks=1, values=options)


def finish(code: dict[str, str]) -> Path:
    """Write the record of a finished run that was trained by this code."""
    run = wanted()
    folder = run.root / "run"
    folder.mkdir(parents=True)
    finished = {"rounds": 2, "limits": LIMITS}
    written = {"name": run.name, "config": run.digest, "finished": finished}
    (folder / record.NAME).write_text(json.dumps(written | {"code": code}))
    return folder


def test_a_run_of_edited_code_is_not_used_again(
    module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = code_of_users()
    assert module.name in code  # relative to the working directory

    folder = finish({module.name: code[module.name]})
    assert wanted().finished() == folder

    module.write_text("RATE = 2\n")
    assert wanted().finished() is None
    assert wanted().finished() is None
    assert capsys.readouterr().err == (
        f"{folder}: not used, {module.name} has changed since it was trained\n"
    )

    module.write_text("RATE = 1\n")
    assert wanted().finished() == folder


def test_code_that_is_gone_or_was_not_recorded_is_taken_as_it_was(module: Path) -> None:
    assert edited({"elsewhere/method.py": "0" * 32}) == []
    folder = finish({})
    assert wanted().finished() == folder
