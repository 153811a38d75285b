"""What is said where the files of a data set are not."""

from pathlib import Path

from lightfed.utils.errors import UserError

_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")


def missing(root: Path, expected: Path, *, holds: str, archive: str) -> UserError:
    """The refusal of a root where a file or folder is missing; it knows an archive when it sees it.

    Args:
        root: what the user gave.
        expected: the first file or folder that is not there.
        holds: what the root should hold, as in "the folder that holds ...".
        archive: the name of the published archive, without its ending.
    """
    key, fix = "data.dataset.init_args.root", f"set root to the folder that holds {holds}"
    names = [root, *(root / f"{archive}{ending}" for ending in _ARCHIVES)]
    packed = next((p for p in names if p.is_file() and p.name.endswith(_ARCHIVES)), None)
    if packed is not None:
        return UserError(key, f"{packed} is an archive, not a folder", f"unpack it and {fix}")
    found = f"{root} is a file" if root.is_file() else f"expected {expected}, which is not there"
    return UserError(key, found, fix)
