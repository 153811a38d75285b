"""The selection of the conformance kit that a candidate has to pass, and the budget of CPU time."""

import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest

from lightfed.lab.judge.budget import ENDED, Budget, limited
from lightfed.lab.judge.conformity import NotConforming, check_conformity
from lightfed.lab.judge.contender import contender
from tests.lab.judge.test_judge import METHODS


def test_a_method_in_order_passes_and_others_say_how_they_fail(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "kit.log"
    check_conformity(contender(f"{METHODS}.Alike", "judge"), log)
    assert not log.exists()

    with pytest.raises(NotConforming, match=r"different bits") as refused:
        check_conformity(contender(f"{METHODS}.OfRanks", "judge"), log)
    assert refused.value.status == 3
    assert re.match(r"(straight|resumed)-\d-of-\d: .*server", refused.value.found)
    assert str(log) in refused.value.fix

    with pytest.raises(NotConforming) as refused:
        check_conformity(contender(f"{METHODS}.Raising", "judge"), log)
    assert "KeyError" in refused.value.found
    assert "velocity" in refused.value.found
    assert "Traceback" in log.read_text()


def test_what_runs_out_of_the_budget_is_ended(tmp_path: Path) -> None:
    budget = Budget(1.0)
    with limited(budget, jobs=1), pytest.raises((NotConforming, SystemExit)):
        check_conformity(contender(f"{METHODS}.Endless", "judge"), tmp_path / "kit.log")
    assert budget.spent >= 1.0
    assert budget.left == 0.0


def test_what_a_child_forks_gets_no_more_than_it_has_left() -> None:
    """Whatever this process has used before: the CPU time of a process begins with it."""
    while time.process_time() < 3:
        pass
    with limited(Budget(1.0), jobs=1):
        pid = os.fork()
        if pid == 0:
            grandchild = os.fork()
            if grandchild == 0:
                soft, _ = resource.getrlimit(resource.RLIMIT_CPU)
                os._exit(soft)
            _, status = os.waitpid(grandchild, 0)
            os._exit(os.waitstatus_to_exitcode(status))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1


def test_a_child_gets_what_is_left_and_others_are_free() -> None:
    budget = Budget(0.1)
    with limited(budget, jobs=1):
        pid = os.fork()
        if pid == 0:
            while True:
                pass
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGXCPU
    assert 128 + os.WTERMSIG(status) == ENDED
    assert budget.spent > 0.9

    pid = os.fork()
    if pid == 0:
        soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
        os._exit(soft != hard)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
