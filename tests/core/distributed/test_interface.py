"""Ranks listen where they are reached, and on no other interface."""

import json
import logging
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightfed.distributed.interface import interface_of, listen
from lightfed.testing.ranks import start_job, wait
from tests.core.distributed import listening


@pytest.fixture(autouse=True)
def unknown() -> Iterator[None]:
    """Names are looked up in every test."""
    interface_of.cache_clear()
    yield
    interface_of.cache_clear()


@pytest.mark.skipif(shutil.which("ip") is None, reason="Debian's iproute2 is not installed")
def test_ranks_listen_where_they_meet_and_one_rank_nowhere(tmp_path: Path) -> None:
    """torch's store, gloo's connections, and those by which ranks learn of a death."""
    assert wait(start_job(1, lambda _: listening.main(tmp_path)))
    if (why := tmp_path / "impossible").exists():
        pytest.skip(why.read_text())
    seen = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert seen.pop("one-0") | {"host": ""} == {"seen": [], "bound": [], "host": ""}
    assert set(seen) == {"local-0", "local-1", "at the host-0", "at the host-1"}
    for name, rank in seen.items():
        place = "127.0.0.1" if "local" in name else rank["host"]
        assert set(rank["seen"]) == {place}, name
        assert rank["bound"] == [place] * (2 if "-0" in name else 0), "the store's and the watch's"
    assert len(seen["local-0"]["seen"]) >= 3, "the store's, and gloo's of two ranks"


@pytest.mark.parametrize(
    ("name", "addresses", "nodes", "expected"),
    [
        ("127.0.0.1", ["127.0.0.1"], 1, "127.0.0.1"),
        ("127.0.0.1", ["127.0.0.1"], 2, "127.0.0.1"),  # as it is stated
        ("n1", ["127.0.1.1"], 1, "127.0.1.1"),
        ("n1", ["127.0.1.1"], 2, ""),  # a word for itself: other nodes know another
        ("n1", ["192.0.2.77", "127.0.0.2"], 1, "127.0.0.2"),  # the first is of no interface here
        ("192.0.2.77", ["192.0.2.77"], 2, ""),
    ],
)
def test_the_interface_is_that_of_the_address(
    name: str, addresses: list[str], nodes: int, expected: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0)) for a in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with caplog.at_level(logging.WARNING, logger="lightfed"):
        assert interface_of(name, nodes=nodes) == expected
    assert len(caplog.records) == (expected == "")


def test_where_the_interface_is_not_known_all_are_listened_on() -> None:
    with listen("", backlog=1) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with listen("127.0.0.1", backlog=1) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
