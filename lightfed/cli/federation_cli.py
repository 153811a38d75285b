"""LightningCLI over a FederatedTrainer; its import takes the seconds that torch and Lightning take.

A process that has imported this module, and run nothing, can be forked for each of many runs.
"""

import sys
import warnings
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError, Namespace, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from lightfed.cli.catalog import walked_once
from lightfed.cli.config_files import check_arguments, check_empty_keys
from lightfed.cli.errors import class_error, parser_error, whole_key
from lightfed.data.datamodule import FederatedDataModule
from lightfed.engine.federation import Federation
from lightfed.previews.trainer import PreviewTrainer
from lightfed.utils.errors import UserError
from lightfed.utils.keys import digest, identity
from lightfed.utils.process import silence

_COMMANDS = ("fit", "validate", "test", "partition", "groups", "plan")
# Arguments of the trainer's methods that are objects, or that a command has no use for.
_NOT_WORDS = "model datamodule dataloaders train_dataloaders val_dataloaders verbose weights_only"
_SECTIONS = {"trainer": PreviewTrainer, "model": Federation, "data": FederatedDataModule}


def written(parser: LightningArgumentParser, config: Namespace) -> dict[str, Any]:
    """A configuration as primitives, from which the parser makes the same one again.

    The parser (as of 4.53) takes a text of an argument that is a function or a text, such as the
    folder of a model, for a function that it cannot write.
    """
    found: dict[str, Any] = yaml.safe_load(parser.dump(config, skip_none=False))
    return dict(_with_texts(found, config.as_dict()))


def _with_texts(dumped: Any, given: Any) -> Any:
    """The dumped value, with the given one where the parser has written an excuse for a text."""
    if isinstance(dumped, dict) and isinstance(given, dict):
        return {name: _with_texts(value, given.get(name)) for name, value in dumped.items()}
    if isinstance(dumped, list) and isinstance(given, list | tuple) and len(dumped) == len(given):
        return [_with_texts(*pair) for pair in zip(dumped, given, strict=True)]
    unwritten = isinstance(given, str) and dumped == f"Unable to serialize instance {given}"
    return given if unwritten else dumped


def command_line(arguments: list[str] | None, *, runs: bool) -> LightningCLI:
    """Run a command; `arguments` are its words, None for those of this process.

    Without `runs` it only makes the trainer, the federation and the data module.
    """
    set_parsing_settings(add_print_completion_argument=True)
    silence()
    # What libraries say of their own interfaces, too: no line of it is a user's.
    warnings.filterwarnings("ignore", module="jsonargparse")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter.*")
    words = sys.argv[1:] if arguments is None else arguments
    # A parser takes a tenth of a second: where the command comes first, only its own is made.
    commands = words[:1] if words and words[0] in _COMMANDS else _COMMANDS

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
                raise parser_error(str(error), words, _SECTIONS) from error

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
            for section, owner in _SECTIONS.items():
                check_arguments(options[section], owner, section)
            check_empty_keys(words, _SECTIONS)
            if options.trainer.name is None and options.config:
                options.trainer.name = Path(str(options.config[-1])).stem

        @override
        def instantiate_classes(self) -> None:
            options = identity(self.config[self.subcommand].as_dict())
            given = self.config[self.subcommand].as_dict()
            try:
                super().instantiate_classes()
            except (TypeError, ValueError) as error:
                refused = class_error(error)
                if refused is None:
                    raise
                raise whole_key(refused, given) from error
            trainer = cast(PreviewTrainer, self.trainer)
            if self.subcommand == "fit":
                trainer.config = written(self._parser("fit"), self.config["fit"])
            if trainer.run_logger is not None:
                trainer.run_logger.place.config = digest(options)

        @override
        def _run_subcommand(self, subcommand: str) -> None:
            if runs:
                super()._run_subcommand(subcommand)

    options: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
    with walked_once():
        return FederationCLI(
            Federation,
            FederatedDataModule,
            trainer_class=PreviewTrainer,
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={"prog": "lightfed", **options} | dict.fromkeys(commands, options),
            args=arguments,
        )
