"""Reads commands in the process of a test, as `lightfed.lab.runner.check` does in a child."""

from collections.abc import Sequence
from pathlib import Path

from lightfed.cli.named_files import files_of
from lightfed.cli.wanted import Wanted
from lightfed.utils.errors import UserError

# What commands ask for, by their words and by the files that they are read from.
_known: dict[tuple[tuple[str, ...], tuple[bytes, ...]], Wanted] = {}


def check_here(commands: Sequence[Sequence[str]]) -> list[Wanted | UserError]:
    """As `check`, in this process."""
    found: list[Wanted | UserError] = []
    for words in commands:
        try:
            found.append(Wanted.of(words))
        except UserError as error:
            found.append(error)
    return found


def check_once(commands: Sequence[Sequence[str]]) -> list[Wanted | UserError]:
    """As `check_here`, but a command that this process has read before is not read again.

    It asks for the same run if its words, the configurations that they name and the modules in the
    working folder are the same: a run is known by paths that are relative to that folder.
    """
    modules = sorted(Path().glob("*.py"))
    found: list[Wanted | UserError] = []
    for words in commands:
        contents = [path.read_bytes() for path in [*files_of(words), *modules]]
        key = (tuple(words), tuple(contents))
        if key in _known:
            found.append(_known[key])
            continue
        (read,) = check_here([words])
        found.append(read)
        if isinstance(read, Wanted):
            _known[key] = read
    return found


def read_all(lines: Sequence[str]) -> list[Wanted]:
    """What the lines of a list of a search ask for; an AssertionError if one cannot be run.

    Lines that differ in their last words alone, the seed and the round of a pause, are read once.
    """
    runs = []
    for line in lines:
        words = line.split()
        rounds = seed = None
        if words[-1].startswith("--pause_after="):
            rounds = int(words.pop().partition("=")[2])
        if words[-1].startswith("--model.seed="):
            seed = int(words.pop().partition("=")[2])

        (run,) = check_once([words])
        assert isinstance(run, Wanted), run
        if seed is not None:
            run = run.at(seed)
        if rounds is not None:
            run = run.up_to(rounds)
        runs.append(run)
    return runs
