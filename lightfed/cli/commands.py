"""What each word of the command line stands for: the only place of the core that names its rings.

An entry is imported when its word is used, so that no command waits for what it does not need.
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

# Commands with a parser of their own: functions that take the words after the command.
COMMANDS = {
    "report": "lightfed.lab.report.command:main",
    "configs": "lightfed.cli.shipped:main",
    "sweep": "lightfed.lab.sweep_command:main",
    "compare": "lightfed.lab.compare:main",
    "study": "lightfed.lab.study:main",
    "judge": "lightfed.lab.judge.command:main",
    "export": "lightfed.lab.sharing.command:main",
    "slurm": "lightfed.cli.shipped:slurm",
}

# Commands of Lightning's parser: the trainer that has a method of that name.
TRAINERS = {
    "fit": "lightfed.trainer:FederatedTrainer",
    "validate": "lightfed.trainer:FederatedTrainer",
    "test": "lightfed.trainer:FederatedTrainer",
    "partition": "lightfed.lab.previews.trainer:PreviewTrainer",
    "groups": "lightfed.lab.previews.trainer:PreviewTrainer",
    "plan": "lightfed.lab.previews.trainer:PreviewTrainer",
}

# Configurations that are not files, such as `--config control:DATA:STRING`, by the beginning of
# their names. A reader takes all words of a command and returns them with the configurations in
# place of the names.
CONFIGURATIONS = {
    "control:": "lightfed.algorithms.width.control:with_configurations",
}

# What `lightfed configs NAME` calls for such a name: a function that explains the name and prints
# the configuration.
EXPLANATIONS = {
    "control:": "lightfed.algorithms.width.control:explain",
}


def imported(name: str) -> Any:
    """Return the object that `module:attribute` names, imported."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def trainer_of(commands: tuple[str, ...]) -> Any:
    """Return the class of the trainer that has all of these commands as methods."""
    trainers = {TRAINERS[command] for command in commands}
    if len(trainers) == 1:
        return imported(trainers.pop())

    # The trainer of the previews is derived from the other one.
    return imported(TRAINERS["plan"])
