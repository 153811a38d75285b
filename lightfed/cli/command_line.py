"""The command `lightfed`, with errors of one line and exit status 2."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from signal import SIG_IGN, SIGINT, signal
from typing import TYPE_CHECKING, Any

from lightfed.cli.commands import COMMANDS, CONFIGURATIONS, imported
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

# Commands that read no variable of a launcher.
_WITHOUT_RANKS = (["report"], ["configs"])


def main(argv: list[str] | None = None) -> None:
    """Run the command line; errors that a user can cause print one line, not a traceback.

    `argv` are the words of a call from Python; None for the command itself, which ends the process.
    """
    if argv is not None:
        _main(argv, from_python=True)
        return
    if sys.argv[1:2] in (["fit"], ["sweep"], ["compare"], ["study"]):
        listen()  # the import of torch alone takes seconds
    sys.path.append(os.getcwd())  # last: a file there must not hide an installed package
    imports_begin()
    run_program(partial(_main, sys.argv[1:], from_python=False))


def run_program(program: Callable[[], object]) -> None:
    """Run a program and end the process, with one line for every error that a user can cause."""
    status: Any = 0
    try:
        program()
    except UserError as error:
        report(error)
        status = error.status
    except KeyboardInterrupt:
        status = _stopped()
    except SystemExit as leaving:
        status = leaving.code
        if status == 1 and isinstance(leaving.__context__, KeyboardInterrupt):  # by Lightning
            status = _stopped()
        if not isinstance(status, int):
            raise
    except OSError:
        if (failed := drop_output("\n")) is None:  # it is not about the output
            raise
        status = _unprinted(failed)
    if (failed := drop_output()) is not None:
        status = status or _unprinted(failed)
    signal(SIGINT, SIG_IGN)  # all has been said
    sys.exit(status)


def _main(arguments: list[str], *, from_python: bool) -> None:
    if arguments[:1] in (["-h"], ["--help"]):
        from lightfed.cli.usage import help_text

        print(help_text(), end="")
        return
    if arguments == ["--version"]:
        print(f"lightfed {__version__}")
        return
    try:
        if arguments[:1] not in _WITHOUT_RANKS:
            check_variables(os.environ)
        if arguments and arguments[0] in COMMANDS:
            command = imported(COMMANDS[arguments[0]])
            imports_end()
            sys.exit(command(arguments[1:]))
        _run(arguments, from_python=from_python)
    except UserError as error:
        _leave()
        report(error)
        sys.exit(error.status)
    _leave()


def _run(arguments: list[str], *, from_python: bool, runs: bool = True) -> "LightningCLI":
    from lightfed.cli.config_files import check_files, with_items
    from lightfed.cli.shipped import with_paths

    try:
        words = with_paths(arguments)
        check_files(words)
        words = with_items(words)
        for prefix, reader in CONFIGURATIONS.items():
            if any(prefix in word for word in words):
                words = imported(reader)(words)
        if words[:1] == ["plan"]:
            words = [word.replace("--world-size", "--world_size", 1) for word in words]
        given = words if from_python or words != arguments else None
        from lightfed.cli.federation_cli import command_line

        imports_end()
        return command_line(given, runs=runs)
    except UserError:
        raise
    except SystemExit as leaving:
        # The parser ends the process after --help; a user's file must not do so unnoticed.
        moments = getattr(leaving, "__notes__", [])
        if moments or is_raised_by_user(leaving):
            when = moments[0] if moments else "before anything has run"
            raise Exited.by(leaving, when=when) from leaving
        raise
    except Exception as error:
        from lightfed.cli.errors import run_error

        refused = run_error(error) or of_users_code(error)
        if refused is None:
            raise  # an error of the program
        raise refused from error


def run_words(words: Sequence[str]) -> None:
    """Run one command in the process of another one."""
    _main([*words], from_python=False)


def prepared(words: Sequence[str]) -> "LightningCLI":
    """The objects of a command, made and not run; a UserError if they cannot be made."""
    return _run([*words], from_python=True, runs=False)


def _unprinted(error: OSError) -> int:
    """Print one line about standard output, unless its reader has seen enough; the exit status."""
    if not isinstance(error, BrokenPipeError):
        found, fix = f"it cannot be written ({error.strerror})", "free space, or send it elsewhere"
        report(UserError("stdout", found, fix))
    return 1


def _stopped() -> int:
    """Print one line on the first rank after Ctrl-C outside a run, or a second one in it."""
    if is_first():
        said = "the same command starts again, with --ckpt_path last from its last checkpoint"
        print(f"lightfed: stopped by SIGINT; {said}", file=sys.stderr)
    return 128 + SIGINT


def _leave() -> None:
    """Leave the process group; all ranks are at the end or at the same error, in no collective."""
    if "torch" in sys.modules:
        from lightfed.distributed.collectives import leave

        leave()
