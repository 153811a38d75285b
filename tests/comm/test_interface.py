"""Ranks listen where they are reached, and on no other interface."""

import json
import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightfed.distributed.interface import interface_of, listen
from lightfed.testing.processes import run_module

EVERYWHERE = {"00000000", "00000000000000000000000000000000"}  # 0.0.0.0, [::] in /proc/net


@pytest.fixture(autouse=True)
def unknown() -> Iterator[None]:
    """Names are looked up in every test."""
    interface_of.cache_clear()
    yield
    interface_of.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_listens_on_all_interfaces(tmp_path: Path) -> None:
    """torch's store, gloo's connections, and those by which ranks learn of a death."""
    run_module("tests.comm.listening", str(tmp_path))
    seen = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(seen) == {"1-0", "2-0", "2-1"}
    for name, rank in seen.items():
        places = {place for look in rank["seen"] for place in look}
        assert not places & EVERYWHERE, name
        assert set(rank["bound"]) <= {"127.0.0.1", "::1"}, name
    assert len(seen["2-0"]["seen"][0]) >= 2, "the store's, and gloo's"
    assert len(seen["2-0"]["bound"]) == 2, "the store's, and for a moment the watch's"


def resolves(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0)) for a in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


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
    resolves(monkeypatch, *addresses)
    with caplog.at_level(logging.WARNING, logger="lightfed"):
        assert interface_of(name, nodes=nodes) == expected
    assert len(caplog.records) == (expected == "")


def test_where_the_interface_is_not_known_all_are_listened_on() -> None:
    with listen("", backlog=1) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with listen("127.0.0.1", backlog=1) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
