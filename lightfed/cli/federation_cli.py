"""LightningCLI over a FederatedTrainer; its import takes the seconds that torch and Lightning take.

A process that has imported this module, and run nothing, can be forked for each of many runs.
"""

import re
import sys
import warnings
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.cli.argument_checks import check_arguments
from lightfed.cli.catalog import subclasses, walked_once
from lightfed.cli.commands import TRAINERS, trainer_of
from lightfed.cli.dropped_keys import beside_class_path, check_empty_keys
from lightfed.cli.errors import class_error, parser_error, whole_key
from lightfed.cli.yaml_words import install
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.dataset import Dataset
from lightfed.federation import Federation
from lightfed.trainer import FederatedTrainer
from lightfed.utils.errors import UserError
from lightfed.utils.keys import digest, identity
from lightfed.utils.process import silence

# Arguments of the trainer's methods that are objects, or that a command has no use for.
_ARGUMENTS_WITHOUT_OPTION = {
    "model",
    "datamodule",
    "dataloaders",
    "train_dataloaders",
    "val_dataloaders",
    "verbose",
    "weights_only",
}

# `plan` plans a run for any cluster on any machine, so it makes a trainer that all machines have.
_TRAINER_OF_PLAN = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "precision": "32"}

# The same values as those of SafeLoader, in a tenth of the time, where PyYAML has its C library.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# What jsonargparse writes in place of a value that it cannot write.
_EXCUSE = "Unable to serialize instance"

_SECTIONS = {"trainer": FederatedTrainer, "model": Federation, "data": FederatedDataModule}


class _Parsers(NamedTuple):
    """What LightningCLI keeps of a parser that it has made.

    Attributes:
        parser: The parser of all commands.
        of_commands: The parser of each command.
        arguments: The arguments of the trainer's method that each command takes as options.
    """

    parser: LightningArgumentParser
    of_commands: dict[str, LightningArgumentParser]
    arguments: dict[str, list[str]]


# The parsers that this process has made, by what decides their options.
_parsers: dict[Any, _Parsers] = {}


def as_written(parser: ArgumentParser, config: Namespace) -> dict[str, Any]:
    """Return a configuration as its run's config.yaml has it: plain values, lists and mappings.

    A run is known by these values. Those of the parser differ between a default and the same value
    read from a file: one can be a tuple, the other a list. The checkpoint of this command and its
    pause are left out, because a run that is made from the file later starts anew, and runs to its
    end, unless it says otherwise.
    """
    # The values come from the parser, which has checked them. One that has no text still raises:
    # it is no plain value.
    plain = _with_plain_words(config)
    text = parser.dump(plain, skip_none=False, skip_validation=True)
    written = yaml.load(text, Loader=_LOADER)
    repaired: dict[str, Any] = _repaired(written, plain.as_dict())
    repaired.pop("ckpt_path", None)
    repaired.pop("pause_after", None)
    return repaired


