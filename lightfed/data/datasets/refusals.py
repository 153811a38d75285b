"""What a user reads when the files of a data set are missing or damaged."""

from pathlib import Path

from lightfed.utils.errors import UserError

ROOT = "data.dataset.init_args.root"
"""The configuration key of the folder with the files."""


def missing(expected: Path, *, holds: str) -> UserError:
    """The refusal of a root below which a file or folder is missing.

    Args:
        expected: the first file or folder that is not there.
        holds: what the root should hold, as in "the folder that holds ...".
    """
    fix = f"unpack the data set, and set root to the folder that holds {holds}"
    return UserError(ROOT, f"expected {expected}, which is not there", fix)


def unreadable(path: Path, error: Exception, *, fix: str = "fetch it again") -> UserError:
    """The refusal of a file or folder that cannot be read, with the error on one line."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(ROOT, f"{path} cannot be read ({reason})", fix)
