"""The command `lightfed`, with errors of one line and exit status 2."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from signal import SIG_IGN, SIGINT, signal
from typing import TYPE_CHECKING, Any

from lightfed.cli.commands import COMMANDS, CONFIGURATIONS, TRAINERS, imported
from lightfed.distributed.slurm import check_variables
from lightfed.utils import __version__
from lightfed.utils.errors import Exited, UserError, is_raised_by_user, of_users_code
from lightfed.utils.process import (
    drop_output,
    imports_begin,
    imports_end,
    is_first,
    report,
)
from lightfed.utils.signals import listen

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

USAGE_ERROR = UserError.status

# Commands that train, so that a signal has to be noted from the first moment.
_TRAINING_COMMANDS = ("fit", "sweep", "compare", "study", "judge")

# Commands that read no variable of a launcher.
_COMMANDS_WITHOUT_RANKS = ("report", "configs", "export")


def main(argv: list[str] | None = None) -> None:
    """Run the command line.

    An error that a user can cause prints one line and no traceback.

    Args:
        argv: The words of a call from Python. None for the words of this process, which then ends
            with the command.
    """
    if argv is not None:
        _main(argv, from_python=True)
        return

    words = sys.argv[1:]
    if words and words[0] in _TRAINING_COMMANDS:
        # Now, because the import of torch alone takes seconds.
        listen()

    # Last, because a file in this folder must not hide an installed package.
    sys.path.append(os.getcwd())

    imports_begin()
    run_program(partial(_main, words, from_python=False))


def run_program(program: Callable[[], object]) -> None:
    """Run a program and end the process, with one line for every error that a user can cause."""
    status: Any = 0
    try:
        program()
    except UserError as error:
        report(error)
        status = error.status
    except KeyboardInterrupt:
        status = _report_stop()
    except SystemExit as exit_:
        status = exit_.code
        # Lightning turns Ctrl-C into an exit with status 1.
        if status == 1 and isinstance(exit_.__context__, KeyboardInterrupt):
            status = _report_stop()
        if not isinstance(status, int):
            raise
    except OSError:
        output_error = drop_output("\n")
        if output_error is None:
            # The error is not about standard output.
            raise
        status = _report_output(output_error)

    # What has been printed may still be in Python's buffer.
    output_error = drop_output()
    if output_error is not None and status == 0:
        status = _report_output(output_error)

    # Everything has been said: another Ctrl-C must not add a traceback.
    signal(SIGINT, SIG_IGN)
    sys.exit(status)


def _main(arguments: list[str], *, from_python: bool) -> None:
    """Run a command; an error of the user ends the process with its line and status."""
    command = arguments[0] if arguments else None

    if command in ("-h", "--help"):
        from lightfed.cli.usage import help_text

        print(help_text(), end="")
        return

    if arguments == ["--version"]:
        print(f"lightfed {__version__}")
        return

    try:
        _check_command(command)
        if command not in _COMMANDS_WITHOUT_RANKS:
            check_variables(os.environ)

        if command in COMMANDS:
            run_command = imported(COMMANDS[command])
            imports_end()
            sys.exit(run_command(arguments[1:]))

        _run(arguments, from_python=from_python)
    except UserError as error:
        _leave_process_group()
        report(error)
        sys.exit(error.status)

    _leave_process_group()


def _check_command(command: str | None) -> None:
    """Refuse a word that is no command; the parser would list only Lightning's commands.

    An option can stand before the command. Then the parser finds the command.
    """
    from lightfed.cli.usage import no_command, unknown_command

    if command is None:
        raise no_command()

    is_option = command.startswith("-")
    if not is_option and command not in COMMANDS and command not in TRAINERS:
        raise unknown_command(command)


def _run(arguments: list[str], *, from_python: bool, runs: bool = True) -> "LightningCLI":
    """Parse the words of a command of Lightning's parser, and run it.

    Args:
        arguments: The words of the command.
        from_python: Whether they come from a call and not from the words of this process.
        runs: Whether to run the command, or only to make its objects.

    Returns:
        The objects of the command.

    Raises:
        UserError: The user has made a mistake, or the user's code has raised or exited.
    """
    from lightfed.cli.config_files import check_files
    from lightfed.cli.list_items import with_items
    from lightfed.cli.shipped import with_paths

    try:
        words = with_paths(arguments)
        check_files(words)
        words = with_items(words)
        for prefix, reader in CONFIGURATIONS.items():
            if any(prefix in word for word in words):
                words = imported(reader)(words)

        if words[:1] == ["plan"]:
            # The parser names an option as its argument is named in Python.
            words = [word.replace("--world-size", "--world_size", 1) for word in words]
        if words[:1] in (["plan"], ["partition"], ["groups"], ["fit"]):
            # Options of this parser take values; this one needs none, as in other commands.
            words = ["--json=true" if word == "--json" else word for word in words]

        from lightfed.cli.federation_cli import command_line

        imports_end()
        # Lightning warns of words from a call, so those of this process are left to it.
        are_of_process = not from_python and words == arguments
        return command_line(None if are_of_process else words, runs=runs)
    except UserError:
        raise
    except SystemExit as exit_:
        # The parser ends the process after --help; a user's file must not do so unnoticed.
        moments = getattr(exit_, "__notes__", [])
        if moments or is_raised_by_user(exit_):
            when = moments[0] if moments else "before anything has run"
            raise Exited.by(exit_, when=when) from exit_
        raise
    except Exception as error:
        from lightfed.cli.errors import run_error

        refused = run_error(error) or of_users_code(error)
        if refused is None:
            # An error of the program: its traceback is needed.
            raise
        raise refused from error


def run_words(words: Sequence[str]) -> None:
    """Run one command in the process of another one."""
    _main(list(words), from_python=False)


def prepared(words: Sequence[str]) -> "LightningCLI":
    """Return the objects of a command without running it.

    Raises:
        UserError: They cannot be made.
    """
    return _run(list(words), from_python=True, runs=False)


def _report_output(error: OSError) -> int:
    """Print one line about standard output and return the exit status.

    A reader that has seen enough, such as `head`, is no reason for a line.
    """
    if not isinstance(error, BrokenPipeError):
        report(
            UserError(
                key="stdout",
                found=f"it cannot be written ({error.strerror})",
                fix="free space, or send it elsewhere",
            )
        )
    return 1


def _report_stop() -> int:
    """Print one line on the first rank, and return the exit status of a process that is stopped.

    The user has pressed Ctrl-C outside of a run, or for the second time in it.
    """
    if is_first():
        print(
            "lightfed: stopped by SIGINT; run the same command to start again, "
            "and with --ckpt_path last to continue from its last checkpoint",
            file=sys.stderr,
        )
    return 128 + SIGINT


def _leave_process_group() -> None:
    """Leave the process group: all ranks are at the end or at the same error, in no collective."""
    # Without torch there is no group, and its import would take seconds.
    if "torch" in sys.modules:
        from lightfed.distributed.collectives import leave

        leave()
