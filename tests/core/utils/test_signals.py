"""Signals are taken down from the first statement on, and obeyed when the state is on disk."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as L
import pytest
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.cli import command_line, commands
from lightfed.cli.usage import COMMANDS
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.utils import signals
from tests.promises.refusals.mistakes import edited
from tests.small import SGD_HALF, Line, fit, random_data

SECONDS = 120  # for what takes about ten


@pytest.fixture(autouse=True)
def deaf() -> Iterator[None]:
    """No test leaves a handler or a signal behind."""
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    before = {n: signal.getsignal(n) for n in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signals.forget()


def test_a_script_gets_its_handlers_back_and_no_old_signal() -> None:
    def theirs(number: int, frame: object) -> None:
        raise AssertionError("not during the run")

    signal.signal(signal.SIGUSR1, theirs)
    before = signal.getsignal(signal.SIGTERM)
    with signals.listening():
        signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is theirs
    assert signal.getsignal(signal.SIGTERM) is before
    assert signals.asked() is None


def test_what_came_while_the_command_started_counts_in_the_run() -> None:
    signals.listen()
    signal.raise_signal(signal.SIGUSR1)
    signals.listen()
    with signals.listening():
        assert signals.asked() == signal.SIGUSR1
    assert signals.asked() == signal.SIGUSR1  # still to be obeyed


def test_outside_the_main_thread_nobody_listens() -> None:
    heard: list[object] = []

    def script() -> None:
        with signals.listening():
            heard.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=script)
    thread.start()
    thread.join()
    assert heard == [signal.getsignal(signal.SIGUSR1)]


IMPORTS = """\
import sys
from lightfed.cli.command_line import main

def imported(*names):
    return {*names} & {*sys.modules}

heavy = ("torch", "lightning", "numpy", "jsonargparse")
assert not imported(*heavy), "before it listens"
main(["--help"])
assert not imported(*heavy), "for its help"
for command in ("report", "configs", "compare", "sweep"):
    try:
        main([command, "--help"])
    except SystemExit as done:
        assert not done.code, done.code
    assert not imported("torch", "lightning", "matplotlib"), command
"""


def test_the_command_imports_nothing_heavy_before_it_listens_and_for_its_help() -> None:
    """Nor do commands without a trainer before their arguments are parsed."""
    program = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)
    assert done.stdout.count("usage: lightfed ") >= 4


def test_the_help_names_all_commands() -> None:
    assert set(COMMANDS) == {*commands.COMMANDS, *commands.TRAINERS}
    assert all(callable(commands.imported(program)) for program in commands.COMMANDS.values())
    for name in commands.TRAINERS:
        assert callable(getattr(commands.trainer_of((name,)), name))


def _importing_torch(process: "subprocess.Popen[str]") -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def test_a_signal_during_the_imports_stops_the_run_when_its_state_is_saved(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(edited({"trainer.max_epochs": 500}))
    with subprocess.Popen(
        [sys.executable, "-m", "lightfed", "fit", "--config", "run.yaml"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        limit = time.monotonic() + SECONDS
        while not _importing_torch(process) and time.monotonic() < limit:
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR1)
        errors = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 128 + signal.SIGUSR1, errors
    said = "lightfed: stopped by SIGUSR1 after 0 of 500 rounds"
    assert errors.startswith(said), errors
    assert "--ckpt_path last" in errors
    assert (tmp_path / "runs" / "run" / "checkpoints" / "last.ckpt").is_file()


class Asks(L.Callback):
    """Has a signal sent in the first round."""

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        signal.raise_signal(signal.SIGTERM)


def line_federation() -> Federation:
    return Federation(FedAvg(), [ClientGroup(2, Line)], optimizer=SGD_HALF)


@pytest.mark.parametrize("kept", [True, False])
def test_a_script_ends_with_the_status_of_the_signal(
    kept: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"callbacks": [Asks()], "enable_checkpointing": kept}
    with pytest.raises(SystemExit) as left:
        fit(line_federation(), random_data([4, 4], features=2), tmp_path, rounds=9, **flags)
    assert left.value.code == 128 + signal.SIGTERM
    said = capsys.readouterr().err
    assert f"lightfed: stopped by SIGTERM after {0 if kept else 1} of 9 rounds" in said
    assert ("nothing is saved" in said) is not kept
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file() is kept
    assert signals.asked() is None


def test_an_interrupt_from_the_keyboard_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It waits for the round, whose sessions are kept."""

    class Interrupts(L.Callback):
        @override
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 1:
                signal.raise_signal(signal.SIGINT)

    data, handler = random_data([4, 4], features=2), signal.default_int_handler
    signal.signal(signal.SIGINT, handler)  # it is ignored in the background
    with pytest.raises(SystemExit) as left:
        fit(line_federation(), data, tmp_path, rounds=9, callbacks=[Interrupts()])
    assert left.value.code == 128 + signal.SIGINT
    said = capsys.readouterr().err
    assert said.startswith("lightfed: stopped by SIGINT after 1 of 9 rounds")
    assert "--ckpt_path last" in said
    assert "of the next" in said
    assert signal.getsignal(signal.SIGINT) is handler
    assert signals.asked() is None


@pytest.mark.parametrize("lightning", [True, False])
def test_an_interrupt_outside_a_run_is_one_line(
    lightning: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if lightning:
                sys.exit(1)  # as Lightning does
            raise

    monkeypatch.setattr(command_line, "_run", interrupted)
    monkeypatch.setattr(command_line, "imports_begin", lambda: None)
    monkeypatch.setattr(sys, "argv", ["lightfed", "validate"])
    with pytest.raises(SystemExit) as left:
        command_line.main()
    assert left.value.code == 128 + signal.SIGINT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lightfed: stopped by SIGINT; ")
