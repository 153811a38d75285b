"""What goes with gathers: the same signal on all ranks, and the times of the round before."""

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lightfed.distributed.collectives import Ranks
from lightfed.engine import round_report
from lightfed.engine.round_report import RoundMessages
from lightfed.utils.stopwatch import PARTS
from tests.core.distributed.threads import on_ranks
from tests.small import CPU


class Run:
    """A trainer of which one rank, in a round of its own, gets a signal or loses a checkpoint."""

    def __init__(self, ranks: Ranks) -> None:
        self.current_epoch, self.finished, self.logged = 0, 0, list[int]()
        checkpoints = SimpleNamespace(failed=False, finish=self._finish)
        self.strategy = SimpleNamespace(ranks=ranks, checkpoints=checkpoints)
        self.run_logger = SimpleNamespace(log_timings=self._log)
        ranks.messages = self.messages = RoundMessages(self)  # type: ignore[arg-type]

    def _finish(self) -> None:
        self.finished += 1

    def _log(self, number: int, seconds: dict[str, float]) -> None:
        assert list(seconds) == list(PARTS)
        self.logged.append(number)

    def end(self) -> int:
        self.current_epoch += 1
        return self.messages.round_ends()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The signals by thread; a thread is a rank."""
    found: dict[str, int] = {}
    here = threading.current_thread
    monkeypatch.setattr(round_report.signals, "asked", lambda: found.get(here().name))
    return found


def test_a_signal_of_one_rank_is_that_of_all_at_the_same_round(asked: dict[str, int]) -> None:
    def work(ranks: Ranks) -> tuple[list[int], list[list[int]], int]:
        run, ends, logged = Run(ranks), list[int](), list[list[int]]()
        me = threading.current_thread().name

        def round_(*, gathers: bool, late: bool = False) -> None:
            if gathers:
                ranks.gather([])
            if late and ranks.rank == 1:
                asked[me] = signal.SIGUSR1
                run.strategy.checkpoints.failed = True
            ends.append(run.end())
            logged.append(list(run.logged))

        round_(gathers=True)
        round_(gathers=True, late=True)  # after the gather: nobody knows yet
        round_(gathers=True)
        round_(gathers=False)  # makes its own
        run.messages.run_ends()
        logged.append(run.logged)
        return ends, logged, run.finished

    usr1 = int(signal.SIGUSR1)
    expected = [0, 0, usr1, usr1], [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4]], 2
    found: list[Any] = on_ranks(2, work)
    assert found == [expected] * 2


def test_one_rank_is_told_at_once(asked: dict[str, int]) -> None:
    run = Run(Ranks(CPU))
    asked[threading.current_thread().name] = signal.SIGTERM
    assert run.end() == signal.SIGTERM
    assert run.logged == [1]
