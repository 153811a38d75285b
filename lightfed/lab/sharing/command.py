"""`lightfed export`: a folder to share, with a model of a finished run and its card."""

import argparse
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightfed.lab.sharing import files
from lightfed.lab.sharing.card import Given, card
from lightfed.lab.sharing.shared_model import SharedModel
from lightfed.utils.errors import OneLineParser, UserError

CARD = "README.md"

# The last line of a card: a digest of the lines above tells whether a user has changed them.
_LAST_LINE = re.compile(r"\n<!-- written by lightfed export, digest (\w+) -->\n\Z")


def main(argv: Sequence[str]) -> int:
    """Run `lightfed export`.

    Args:
        argv: The words after `lightfed export`.

    Returns:
        The exit status.

    Raises:
        UserError: The run has no such model, or the folder holds what a user has written.
    """
    options = _parser().parse_args(argv)
    model = SharedModel.of(options.run, options.model)
    given = Given(options.license, options.base, options.dataset)

    folder = options.output or model.run.folder / "share" / model.name
    contents = files.contents(model, given.base)
    text = card(model, given)
    if not options.keep_card:
        contents[CARD] = _with_digest(text).encode()
    _check_folder(folder, contents)

    for name, content in contents.items():
        files.write(content, folder / name)
    print(f"{model.description}: {folder}")
    for name in contents:
        print(f"  {name}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="lightfed export",
        allow_abbrev=False,
        description="Write a folder to share: a model of a finished run, with a model card.",
    )
    add = parser.add_argument
    several = "the folder of a run; of several, which are seeds of one experiment, the first "
    several += "has the model, and the others give the intervals of its metrics"
    add("run", nargs="+", type=Path, metavar="RUN", help=several)
    which = "server (the default), the name of a group, or a client, such as client3"
    add("--model", default="server", metavar="NAME", help=which)
    place = "the folder to write to (default: RUN/share/NAME)"
    add("--output", type=Path, metavar="FOLDER", help=place)
    add("--license", metavar="ID", help="the license, such as apache-2.0 (default: none is named)")
    hub_data = "the name of the data set on the hub, if lightfed does not know it"
    add("--dataset", metavar="ID", help=hub_data)
    hub_base = "the name of an adapter's base on the hub (default: the base is written, too)"
    add("--base", metavar="ID", help=hub_base)
    kept = f"keep your own {CARD}, and write only the other files"
    add("--keep-card", action="store_true", help=kept)
    return parser


def _with_digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text}\n<!-- written by lightfed export, digest {digest} -->\n"


def _is_unchanged(text: str) -> bool:
    """Return whether a card is as lightfed has written it."""
    last_line = _LAST_LINE.search(text)
    return last_line is not None and _with_digest(text[: last_line.start()]) == text


def _check_folder(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder with files that lightfed has not written, and would replace.

    Args:
        folder: The folder; it may be missing.
        names: The files to write.

    Raises:
        UserError: A user has changed the card, or there are other files of these names.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError("--output", f"{folder} is a file", "name a folder")

    path = folder / CARD
    has_card = path.is_file()
    if has_card and CARD in names and not _is_unchanged(path.read_text("utf-8", "replace")):
        found = f"{path} is not as lightfed has written it"
        fix = "move it, name another folder, or keep it by --keep-card"
        raise UserError("--output", found, fix)
    if has_card:
        return

    # Without a card the folder is not one of lightfed's.
    for name in names:
        if (folder / name).exists():
            fix = "name another folder, or move it"
            raise UserError("--output", f"{folder / name} is there already", fix)
