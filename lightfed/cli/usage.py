"""The commands and the help of `lightfed` itself, without an import of torch: it takes seconds."""

from argparse import ArgumentParser
from difflib import get_close_matches

from lightfed.utils.errors import UserError

COMMANDS = {
    "fit": "train a federation",
    "validate": "evaluate the models of a checkpoint",
    "test": "the same as validate, with Lightning's test hooks",
    "partition": "print how the data are split among the clients",
    "groups": "print which layers client groups share (FlexiFed's trie)",
    "plan": "print bytes, memory and speed of a run on many ranks",
    "compare": "say which of two methods is better, by how much and at what cost",
    "study": "run the methods of a study on equal terms, and say whether its claims hold",
    "judge": "say whether a new method is better than a known one, on federations that are there",
    "sweep": "run the experiments in a file, skipping finished ones",
    "configs": "list, copy or explain the configurations in the installation",
    "slurm": "copy the scripts for a SLURM cluster",
    "report": "make the page of a run folder",
    "export": "write a folder to share: a model of a finished run, with a model card",
}


def help_text() -> str:
    """Return the help of `lightfed`; the help of a command is its own parser's."""
    parser = ArgumentParser(
        "lightfed",
        description="Train federations of heterogeneous clients.",
        epilog="`lightfed COMMAND --help` lists the arguments of a command. "
        "`--config lightfed:NAME` uses a configuration of `lightfed configs`, "
        "`--config control:DATA:STRING` that of a control string of HeteroFL.",
    )
    parser.add_argument("-c", "--config", help="a YAML file with a section for each command")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--print_completion", metavar="SHELL", help="print a completion script")

    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser.format_help()


def unknown_command(name: str) -> UserError:
    """Return the error about a command that does not exist."""
    nearest = get_close_matches(name, COMMANDS, n=1)
    fix = f"did you mean {nearest[0]}?" if nearest else _list_of_commands()
    return UserError("lightfed", found=f"no command {name!r}", fix=fix)


def no_command() -> UserError:
    """Return the error about words without a command."""
    return UserError("lightfed", found="no command", fix=_list_of_commands())


def _list_of_commands() -> str:
    return f"use one of {', '.join(COMMANDS)}, or see --help"
