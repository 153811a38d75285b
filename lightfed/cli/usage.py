"""The help of the command itself, which needs no import of torch: that takes seconds."""

from argparse import ArgumentParser

COMMANDS = {
    "fit": "run the rounds of a configuration",
    "validate": "evaluate the server's and the clients' models of a checkpoint",
    "test": "as validate, with Lightning's test hooks",
    "partition": "print the split of the data over the clients",
    "groups": "print the layers that groups have in common (FlexiFed's trie)",
    "plan": "print speed, bytes and memory of a run on many ranks",
    "compare": "say which of two methods is better, and at what cost; or compare run folders",
    "study": "run the methods of a study on equal terms, and say whether its claims hold",
    "sweep": "run what is missing of a list of runs",
    "configs": "list the configurations in the installation, copy or explain them",
    "slurm": "copy the scripts for a SLURM cluster",
    "report": "make the page of a run folder",
}


def help_text() -> str:
    """The help of `lightfed`; that of a sub-command is its parser's."""
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
