"""The help of the command itself, which needs no import of torch: that takes seconds."""

import re
import textwrap
from argparse import ArgumentParser
from pkgutil import resolve_name

COMMANDS = {
    "fit": "run the rounds of a configuration",
    "validate": "evaluate the server's and the clients' models of a checkpoint",
    "test": "as validate, with Lightning's test hooks",
    "partition": "print the split of the data over the clients",
    "groups": "print the layers that groups have in common (FlexiFed's trie)",
    "plan": "print balance, bytes and memory of a run on many ranks",
    "configs": "list the configurations in the installation, or copy them",
    "report": "make the page of a run folder, or compare several",
    "control": "explain a control string of HeteroFL",
    "latency": "analyse the time saved by waiting only for the first servers",
}


_CLASSES = re.compile(r",\s+known\s+subclasses:([^)]*)")
_MANY = 50  # any torch module may be a client's
_NETWORKS = "lightfed.models.networks"


def brief(text: str) -> str:
    """The help of a class, with lightfed's networks where it lists all modules imported."""

    def own(found: re.Match[str]) -> str:
        names = "".join(found[1].split()).split(",")
        if len(names) < _MANY:
            return found[0]
        ours = [name for name in names if name.startswith("lightfed.") and name.count(".") == 1]
        networks = [n for n in ours if resolve_name(n).__module__.startswith(_NETWORKS)]
        said = f"such as {', '.join(networks)}, or any other by its path"
        return ",\n" + textwrap.indent(textwrap.fill(said, 54), " " * 24)

    return _CLASSES.sub(own, text)


def help_text() -> str:
    """The help of `lightfed`; that of a sub-command is its parser's."""
    parser = ArgumentParser(
        "lightfed",
        description="Train federations of heterogeneous clients.",
        epilog="`lightfed COMMAND --help` lists the arguments of a command. "
        "`--config lightfed:NAME` uses a configuration of `lightfed configs`, "
        "`--config control:DATA:STRING` that of a control string.",
    )
    parser.add_argument("-c", "--config", help="a YAML file with a section for each command")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--print_completion", metavar="SHELL", help="print a completion script")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser.format_help()
