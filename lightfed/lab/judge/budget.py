"""A budget of CPU time, for this process and its children.

Before more runs begin, what they may cost is compared with what is left. No child can use more than
what was left when it began: the system ends it with SIGXCPU.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

# The status of a process that has used more CPU time than it may.
ENDED = 128 + signal.SIGXCPU


class Budget:
    """CPU seconds that this process and its children may use, from now on.

    Attributes:
        seconds: The budget.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._before = _used()

    @property
    def spent(self) -> float:
        """What has been used; children count when they have ended."""
        return _used() - self._before

    @property
    def left(self) -> float:
        """What may still be used."""
        return max(0.0, self.seconds - self.spent)


def _used() -> float:
    """Return the CPU time of this process, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


# What a forked process reads as it begins. Functions of `register_at_fork` stay to the end of the
# process, so there is one for all budgets.
_limit: Budget | None = None
_jobs = 1
_left_at_fork = math.inf


def _before_fork() -> None:
    global _left_at_fork
    _left_at_fork = math.inf if _limit is None else _limit.left / _jobs


def _in_child() -> None:
    global _limit, _jobs
    if not math.isfinite(_left_at_fork):
        return
    # The CPU time of a process begins with it, and so does the budget of what it forks itself.
    _limit = Budget(_left_at_fork)
    _jobs = 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    # The limit is in whole seconds; 0 would be none at all on some systems.
    soft = max(1, math.ceil(_left_at_fork))
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


os.register_at_fork(before=_before_fork, after_in_child=_in_child)


@contextmanager
def limited(budget: Budget, jobs: int) -> Iterator[None]:
    """Give every process that is forked in this block no more than what is left of a budget.

    Args:
        budget: The budget.
        jobs: How many run at the same time, which share what is left.
    """
    global _limit, _jobs
    _limit = budget
    _jobs = jobs
    try:
        yield
    finally:
        _limit = None
