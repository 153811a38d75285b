"""What words of the command line stand for: the only place of the core that names its rings.

Each entry is imported when its word is used, so that no command waits for what it does not need.
"""

from importlib import import_module
from typing import Any

# Packages whose classes a configuration can name by their short name.
CATALOGUE = (
    "lightfed.algorithms",
    "lightfed.data",
    "lightfed.datasets",
    "lightfed.devices",
    "lightfed.networks",
)

# Commands without Lightning's parser: they take the words after the command.
COMMANDS = {
    "report": "lightfed.lab.report.command:main",
    "configs": "lightfed.cli.shipped:main",
    "sweep": "lightfed.lab.sweep:main",
    "compare": "lightfed.lab.compare:main",
    "study": "lightfed.lab.study:main",
    "slurm": "lightfed.cli.shipped:slurm",
}

# Commands of Lightning's parser, and the trainer that has the method of that name.
TRAINERS = {
    "fit": "lightfed.trainer:FederatedTrainer",
    "validate": "lightfed.trainer:FederatedTrainer",
    "test": "lightfed.trainer:FederatedTrainer",
    "partition": "lightfed.lab.previews.trainer:PreviewTrainer",
    "groups": "lightfed.lab.previews.trainer:PreviewTrainer",
    "plan": "lightfed.lab.previews.trainer:PreviewTrainer",
}

# Names of configurations that are no files, such as `--config control:DATA:STRING`. Each reader
# takes all words of a command and returns them with what such names stand for.
CONFIGURATIONS = {
    "control:": "lightfed.algorithms.width.control:with_configurations",
}

# What `lightfed configs NAME` does for such a name: print the configuration and what its name says.
EXPLANATIONS = {
    "control:": "lightfed.algorithms.width.control:explain",
}


def imported(name: str) -> Any:
    """Import what `module:attribute` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def trainer_of(commands: tuple[str, ...]) -> Any:
    """The trainer that has all of these commands, which is the one of the previews for several."""
    names = {TRAINERS[command] for command in commands}
    return imported(names.pop() if len(names) == 1 else TRAINERS["plan"])
