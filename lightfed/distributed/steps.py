"""A client's step calls no collective: ranks have other clients, and other numbers of steps.

A collective in a step would add up different clients' values, or wait for a rank that does not
come. So it is refused by name, on one rank too: a run has the same result on any number of ranks.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch.distributed as dist

from lightfed.utils.errors import UserError

_here = threading.local()  # other threads write checkpoints meanwhile

# The methods of a process group by which all of torch.distributed communicates.
_COLLECTIVES = """
allreduce allreduce_coalesced reduce broadcast allgather allgather_coalesced _allgather_base
allgather_into_tensor_coalesced gather scatter reduce_scatter _reduce_scatter_base
reduce_scatter_tensor_coalesced alltoall alltoall_base send recv recv_anysource barrier
monitored_barrier
"""


@contextmanager
def step_under_way() -> Iterator[None]:
    """Within it a client's own code runs."""
    before = getattr(_here, "steps", 0)
    _here.steps = before + 1
    try:
        yield
    finally:
        _here.steps = before


def refuse_in_step(what: str) -> None:
    """Raise a UserError if a client's own code calls a collective, which is named."""
    if getattr(_here, "steps", 0):
        found = f"a step calls {what}, and every rank has other clients"
        fix = "log the value: metrics are means over all clients; what is shared is the algorithm's"
        raise UserError("model.clients", found, fix)


@cache
def guard_process_groups() -> None:
    """Let all process groups of this process refuse to be used in a step."""
    for name in _COLLECTIVES.split():
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None:
            setattr(dist.ProcessGroup, name, _guarded(name, method))


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_in_step(f"torch.distributed ({name.strip('_')})")
        return method(*args, **kwargs)

    return call
