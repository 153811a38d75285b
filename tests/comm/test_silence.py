"""A rank that is stopped is reported, and ends the job after the limit; so is its return."""

import signal
import socket
import time
from pathlib import Path

import pytest

from lightfed.distributed import peers, watch
from lightfed.distributed.peers import SILENT, Peer, Silence
from lightfed.distributed.watch import Watch
from tests.comm.test_watch import ENDS, lines, together


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def passes(clock: list[float], seconds: float) -> None:
    clock[0] += seconds


def test_a_silent_rank_is_reported_once_and_then_ends_the_run(clock: list[float]) -> None:
    quiet = Silence([1, 2], limit=600)
    found = []
    for _ in range(70):
        passes(clock, 10)
        quiet.heard(1)
        found.append((clock[0] - 100, *quiet.look()))
    assert [seconds for seconds, new, _ in found if new] == [50]
    assert 0 < 50 - SILENT < 15  # within a minute
    assert next(new for _, new, _ in found if new) == [2]
    assert next(seconds for seconds, _, over in found if over) == 610
    assert quiet.heard(2)
    assert not quiet.heard(2)
    assert quiet.look() == ([], [])


def test_a_process_that_was_stopped_itself_blames_nobody(clock: list[float]) -> None:
    quiet = Silence([1], limit=600)
    passes(clock, 7200)
    assert quiet.look() == ([], [])


def test_a_rank_that_has_left_is_not_expected(clock: list[float]) -> None:
    quiet = Silence([1], limit=600)
    quiet.forget(1)
    for _ in range(10):
        passes(clock, 10)
        assert quiet.look() == ([], [])


@pytest.mark.parametrize("deeds", [("session", "stop"), ("stop", "session")])
def test_a_stopped_rank_ends_the_others(
    deeds: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIMIT", "1")
    ends = together(tmp_path, *deeds)
    stopped = deeds.index("stop")
    said = lines(ends)[1 - stopped].splitlines(keepends=True)
    assert said[0].startswith(f"lightfed: rank {stopped} on a has not answered for ")
    assert "trainer.strategy.init_args.timeout" in said[0]
    assert said[-1].startswith(f"lightfed: error: rank {stopped} on a has not answered for ")
    assert said[-1].endswith(ENDS)
    assert ends[1 - stopped].status == 1
    assert ends[stopped].status in (None, -signal.SIGKILL)


def test_the_return_of_a_rank_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "BEAT", 0.02)
    monkeypatch.setattr(peers, "SILENT", 0.1)
    ours, theirs = socket.socketpair()
    Watch(0, [Peer(0, "a", 1), Peer(1, "a", 2)], {1: ours}, lambda: None, str)
    said = ""
    for awaited in ("rank 1 on a (pid 2) has not answered", "rank 1 on a (pid 2) answers again"):
        limit = time.monotonic() + 20
        while awaited not in said and time.monotonic() < limit:
            time.sleep(0.01)
            said += capsys.readouterr().err
        assert awaited in said
        theirs.sendall(b'{"state": "beat", "said": ""}\n')
    theirs.sendall(b'{"state": "left", "said": ""}\n')
    theirs.close()