def _with_plain_words(value: Any) -> Any:
    """Return a parsed value with the words of enumerations in place of their members.

    The default of an argument of type `str` can be a member, as that of Lightning's `Timer`.
    jsonargparse (as of 4.53) does not look for one there, and YAML cannot write it.
    """
    if isinstance(value, Enum) and isinstance(value, str):
        return value.value
    if isinstance(value, Namespace):
        return Namespace({key: _with_plain_words(item) for key, item in vars(value).items()})
    if type(value) is dict:
        return {key: _with_plain_words(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_plain_words(item) for item in value)
    return value


def _repaired(written: Any, parsed: Any) -> Any:
    """Return what jsonargparse (as of 4.53) has written, without what it could not write.

    For an argument of type `Callable | str` it writes an excuse in place of a word; the word is
    put back. An excuse for any other object belongs to a default that has no name, such as a
    lambda. It is left out, so that the default applies again.
    """
    if isinstance(parsed, str):
        return str(parsed)
    if isinstance(written, list) and isinstance(parsed, list | tuple):
        pairs = zip(written, parsed, strict=True)
        return [_repaired(written_item, parsed_item) for written_item, parsed_item in pairs]
    if not isinstance(written, dict) or not isinstance(parsed, dict):
        return written

    kept = {}
    for key, value in written.items():
        is_excuse = isinstance(value, str) and value.startswith(_EXCUSE)
        if not is_excuse or isinstance(parsed.get(key), str):
            kept[key] = _repaired(value, parsed.get(key))
    return kept


def run_name(file: Path, method: str) -> str:
    """Return the name of the run of a configuration file, which is usually that of the file.

    In `configs/` a file and its folder name an algorithm and a data set: `digits/fedavg.yaml`,
    `heterofl/mnist.yaml`. Their runs are named by both, the algorithm that is trained first:
    `fedavg-digits`, `heterofl-mnist`. A file in the folder of an algorithm that names one itself,
    such as `dispfl/digits-fedavg.yaml`, says enough.

    Args:
        file: The configuration.
        method: The name of the class of its algorithm.
    """
    algorithms = {kind.__name__.lower() for kind in subclasses(Algorithm)}
    data_sets = {kind.__name__.lower() for kind in subclasses(Dataset)}
    folder = file.absolute().parent.name

    if folder in data_sets and file.stem in algorithms:
        return f"{method.lower()}-{folder}"

    words = re.split(r"[^a-z0-9]+", file.stem.lower())
    names_an_algorithm = any(word in algorithms or word == method.lower() for word in words)
    if folder in algorithms and not names_an_algorithm:
        return f"{method.lower()}-{file.stem}"
    return file.stem


def command_line(arguments: list[str] | None, *, runs: bool) -> LightningCLI:
    """Parse the words of a command of Lightning's parser, and run it.

    Args:
        arguments: The words of the command; None for those of this process.
        runs: Whether to run the command, or only to make its trainer, federation and data module.

    Returns:
        The objects of the command.

    Raises:
        UserError: The words ask for something that cannot be made.
    """
    install()
    set_parsing_settings(add_print_completion_argument=True)

    # A user cannot act on what libraries say about their own interfaces.
    silence()
    warnings.filterwarnings("ignore", module="jsonargparse")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter.*")

    words = sys.argv[1:] if arguments is None else arguments

    # The parser of a command takes a tenth of a second to make. If the command comes first, we
    # know that only its own is needed.
    commands = tuple(TRAINERS)
    if words and words[0] in TRAINERS:
        commands = (words[0],)

    class FederationCLI(LightningCLI):
        @staticmethod
        @override
        def subcommands() -> dict[str, set[str]]:
            return {command: set(_ARGUMENTS_WITHOUT_OPTION) for command in commands}

        @override
        def setup_parser(
            self,
            add_subcommands: bool,
            main_kwargs: dict[str, Any],
            subparser_kwargs: dict[str, Any],
        ) -> None:
            """Make the parser, or take that of an earlier command of this process.

            Lists of commands are read in one process, and to make the parser is a fifth of what
            it takes to read one.
            """
            key = (commands, self.trainer_class, self._model_class, self._datamodule_class)
            made = _parsers.get(key)
            if made is None:
                super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
                _parsers[key] = _Parsers(
                    self.parser, self._subcommand_parsers, self._subcommand_method_arguments
                )
                return
            self.parser, self._subcommand_parsers, self._subcommand_method_arguments = made

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
                refused = beside_class_path(words)
                if refused is None:
                    refused = parser_error(str(error), words, _SECTIONS)
                raise refused from error

        @override
        def _parse_ckpt_path(self) -> None:
            """Do nothing: a checkpoint holds no configuration."""

        @override
        def before_instantiate_classes(self) -> None:
            options = self.config[self.subcommand]
            if not isinstance(options.trainer, Namespace):
                raise UserError(
                    key="trainer",
                    found=f"{options.trainer} instead of keys",
                    fix="write keys below it, or leave it out",
                )
            if self.subcommand == "plan":
                options.trainer.update(Namespace(_TRAINER_OF_PLAN))

            for section, owner in _SECTIONS.items():
                check_arguments(options[section], owner, section)
            check_empty_keys(words, options)

            if options.trainer.name is None and options.config:
                method = options.model.algorithm.class_path.rpartition(".")[2]
                options.trainer.name = run_name(Path(str(options.config[-1])), method)

        @override
        def instantiate_classes(self) -> None:
            # Before the objects are made: their constructors may change what they are given.
            configuration = as_written(self._parser(self.subcommand), self.config[self.subcommand])

            try:
                super().instantiate_classes()
            except (TypeError, ValueError) as error:
                refused = class_error(error)
                if refused is None:
                    raise
                raise whole_key(refused, configuration) from error

            trainer = cast(FederatedTrainer, self.trainer)
            if self.subcommand == "fit":
                trainer.config = configuration
            if trainer.run_logger is not None:
                trainer.run_logger.place.config = digest(identity(configuration))

        @override
        def _run_subcommand(self, subcommand: str) -> None:
            if runs:
                super()._run_subcommand(subcommand)

    # Errors are raised, so that one line answers them. Abbreviations would hide mistyped options.
    parser_options: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
    options_of_commands = dict.fromkeys(commands, parser_options)

    with walked_once():
        return FederationCLI(
            Federation,
            FederatedDataModule,
            trainer_class=trainer_of(commands),
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={"prog": "lightfed", **parser_options, **options_of_commands},
            args=arguments,
        )
