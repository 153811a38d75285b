"""Who says what when a rank dies, fails, hangs or leaves; ranks are processes without torch."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from lightfed.distributed import watch
from lightfed.distributed.connections import RANK_BYTES, TOKEN_BYTES, rank_of_caller

ENDS = "; the run ends, and --ckpt_path last continues from its last checkpoint\n"
TIMED_OUT = "the end of the sessions failed (Timed out)"
KILLED, STOPPED = -signal.SIGKILL, None


class End(NamedTuple):
    status: int | None
    printed: str
    errors: str


def together(folder: Path, *deeds: str, nodes: str = "aaaaaaaa") -> list[End]:
    """How ranks end that do these deeds, each on the node of its letter.

    Ranks that stop are killed when the others have ended, and have no status.
    """
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-Wignore::DeprecationWarning",  # of Python 3.12, for a fork beside threads
                "-m",
                "tests.core.distributed.peer",
                str(folder),
                str(rank),
                str(len(deeds)),
                deed,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"SLURMD_NODENAME": nodes[rank], "PYTHONUNBUFFERED": ""},
            start_new_session=True,
        )
        for rank, deed in enumerate(deeds)
    ]
    try:
        for process, deed in zip(processes, deeds, strict=True):
            if deed != "stop":
                process.wait(timeout=30)
        statuses = [process.poll() for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has left behind
    said = [process.communicate() for process in processes]
    return [End(status, *both) for status, both in zip(statuses, said, strict=True)]


def lines(ends: list[End]) -> list[str]:
    """What each rank says, without the numbers of processes."""
    return [re.sub(r" \(pid \d+\)", "", end.errors) for end in ends]


@pytest.mark.parametrize("way", ["die", "fork and die", "run and die", "exit without a word"])
def test_a_rank_that_dies_ends_all_during_their_sessions(way: str, tmp_path: Path) -> None:
    ends = together(tmp_path, "session", "session", way, nodes="aab")
    assert lines(ends) == [f"lightfed: error: rank 2 on b died{ENDS}", "", ""]
    assert [end.status for end in ends] == [1, 1, 0 if "exit" in way else KILLED]
    # What was printed is flushed; nobody came further, and each kills what it has started.
    assert [end.printed for end in ends[:2]] == ["starts\nkills\n"] * 2


@pytest.mark.parametrize(("nodes", "speaker"), [("aaa", 1), ("aab", 2), ("abb", 1)])
def test_the_first_rank_of_another_node_tells_of_rank_0(
    nodes: str, speaker: int, tmp_path: Path
) -> None:
    ends = together(tmp_path, "die", "session", "session", nodes=nodes)
    expected = [""] * 3
    expected[speaker] = f"lightfed: error: rank 0 on a died{ENDS}"
    assert lines(ends) == expected
    assert [end.status for end in ends] == [KILLED, 1, 1]


@pytest.mark.parametrize(
    ("deeds", "said"),
    [
        (("broken", "broken", "die"), "rank 2 on a died"),
        (
            ("broken", "refuse", "broken"),
            "rank 1 on a ended with an error (data.root: no folder; make one)",
        ),
        (("broken", "broken"), "rank 0 on a: a gather failed (Connection closed by peer)"),
    ],
)
def test_a_collective_is_reported_where_nothing_else_has_broken_it(
    deeds: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    ends = together(tmp_path, *deeds)
    broken = [k for k, deed in enumerate(deeds) if deed == "broken"]
    assert [lines(ends)[k] for k in broken] == [f"lightfed: error: {said}{ENDS}", ""]
    assert [ends[k].status for k in broken] == [1, 1]


def test_an_error_of_one_rank_is_seen_there_and_ends_the_others(tmp_path: Path) -> None:
    ends = together(tmp_path, "session", "session", "raise")
    said = "rank 2 on a ended with an error (ValueError: no good)"
    assert lines(ends)[:2] == [f"lightfed: error: {said}{ENDS}", ""]
    assert ends[2].errors.endswith("ValueError: no\ngood\n")
    assert [end.status for end in ends] == [1, 1, 1]


def test_an_error_of_rank_0_ends_the_others_without_a_word(tmp_path: Path) -> None:
    ends = together(tmp_path, "raise", "session", "session")
    assert ends[0].errors.endswith("ValueError: no\ngood\n")
    assert [(end.status, end.errors) for end in ends[1:]] == [(1, ""), (1, "")]


def test_an_error_of_all_ranks_is_reported_by_each_in_its_own_way(tmp_path: Path) -> None:
    """A rank that ends by itself is left to it, however long it takes."""
    ends = together(tmp_path, "fail slowly", "raise", "fail slowly")
    assert [end.status for end in ends] == [7, 1, 7]
    assert ends[0].errors == ends[2].errors == ""


def test_ranks_that_leave_are_not_missed(tmp_path: Path) -> None:
    ends = together(tmp_path, "fork and go on", "leave", "fork and go on")
    assert [end[:] for end in ends] == [(0, "starts\nover\n", "")] * 3


@pytest.mark.parametrize(("way", "status"), [("leave and linger", 3), ("fork and go on", 0)])
def test_rank_0_may_take_its_time_when_all_have_saved(
    way: str, status: int, tmp_path: Path
) -> None:
    """It saves more than the others, and waits to be requeued when they have gone."""
    ends = together(tmp_path, way, "leave and linger", "leave")
    assert [(end.status, end.errors) for end in ends] == [(status, ""), (3, ""), (0, "")]


def test_ranks_that_wait_for_a_stopped_one_end(tmp_path: Path) -> None:
    ends = together(tmp_path, "late", "late", "stop")
    assert lines(ends)[:2] == [f"lightfed: error: rank 0 on a: {TIMED_OUT}{ENDS}", ""]
    assert [end.status for end in ends] == [1, 1, STOPPED]


@pytest.mark.parametrize("way", ["stop", "leave"])
def test_ranks_that_wait_for_rank_0_end(way: str, tmp_path: Path) -> None:
    ends = together(tmp_path, way, "late", "late", nodes="aab")
    assert TIMED_OUT in ends[2].errors
    assert [end.status for end in ends[1:]] == [1, 1]


@pytest.mark.parametrize(
    "greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(TOKEN_BYTES + RANK_BYTES)]
)
def test_a_stranger_at_the_port_is_no_rank(greeting: bytes) -> None:
    token = bytes(range(TOKEN_BYTES))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(greeting)
        theirs.shutdown(socket.SHUT_WR)
        assert rank_of_caller(ours, token) is None


def test_a_caller_with_the_token_is_the_rank_that_it_names() -> None:
    token = bytes(range(TOKEN_BYTES))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(token + (300).to_bytes(RANK_BYTES, "big"))
        assert rank_of_caller(ours, token) == 300


def until(capsys: pytest.CaptureFixture[str], text: str) -> str:
    """What is printed until a text is among it."""
    printed, limit = "", time.monotonic() + 30
    while text not in printed:
        assert time.monotonic() < limit, printed
        time.sleep(0.01)
        printed += capsys.readouterr().err
    return printed


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_a_rank_that_is_silent_is_named_and_the_run_waits(
    rank: int,
    other: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The test is the other rank: it says nothing, as one that is stopped, and then it goes on."""
    monkeypatch.setattr(watch, "BEAT", 0.05)
    monkeypatch.setattr(watch, "SILENCE", 0.3)
    ours, theirs = socket.socketpair()
    peers = [watch.Peer(0, "a", 7), watch.Peer(1, "b", 8)]
    watching = watch.Watch(rank, peers, {other: ours}, lambda: None)
    with theirs:
        until(capsys, f"lightfed: {peers[other]} has been silent for 0.3 s: the run waits for it\n")
        theirs.sendall(b'{"state": "beat", "said": ""}\n')
        printed = until(capsys, f"lightfed: {peers[other]} is back\n")
        assert "been silent" not in printed, "it is named once"
        theirs.settimeout(30)
        assert b'"beat"' in theirs.recv(1 << 16), "it says that it lives"
        theirs.sendall(b'{"state": "left", "said": ""}\n')
        watching.goodbye("left", "")


def test_a_rank_that_beats_is_not_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "BEAT", 0.02)
    monkeypatch.setattr(watch, "SILENCE", 5.0)
    ours, theirs = socket.socketpair()
    watching = watch.Watch(0, [watch.Peer(k, "a", k) for k in range(2)], {1: ours}, lambda: None)
    with theirs:
        for _ in range(20):
            theirs.sendall(b'{"state": "beat", "said": ""}\n')
            time.sleep(0.02)
        theirs.sendall(b'{"state": "left", "said": ""}\n')
        watching.goodbye("left", "")
    assert capsys.readouterr().err == ""
