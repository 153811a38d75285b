"""Checks a launcher's variables before torch and Lightning read them. Cheap to import."""

from collections.abc import Mapping

from lightfed.utils.errors import UserError, require
from lightfed.utils.process import LEAST

_LARGEST_PORT = 65535
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def check_variables(environ: Mapping[str, str]) -> None:
    """Reject a variable that is no number, or out of range. A UserError names the variable."""
    for name, least in LEAST.items():
        value = environ.get(name, str(least))
        found, fix = repr(value), f"set it to a number from {least}, or unset it"
        require(value.isdecimal() and int(value) >= least, name, found, fix)
    for name in _OF_TORCHRUN if "TORCHELASTIC_RUN_ID" in environ else ():
        found = "not set, but TORCHELASTIC_RUN_ID is"
        require(name in environ, name, found, "start with torchrun, or unset TORCHELASTIC_RUN_ID")
    port = environ.get("MASTER_PORT", "1")
    require(int(port) <= _LARGEST_PORT, "MASTER_PORT", port, f"give at most {_LARGEST_PORT}")


def check_rank(local_rank: int, processes: int) -> None:
    """Reject a process that its launcher has started in addition to the configured ranks.

    `processes` are the configured ranks per node. A UserError names the variable.
    """
    if not 0 <= local_rank < processes:
        found = f"{local_rank}, and trainer.devices asks for {processes} ranks on a node"
        raise UserError("LOCAL_RANK", found, "make the launcher and trainer.devices agree")
