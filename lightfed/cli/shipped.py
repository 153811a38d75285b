"""The configurations in the installation: `lightfed configs`, and `--config lightfed:NAME`."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten

from lightfed.cli.commands import EXPLANATIONS, imported
from lightfed.utils.errors import OneLineParser, UserError

PREFIX = "lightfed:"

# In the repository, both are links to the folders of these names at its top.
ROOT = Path(__file__).parents[1] / "configs"
SLURM = Path(__file__).parents[1] / "slurm"

_MOST_SUGGESTIONS = 4


def main(argv: Sequence[str]) -> int:
    """Run `lightfed configs`.

    Args:
        argv: The words after `lightfed configs`.

    Returns:
        The exit status.

    Raises:
        UserError: There is no configuration of that name, or it has been copied already.
    """
    if len(argv) == 1:
        for prefix, explain in EXPLANATIONS.items():
            if argv[0].startswith(prefix):
                imported(explain)(argv[0].removeprefix(prefix))
                return 0

    parser = OneLineParser(
        "lightfed configs",
        description="List the configurations in the installation, or copy them.",
        epilog="`lightfed configs control:DATA:STRING` explains a control string of HeteroFL and "
        "prints its configuration.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    copy = commands.add_parser("copy", help="copy a configuration or a folder of them to configs/")
    copy.add_argument("name", help="such as heterofl, or digits/fedavg")
    options = parser.parse_args(argv)

    if options.command == "copy":
        print(_copy(options.name))
        return 0

    _list(names())
    print("\nstudies, for `lightfed study lightfed:NAME`:")
    _list(studies())
    return 0


def _list(names: Sequence[str]) -> None:
    """Print a line for each file: its name, and what the first line of its comment says."""
    for name in names:
        first_line = (ROOT / f"{name}.yaml").read_text("utf-8").partition("\n")[0]
        headline = shorten(first_line.strip("# "), 100, placeholder=" ...")
        print(f"{name:<34}{headline}")


def slurm(argv: Sequence[str]) -> int:
    """Run `lightfed slurm`.

    Args:
        argv: The words after `lightfed slurm`.

    Returns:
        The exit status.

    Raises:
        UserError: The scripts have been copied already.
    """
    parser = OneLineParser(
        "lightfed slurm",
        description="Copy the scripts for SLURM, to submit them from a folder of your own.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("copy", help="copy them to slurm/, where `sweep --slurm` finds them")
    parser.parse_args(argv)

    target = Path("slurm")
    if target.exists():
        raise UserError("slurm copy", found=f"{target} exists", fix="move it away first")
    shutil.copytree(SLURM, target, ignore=shutil.ignore_patterns("*.log", "site.sh"))
    (target / "logs").mkdir(exist_ok=True)

    # The scripts look for .venv in the folder from which they are submitted. The program that is
    # running now can be in another one.
    program_folder = shlex.quote(str(Path(sys.executable).parent))
    (target / "site.sh").write_text(
        f"# Puts this lightfed in front; see site.example.sh.\nPATH={program_folder}:$PATH\n"
    )
    print(target)
    return 0


def names() -> list[str]:
    """Return the names of all configurations, without the ending of their files.

    Those at the top come before those in folders.
    """
    return [name for name in _files() if not is_study(ROOT / f"{name}.yaml")]


def studies() -> list[str]:
    """Return the names of the studies that stand beside the configurations of their papers."""
    return [name for name in _files() if is_study(ROOT / f"{name}.yaml")]


def is_study(path: Path) -> bool:
    """Return whether a file has methods to compare, and is no configuration of a single run."""
    lines = path.read_text("utf-8", "replace").splitlines()
    return any(line.startswith("methods:") for line in lines)


def _files() -> list[str]:
    """All files but those of configs/studies, which `lightfed study` knows by a short name."""
    paths = [path for path in ROOT.rglob("*.yaml") if path.parent.name != "studies"]
    all_names = [str(path.relative_to(ROOT).with_suffix("")) for path in paths]
    return sorted(all_names, key=lambda name: (name.count("/"), name))


def path_of(name: str) -> Path:
    """Return the file of a configuration.

    Raises:
        UserError: There is no configuration of that name.
    """
    all_names = names()
    if name in all_names:
        return ROOT / f"{name}.yaml"

    # The name of a folder stands for the configurations in it, and a method for its own.
    suggestions = [other for other in all_names if name in other.split("/")]
    if not suggestions:
        suggestions = get_close_matches(name, all_names)

    fix = "see `lightfed configs`"
    if suggestions:
        fix = f"did you mean {' or '.join(suggestions[:_MOST_SUGGESTIONS])}?"
    raise UserError("--config", f"no configuration {name!r} in the installation", fix)


def with_paths(words: Sequence[str]) -> list[str]:
    """Return the words of a command with paths in place of the names of configurations.

    Args:
        words: The words of a command, such as `--config=lightfed:quickstart`.

    Raises:
        UserError: There is no configuration of that name.
    """
    replaced = []
    for word in words:
        option, prefix, name = word.rpartition(PREFIX)
        if prefix and option in ("", "--config=", "-c="):
            word = f"{option}{path_of(name)}"
        replaced.append(word)
    return replaced


def _copy(name: str) -> Path:
    """Copy a configuration, or a folder of them, and return where it is now."""
    is_folder = name != "" and (ROOT / name).is_dir()
    if is_folder:
        source = ROOT / name
    elif name in studies():
        source = ROOT / f"{name}.yaml"
    else:
        source = path_of(name)

    target = "configs" / source.relative_to(ROOT)
    if target.exists():
        raise UserError("configs copy", found=f"{target} exists", fix="move it away first")

    if is_folder:
        return Path(shutil.copytree(source, target))
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(source, target))
