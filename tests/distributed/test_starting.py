"""A launcher's numbers are checked before torch reads them; ranks that die before they meet, named.

The processes of these tests import neither torch nor Lightning.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from lightfed.cli.command_line import USAGE_ERROR, main
from lightfed.distributed.starting import LEAST, check_rank, check_variables
from lightfed.utils.errors import UserError


@pytest.mark.parametrize("name", LEAST)
@pytest.mark.parametrize("value", ["", "abc", "-1", "1.5", "12_3"])
def test_what_is_no_number_is_refused_by_the_rank_that_has_it(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        main(["fit", "--config", "nowhere.yaml"])
    assert left.value.code == USAGE_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lightfed: error: {name}: {value!r}; ")


def test_numbers_in_range_are_accepted() -> None:
    check_variables({name: str(least) for name, least in LEAST.items()})
    check_variables({"MASTER_PORT": "65535", "SLURM_RESTART_COUNT": "0"})
    for port in ("0", "65536"):
        with pytest.raises(UserError) as refused:
            check_variables({"MASTER_PORT": port})
        assert refused.value.key == "MASTER_PORT"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_variable_that_torchrun_would_set_is_missed(name: str) -> None:
    given = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    check_variables(given)
    with pytest.raises(UserError) as refused:
        check_variables({key: value for key, value in given.items() if key != name})
    assert refused.value.key == name


def test_a_rank_that_is_not_configured_is_refused() -> None:
    check_rank(1, 2)
    with pytest.raises(UserError) as refused:
        check_rank(2, 2)
    assert refused.value.key == "LOCAL_RANK"


# Rank 0 launches this many ranks, which do something, and would wait for them.
RANK_0 = """
import os, subprocess, sys, time
from lightfed.distributed import starting
starting._EVERY, starting._GRACE = 0.02, 0.1
starting.launches(os.environ)
start = lambda rank: subprocess.Popen([sys.executable, "-c", sys.argv[1]],
                                      env=os.environ | {"LOCAL_RANK": str(rank)})
processes = [start(rank) for rank in (1, 2)]
starting.watch_launched(processes, 0, lambda: [p.kill() for p in processes])
print(*(p.pid for p in processes), flush=True)
time.sleep(30)
"""
RANK = """
import os, sys, time
from lightfed.distributed import starting
starting._EVERY = 0.02
starting.watch_launcher(os.environ)
if os.environ["LOCAL_RANK"] == "2": {deed}
time.sleep(30)
"""


def rank_0(deed: str = "pass") -> "subprocess.Popen[str]":
    environ = {k: v for k, v in os.environ.items() if k not in LEAST}
    command = [sys.executable, "-c", RANK_0, RANK.format(deed=deed)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environ, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


def gone(pid: int) -> bool:
    """Whether a process, or a group by its negative number, has ended or ends soon."""
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("deed", "how"),
    [("os.kill(os.getpid(), 9)", "was killed by SIGKILL"), ("sys.exit(3)", "left with 3")],
)
def test_a_launched_rank_that_dies_is_named(deed: str, how: str) -> None:
    with rank_0(deed) as process:
        printed, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    pids = list(map(int, printed.split()))
    assert line.startswith(f"lightfed: error: rank 2 (pid {pids[1]}) {how} before the ranks met; ")
    assert all(map(gone, pids))


def test_ranks_end_with_the_one_that_has_launched_them() -> None:
    """Also if it dies before they watch."""
    with rank_0() as process:
        assert process.stdout is not None
        pids = list(map(int, process.stdout.readline().split()))
        process.send_signal(signal.SIGKILL)
        errors = process.communicate(timeout=30)[1]
    (line,) = errors.splitlines()
    assert line.startswith(
        f"lightfed: error: the rank that launched the others (pid {process.pid})"
    )
    assert all(map(gone, pids))
