"""The command `lightfed compare`, which answers at once if nothing has changed since its answer."""

from collections.abc import Sequence
from pathlib import Path

from lightfed.cli.known_output import said_again
from lightfed.cli.known_runs import root_of
from lightfed.cli.shipped import PREFIX

_CONFIGURATIONS = (".yaml", ".yml")


def main(argv: Sequence[str]) -> int:
    """Run the sub-command; `argv` holds the words after `lightfed compare`."""

    def compared() -> int:
        # Imported here, because it needs pandas, which takes half a second.
        from lightfed.lab.compare import main as compare

        return compare(argv)

    return said_again(["compare", *argv], _folder_of(argv), compared)


def _folder_of(words: Sequence[str]) -> Path:
    """Return the folder of the compared runs as the words seem to name it, without their parser."""
    for word in words:
        if word.endswith(_CONFIGURATIONS) or word.startswith(PREFIX):
            return root_of(["fit", "--config", word])
        if Path(word).is_dir():
            return Path(word).absolute().parent
    return root_of([])
