"""The command `lightfed`.

LightningCLI over a FederatedTrainer, with errors of one line and exit status 2.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from typing import Any, cast

from typing_extensions import override

from lightfed.utils import __version__
from lightfed.utils.errors import UserError, of_users_code
from lightfed.utils.process import (
    drop_output,
    end_process,
    imports_begin,
    imports_end,
    is_first,
    report,
    silence,
)
from lightfed.utils.signals import listen

USAGE_ERROR = UserError.status

# Commands without Lightning's parser, and their modules.
_WITHOUT_A_TRAINER = {
    "report": "lightfed.report.command",
    "configs": "lightfed.cli.shipped",
    "control": "lightfed.studies.control",
    "latency": "lightfed.studies.latency",
}
_OF_THE_TRAINER = ("fit", "validate", "test", "partition", "groups", "plan")
# Arguments of the trainer's methods that are objects, or that a command has no use for.
_NOT_WORDS = "model datamodule dataloaders train_dataloaders val_dataloaders verbose weights_only"


def main(argv: list[str] | None = None) -> None:
    """Run the command line; errors that a user can cause print one line, not a traceback.

    `argv` are the words of a call from Python; None for the command itself, which ends the process.
    """
    if argv is not None:
        _main(argv, from_python=True)
        return
    if sys.argv[1:2] == ["fit"]:
        listen()  # the import of torch alone takes seconds
    sys.path.append(os.getcwd())  # last: a file there must not hide an installed package
    imports_begin()
    status: Any = 0
    try:
        _main(sys.argv[1:], from_python=False)
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
    end_process(status)
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
        if arguments and arguments[0] in _WITHOUT_A_TRAINER:
            command = import_module(_WITHOUT_A_TRAINER[arguments[0]])
            imports_end()
            if arguments[0] == "latency":
                _call(command.latency, arguments[1:])
                sys.exit(0)
            sys.exit(command.main(arguments[1:]))
        _run(arguments, from_python=from_python)
    except UserError as error:
        _leave()
        report(error)
        sys.exit(error.status)
    _leave()


def _run(arguments: list[str], *, from_python: bool) -> None:
    from lightfed.cli.config_files import check_files, with_items
    from lightfed.cli.shipped import with_paths
    from lightfed.studies.control import with_configurations

    try:
        words = with_paths(arguments)
        check_files(words)
        words = with_configurations(with_items(words))
        if words[:1] == ["plan"]:
            words = [word.replace("--world-size", "--world_size", 1) for word in words]
        given = words if from_python or words != arguments else None
        _command_line(given)
    except UserError:
        raise
    except Exception as error:
        from lightfed.cli.errors import run_error

        refused = run_error(error) or of_users_code(error)
        if refused is None:
            raise  # an error of the program
        raise refused from error


def _call(command: Callable[..., None], words: list[str]) -> None:
    """Run a function with its parameters as options."""
    from jsonargparse import ArgumentError, auto_cli

    prog = f"lightfed {command.__name__}"
    try:
        auto_cli(command, args=words, as_positional=False, prog=prog, exit_on_error=False)
    except ArgumentError as error:
        from lightfed.cli.errors import parser_error

        raise parser_error(str(error), words, {"": command}) from error


def _command_line(arguments: list[str] | None) -> None:
    import yaml  # type: ignore[import-untyped]
    from jsonargparse import ArgumentError, Namespace, set_parsing_settings
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    import lightfed.cli.catalog  # noqa: F401 - short class names in a configuration are those of imported classes
    from lightfed.cli.config_files import check_arguments
    from lightfed.data.datamodule import FederatedDataModule
    from lightfed.engine.federation import Federation
    from lightfed.previews.trainer import PreviewTrainer
    from lightfed.runs.federation_state import config_digest

    imports_end()
    set_parsing_settings(add_print_completion_argument=True)
    _silence()

    sections = {"trainer": PreviewTrainer, "model": Federation, "data": FederatedDataModule}
    words = sys.argv[1:] if arguments is None else arguments
    # A parser takes a tenth of a second: where the command comes first, only its own is made.
    commands = words[:1] if words and words[0] in _OF_THE_TRAINER else _OF_THE_TRAINER

    class FederationCLI(LightningCLI):
        @staticmethod
        @override
        def subcommands() -> dict[str, set[str]]:
            return {command: set(_NOT_WORDS.split()) for command in commands}

        @override
        def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            """Add none: model.seed is the only seed."""

        @override
        def _set_seed(self) -> None:
            """Do nothing: no draw comes from global random state."""

        @override
        def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
            try:
                super().parse_arguments(parser, args)
            except (ArgumentError, UnicodeDecodeError) as error:
                from lightfed.cli.errors import parser_error

                raise parser_error(str(error), words, sections) from error

        @override
        def _parse_ckpt_path(self) -> None:
            """Do nothing: a checkpoint holds no configuration."""

        @override
        def before_instantiate_classes(self) -> None:
            options = self.config[self.subcommand]
            if not isinstance(options.trainer, Namespace):
                found = f"{options.trainer} instead of keys"
                raise UserError("trainer", found, "write keys below it, or leave it out")
            if self.subcommand == "plan":  # of a run on any cluster, planned on any machine
                here = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "precision": "32"}
                options.trainer.update(Namespace(here))
            for section, owner in sections.items():
                check_arguments(options[section], owner, section)
            if options.trainer.name is None and options.config:
                options.trainer.name = Path(str(options.config[-1])).stem

        @override
        def instantiate_classes(self) -> None:
            digest = config_digest(self.config[self.subcommand].as_dict())
            try:
                super().instantiate_classes()
            except ValueError as error:
                from lightfed.cli.errors import class_error

                refused = class_error(error, self.config[self.subcommand])
                if refused is None:
                    raise
                raise refused from error
            trainer = cast(PreviewTrainer, self.trainer)
            if self.subcommand == "fit":
                parser, config = self._parser("fit"), self.config["fit"]
                trainer.config = yaml.safe_load(parser.dump(config, skip_none=False))
            if trainer.run_logger is not None:
                trainer.run_logger.place.config = digest

    options: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
    FederationCLI(
        Federation,
        FederatedDataModule,
        trainer_class=PreviewTrainer,
        save_config_callback=None,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        parser_kwargs={"prog": "lightfed", **options} | dict.fromkeys(commands, options),
        args=arguments,
    )


def _silence() -> None:
    """Hide what libraries say of their own interfaces, too: no line of it is a user's."""
    import warnings

    silence()
    warnings.filterwarnings("ignore", module="jsonargparse")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter.*")


def _unprinted(error: OSError) -> int:
    """Print one line about standard output, unless its reader has seen enough; the exit status."""
    if not isinstance(error, BrokenPipeError):
        found, fix = f"it cannot be written ({error.strerror})", "free space, or send it elsewhere"
        report(UserError("stdout", found, fix))
    return 1


def _stopped() -> int:
    """Print one line on the first rank after Ctrl-C outside a run; the exit status."""
    if is_first():
        print("lightfed: stopped by SIGINT; the same command starts again", file=sys.stderr)
    return 128 + SIGINT


def _leave() -> None:
    """Leave the process group; all ranks are at the end or at the same error, in no collective."""
    if "torch" in sys.modules:
        from lightfed.distributed.collectives import leave

        leave()
