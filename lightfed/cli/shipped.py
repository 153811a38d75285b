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
SLURM = Path(__file__).parents[1] / "slurm"  # likewise a link
ROOT = Path(__file__).parents[1] / "configs"  # in the repository a link to the folder of that name


def main(argv: Sequence[str]) -> int:
    """Run the sub-command; `argv` holds the words after `lightfed configs`.

    A UserError if there is nothing of that name, or it has been copied already.
    """
    if len(argv) == 1 and any(argv[0].startswith(prefix) for prefix in EXPLANATIONS):
        prefix, _, text = argv[0].partition(":")
        imported(EXPLANATIONS[f"{prefix}:"])(text)
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
    asked = parser.parse_args(argv)
    if asked.command == "copy":
        print(_copy(asked.name))
        return 0
    _list(names())
    print("\nstudies, for `lightfed study lightfed:NAME`:")
    _list(studies())
    return 0


def _list(names: Sequence[str]) -> None:
    """Print a line for each file: its name and the first line of its comment."""
    for name in names:
        headline = (ROOT / f"{name}.yaml").read_text("utf-8").partition("\n")[0].strip("# ")
        print(f"{name:<34}{shorten(headline, 100, placeholder=' ...')}")


def slurm(argv: Sequence[str]) -> int:
    """Run `lightfed slurm`; `argv` holds the words after it.

    A UserError if the scripts have been copied already.
    """
    about = "Copy the scripts for SLURM, to submit from a folder of your own."
    parser = OneLineParser("lightfed slurm", description=about)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("copy", help="copy them to slurm/, which `sweep --slurm` submits")
    parser.parse_args(argv)

    target = Path("slurm")
    if target.exists():
        raise UserError("slurm copy", f"{target} exists", "move it away first")
    shutil.copytree(SLURM, target, ignore=shutil.ignore_patterns("*.log", "site.sh"))
    (target / "logs").mkdir(exist_ok=True)
    # The scripts look for .venv here; the program that copies them may be another one.
    site = target / "site.sh"
    site.write_text(f"# Puts this lightfed in front; see site.example.sh.\nPATH={_bin()}:$PATH\n")
    print(target)
    return 0


def _bin() -> str:
    """The folder of the running program, for a shell."""
    return shlex.quote(str(Path(sys.executable).parent))


def names() -> list[str]:
    """The configurations, without the ending; those in no folder first."""
    return [name for name in _files() if not is_study(ROOT / f"{name}.yaml")]


def studies() -> list[str]:
    """The studies beside the configurations of their papers, without the ending."""
    return [name for name in _files() if is_study(ROOT / f"{name}.yaml")]


def _files() -> list[str]:
    """All files but those of configs/studies, which `lightfed study` knows by a short name."""
    files = [path for path in ROOT.rglob("*.yaml") if path.parent.name != "studies"]
    found = [str(path.relative_to(ROOT).with_suffix("")) for path in files]
    return sorted(found, key=lambda name: (name.count("/"), name))


def is_study(path: Path) -> bool:
    """Whether a file has methods to compare, and is no configuration of a single run."""
    lines = path.read_text("utf-8", "replace").splitlines()
    return any(line.startswith("methods:") for line in lines)


def path_of(name: str) -> Path:
    """The file of a configuration; a UserError if there is none of that name."""
    if name in names():
        return ROOT / f"{name}.yaml"
    near = [other for other in names() if name in other.split("/")]
    near = near or get_close_matches(name, names())
    fix = f"did you mean {' or '.join(near[:4])}?" if near else "see `lightfed configs`"
    raise UserError("--config", f"no configuration {name!r} in the installation", fix)


def with_paths(words: Sequence[str]) -> list[str]:
    """A command line with the paths of configurations in place of their names."""
    found = []
    for word in words:
        head, prefix, name = word.rpartition(PREFIX)
        named = prefix and head in ("", "--config=", "-c=")
        found.append(f"{head}{path_of(name)}" if named else word)
    return found


def _copy(name: str) -> Path:
    if name and (ROOT / name).is_dir():
        source = ROOT / name
    elif name in studies():
        source = ROOT / f"{name}.yaml"
    else:
        source = path_of(name)
    target = "configs" / source.relative_to(ROOT)
    if target.exists():
        raise UserError("configs copy", f"{target} exists", "move it away first")
    if source.is_dir():
        return Path(shutil.copytree(source, target))
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(source, target))
