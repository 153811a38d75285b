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

# The number of steps that this thread is in. By thread, because another one can write a checkpoint
# meanwhile, which takes collectives.
_thread = threading.local()

# The methods of a process group by which all of torch.distributed communicates.
_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
    "monitored_barrier",
)


@contextmanager
def step_under_way() -> Iterator[None]:
    """Mark a block in which a client's own code runs."""
    outer_steps = getattr(_thread, "steps", 0)
    _thread.steps = outer_steps + 1
    try:
        yield
    finally:
        _thread.steps = outer_steps


def refuse_in_step(what: str) -> None:
    """Refuse a collective that a client's own code calls.

    Args:
        what: The name of the collective.

    Raises:
        UserError: This thread is in a step.
    """
    if getattr(_thread, "steps", 0) == 0:
        return
    raise UserError(
        key="model.clients",
        found=f"a step calls {what}, and every rank has other clients",
        fix="log the value: metrics are means over all clients; "
        "only the algorithm shares values between clients",
    )


@cache
def guard_process_groups() -> None:
    """Let all process groups of this process refuse to be used in a step."""
    for name in _COLLECTIVES:
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None:
            setattr(dist.ProcessGroup, name, _guarded(name, method))


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_in_step(f"torch.distributed ({name.strip('_')})")
        return method(*args, **kwargs)

    return call
