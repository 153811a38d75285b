"""What is kept of commands that were read, and when it is not believed any more."""

import importlib
import os
import py_compile
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightfed.cli import dependencies, known_runs
from lightfed.cli.dependencies import Opened
from lightfed.cli.known_runs import KnownRuns
from lightfed.cli.wanted import Wanted
from lightfed.utils import code_files
from lightfed.utils.code_files import digest_of_file, modules_of_users
from tests.forked import result_of

WORDS = ("fit", "--config", "run.yaml", "--model.seed=1")
VALUES = {"model.seed": 1, "model.fraction": 0.1, "trainer.name": None, "data.root": "a"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration whose run has been kept."""
    monkeypatch.chdir(tmp_path)
    # It changes between this fixture and the test.
    ignored = dependencies._OF_TERMINALS | {"PYTEST_CURRENT_TEST"}
    monkeypatch.setattr(dependencies, "_OF_TERMINALS", ignored)
    Path("run.yaml").write_text("trainer: {max_epochs: 2}\n")
    Path("runs").mkdir()
    KnownRuns([WORDS]).keep([wanted()])
    return tmp_path


def wanted(**other: Any) -> Wanted:
    """The run of the command, as it would have been read."""
    path = os.path.abspath("run.yaml")
    run = Wanted(
        words=WORDS,
        root=Path("runs"),
        name="run",
        options={"model.seed": 1, "model.fraction": 0.1},
        limits={"max_epochs": 2, "max_time": None},
        ranks=2,
        values=VALUES,
        files={path: str(digest_of_file(path))},
    )
    return run._replace(**other)


def test_what_is_kept_is_what_was_read(folder: Path) -> None:
    assert KnownRuns([WORDS]).recall() == [wanted(files=None)]


def edit_the_configuration() -> None:
    path = Path("run.yaml")
    stamp = path.stat()
    path.write_text("trainer: {max_epochs: 3}\n")
    # An editor that keeps the size and the time changes the content all the same.
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def cut_the_file() -> None:
    path = KnownRuns([WORDS]).path
    path.write_text(path.read_text()[:-40])


def damage_a_value() -> None:
    path = KnownRuns([WORDS]).path
    kept = path.read_text()
    assert kept.count('"model.seed": 1') == 2
    path.write_text(kept.replace('"model.seed": 1', '"model.seed": 2'))


def write_something_else() -> None:
    KnownRuns([WORDS]).path.write_text("[1]")


@pytest.mark.parametrize(
    "change",
    [
        edit_the_configuration,
        lambda: Path("run.yaml").unlink(),
        cut_the_file,
        damage_a_value,
        write_something_else,
    ],
)
def test_what_has_changed_since_is_not_believed(change: Callable[[], None], folder: Path) -> None:
    change()
    assert KnownRuns([WORDS]).recall() is None


def test_other_circumstances_are_read_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PL_TRAINER_MAX_EPOCHS", "9")
        assert KnownRuns([WORDS]).recall() is None
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        assert KnownRuns([WORDS]).recall() is None
    with monkeypatch.context() as patch:
        patch.setenv("OLDPWD", "/elsewhere")
        assert KnownRuns([WORDS]).recall() is not None


def test_another_version_of_a_program_reads_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this one its sources count, and of others the time at which they were installed."""
    package = folder / "package"
    package.mkdir()
    (package / "module.py").write_text("DEFAULT = 1\n")
    installed = folder / "site"
    (installed / "other-1.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    monkeypatch.setattr(dependencies, "own_folders", lambda: (package,))
    KnownRuns([WORDS]).keep([wanted()])
    assert KnownRuns([WORDS]).recall() is not None

    (package / "module.py").write_text("DEFAULT = 2\n")
    assert KnownRuns([WORDS]).recall() is None
    (package / "module.py").write_text("DEFAULT = 1\n")
    assert KnownRuns([WORDS]).recall() is not None

    # Installed once more, with the same number.
    os.utime(installed / "other-1.0.dist-info", ns=(1, 1))
    assert KnownRuns([WORDS]).recall() is None


def test_a_folder_that_was_moved_is_read_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = folder.with_name(f"{folder.name}-moved")
    folder.rename(moved)
    monkeypatch.chdir(moved)
    assert KnownRuns([WORDS]).path.is_file()
    assert KnownRuns([WORDS]).recall() is None


def test_other_commands_are_not_known(folder: Path) -> None:
    assert KnownRuns([WORDS, WORDS]).recall() is None
    assert KnownRuns([(*WORDS, "--trainer.max_epochs=3")]).recall() is None


@pytest.mark.parametrize(
    "other",
    [
        {"files": None},
        {"values": {"model.fraction": (1, 2)}},
        {"values": {"model.fraction": object()}},
        {"root": Path("elsewhere")},
    ],
)
def test_what_cannot_be_known_for_sure_is_not_kept(other: dict[str, Any], folder: Path) -> None:
    commands = [(*WORDS, "--trainer.name=x")]
    KnownRuns(commands).keep([wanted(**other)])
    assert not KnownRuns(commands).path.exists()


def test_nothing_is_made_for_runs_that_are_not_there(folder: Path) -> None:
    commands = [(*WORDS, "--trainer.default_root_dir", "none")]
    KnownRuns(commands).keep([wanted(root=Path("none"))])
    assert not Path("none").exists()


def test_the_folder_of_the_runs_is_found_in_words_and_files(folder: Path) -> None:
    Path("run.yaml").write_text("trainer: {default_root_dir: there}\n")
    for words, root in (
        (WORDS, "there"),
        ((*WORDS, "--trainer.default_root_dir=here"), "here"),
        ((*WORDS, "--trainer.default_root_dir", "here"), "here"),
        (("fit", "--config", "lightfed:quickstart"), "runs"),
        (("fit", "--config", "lightfed:nothing"), "runs"),
    ):
        assert KnownRuns([words]).path.parent == Path(root) / known_runs.FOLDER


# The files that reading depends on.


def noted(folder: Path) -> list[dict[str, str] | None]:
    """Return what is noted of an import, then after an edit, and by a later observer."""
    # Modules of the tests stand for those of an installed program.
    prefix = str(Path(__file__).parents[2]) + os.sep
    programs = (*code_files._beginnings_of_installed(), prefix)
    code_files._beginnings_of_installed = lambda: programs  # type: ignore[assignment]
    sys.path.insert(0, str(folder))

    # Tests before this one may have imported modules of users.
    of_users = set(modules_of_users())
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) in of_users:
            del sys.modules[name]

    opened = Opened()
    importlib.import_module("users")
    (folder / "data.yaml").read_text()
    found = opened.digests()
    (folder / "data.yaml").write_text("b: 2\n")
    return [found, opened.digests(), Opened().digests()]


def test_a_module_of_a_user_counts_by_its_source(tmp_path: Path) -> None:
    """Its bytecode alone is opened, if that was written before."""
    source = tmp_path / "users.py"
    data = tmp_path / "data.yaml"
    source.write_text("DEFAULT = 1\n")
    data.write_text("a: 1\n")
    py_compile.compile(str(source))
    digests = {str(path): digest_of_file(str(path)) for path in (source, data)}

    found, after_edit, of_later = result_of(partial(noted, tmp_path))
    assert found == digests
    # A file that changes while commands are read, and a module that was imported before.
    assert after_edit is None
    assert of_later is None
