"""A node that gives no answer is lost, and the job may go on without it; a death is a death."""

import errno
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from lightfed.distributed import watch
from lightfed.distributed.connections import _TOKEN

GONE = "is lost with its node (no answer)"
OVER = "the run ends, and --ckpt_path last continues from its last checkpoint"


class Rank(NamedTuple):
    """A rank of those on `nodes`, whose link to `peer` fails."""

    number: int
    peer: int
    nodes: str


def ends(rank: Rank, error: int, outcome: str = "") -> tuple[list[str], str]:
    """What a rank does before it ends with status 1, and says."""
    words = [rank.number, rank.peer, rank.nodes, error, outcome]
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.no_answer", *map(str, words)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    return done.stdout.split(), done.stderr


@pytest.mark.parametrize("error", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH])
def test_a_node_without_an_answer_is_reported_of_when_the_job_is_requeued(error: int) -> None:
    done, said = ends(Rank(0, 3, "aabb"), error, "job 12 is requeued")
    assert done == ["asked", "kills"]
    assert said == f"lightfed: error: rank 3 on b (pid 103) {GONE}; job 12 is requeued\n"


def test_a_process_that_died_would_die_again() -> None:
    done, said = ends(Rank(0, 3, "aabb"), errno.ECONNRESET, "job 12 is requeued")
    assert done == ["kills"]
    assert said == f"lightfed: error: rank 3 on b (pid 103) died; {OVER}\n"


@pytest.mark.parametrize("outcome", ["", "!"])
def test_where_nothing_becomes_of_it_the_run_ends(outcome: str) -> None:
    done, said = ends(Rank(0, 1, "ab"), errno.ETIMEDOUT, outcome)
    assert done == ["asked", "kills"]
    assert said == f"lightfed: error: rank 1 on b (pid 101) {GONE}; {OVER}\n"


def test_of_the_node_of_rank_0_the_first_rank_on_another_one_tells() -> None:
    done, said = ends(Rank(2, 0, "aabb"), errno.ETIMEDOUT, "job 12 is requeued")
    assert done == ["asked", "kills"]
    assert said == f"lightfed: error: rank 0 on a (pid 100) {GONE}; job 12 is requeued\n"


def test_the_others_end_in_silence_and_not_before_the_job_is_requeued() -> None:
    done, said = ends(Rank(3, 0, "aabb"), errno.ETIMEDOUT, "job 12 is requeued")
    assert (done, said) == (["waits", "kills"], "")


def test_a_later_run_of_the_same_ranks_has_its_own_say(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(node_lost=lambda: "the first run's")
    monkeypatch.setattr(watch, "_current", current)
    ranks = SimpleNamespace(world=2, rank=0)
    watch.start(ranks, "", "", lambda: None, lambda: "the second's")  # type: ignore[arg-type]
    assert current.node_lost() == "the second's"


def test_a_lost_node_is_noticed_in_half_a_minute_also_if_something_was_sent_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel sends no probes while it waits for an acknowledgement."""
    watched: list[Any] = []
    monkeypatch.setattr(watch, "Watch", lambda rank, peers, links, *rest: watched.append(links))
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        said = (bytes(_TOKEN), rank_0.getsockname()[1])
        ranks = SimpleNamespace(world=2, rank=1, broadcast=lambda _: said, gather=list)
        watch.start(ranks, "127.0.0.1", "127.0.0.1", lambda: None, str)  # type: ignore[arg-type]
    with watched[0][0] as link:
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert link.gettimeout() is None
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        options = [link.getsockopt(socket.IPPROTO_TCP, getattr(socket, n)) for n in names]
    idle, interval, count, unacknowledged = options
    assert idle + interval * count == unacknowledged / 1000 == 30
