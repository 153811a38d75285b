"""Code of a user's own that ends the process: no command says with status 0 that it is done."""

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from torch import Tensor
from typing_extensions import override

from lightfed.cli.command_line import main
from lightfed.cli.wanted import Wanted
from lightfed.lab import sweep
from lightfed.lab.runner import run_all
from tests.promises.refusals.mistakes import edited, of_class, one_group
from tests.promises.refusals.own_code import Net

HERE = __name__
FIT = ["fit", "--config", "run.yaml"]


def leave(code: str) -> None:
    """End as `code` says: `interrupt`, `at once`, or by sys.exit with what it is in Python."""
    if code == "interrupt":
        raise KeyboardInterrupt
    if code == "at once":
        os._exit(0)
    sys.exit({"None": None, "0": 0, "3": 3, "256": 256}.get(code, code))


class Leaves(Net):
    """A client that ends the process in its method `where`."""

    def __init__(self, where: str, code: str = "0", num_classes: int = 10) -> None:
        super().__init__(num_classes)
        self.where, self.code = where, code
        self._reach("__init__")

    def _reach(self, where: str) -> None:
        if self.where == where:
            leave(self.code)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._reach("training_step")
        return super().training_step(batch, batch_idx)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._reach("validation_step")
        super().validation_step(batch, batch_idx)


class Callbacks(L.Callback):
    """A callback that ends the process, or Lightning's loop, in a hook."""

    def __init__(self, hook: str, code: str = "0") -> None:
        self._code = code
        setattr(self, hook, self._leave)

    def _leave(self, *args: Any, **kwargs: Any) -> None:
        if self._code == "stop":
            raise StopIteration
        leave(self._code)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configure(folder: Path, edits: dict[str, Any]) -> None:
    base = {"trainer.max_epochs": 2, "trainer.enable_page": False}
    (folder / "run.yaml").write_text(edited(base | edits))


def client(where: str, code: str = "0") -> dict[str, Any]:
    return one_group(of_class(f"{HERE}.Leaves", where=where, code=code))


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """The status of a command, and the only line that it leaves on stderr."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1, errors
    return ended.value.code, errors


@pytest.mark.parametrize("where", ["__init__", "training_step", "validation_step"])
def test_a_client_that_exits_is_a_mistake_of_the_user(
    where: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(folder, client(where))
    status, line = said(FIT, capsys)
    assert status == 2
    assert line.startswith("lightfed: error: model.clients: SystemExit: 0 (")
    assert "finished" not in "".join(
        path.read_text() for path in folder.glob("runs/*/environment.json")
    )


@pytest.mark.parametrize(
    ("code", "status"), [("None", 2), ("3", 3), ("256", 2), ("a text", 1), ("interrupt", 2)]
)
def test_a_status_other_than_0_stays_that_of_the_command(
    code: str, status: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(folder, client("training_step", code))
    found, line = said(FIT, capsys)
    assert found == status
    kind = "KeyboardInterrupt" if code == "interrupt" else "SystemExit"
    assert line.startswith(f"lightfed: error: model.clients: {kind}")
    assert ", after 0 of 2 rounds; " in line


def test_a_callback_that_exits_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = of_class(f"{HERE}.Callbacks", hook="on_train_epoch_end")
    configure(folder, {"trainer.callbacks": [callback]})
    status, line = said(FIT, capsys)
    assert status == 2
    assert line.startswith("lightfed: error: trainer.callbacks: SystemExit: 0 (")
    assert ", after 0 of 2 rounds; " in line


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end"])
def test_a_callback_that_raises_what_lightning_takes_for_the_end_is_an_error(
    hook: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = of_class(f"{HERE}.Callbacks", hook=hook, code="stop")
    configure(folder, {"trainer.callbacks": [callback]})
    status, line = said(FIT, capsys)
    assert status == 2
    assert "StopIteration" in line


def test_a_test_that_exits_is_not_done(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(folder, client("nowhere"))
    main(FIT)
    configure(folder, client("validation_step"))
    capsys.readouterr()
    words = ["test", "--config", "run.yaml", "--ckpt_path", "runs/run/checkpoints/last.ckpt"]
    status, line = said(words, capsys)
    assert status == 2
    assert ", before the end of the evaluation; " in line


def test_a_file_that_exits_when_it_is_imported_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "net_that_exits.py").write_text("import sys\nsys.exit(0)\n")
    configure(folder, one_group("net_that_exits.Net"))
    status, line = said(FIT, capsys)
    assert status == 2
    assert "SystemExit: 0 (net_that_exits.py:2), before anything has run; " in line


def test_help_is_no_mistake(folder: Path) -> None:
    configure(folder, client("nowhere"))
    for words in (["fit", "--help"], [*FIT, "--print_config"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code in (0, None)


@pytest.mark.parametrize("code", ["0", "at once"])
def test_a_sweep_does_not_take_an_exit_for_a_finished_run(code: str, folder: Path) -> None:
    """Where the child ends itself, only the missing end of its run is known."""
    configure(folder, client("training_step", code))
    wanted = Wanted.of(FIT)
    (outcome,) = run_all([wanted])
    assert outcome.status == (2 if code == "0" else 1)
    expected = "SystemExit: 0" if code == "0" else "the run has not finished"
    assert expected in outcome.said


def test_a_line_of_an_array_that_exits_fails(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightfed"])
    configure(folder, client("training_step"))
    (folder / "list").write_text(" ".join(FIT))
    monkeypatch.setattr(sweep, "check", lambda commands: [Wanted.of(c) for c in commands])
    status, line = said(["sweep", "list", "--line", "1"], capsys)
    assert status == 2
    assert "SystemExit: 0" in line
