"""For all tests: one thread, and no network but the loopback device."""

import atexit
import ipaddress
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from typing_extensions import override

from lightfed.utils.process import imports_begin, imports_end

# Hypothesis: the same examples in every run, however slow the machine is.
settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    max_examples=30,
    # A fixture such as `device` is the same for all examples of a test.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("steady")

torch.set_num_threads(1)

imports_begin()  # to the end of the collection: half a million objects are never looked at again


def pytest_collection_finish() -> None:
    from tests import forked  # it imports lightfed, which reads what is set below

    imports_end()
    _read_packages_once()
    forked.begin()


def _read_packages_once() -> None:
    """Let all Trainers of a test process share what one has found of the installed packages.

    Every Trainer of Lightning reads the metadata of all of them, to find callbacks.
    """
    registry = sys.modules.get("lightning.fabric.utilities.registry")
    if registry is not None:
        registry.entry_points = cache(registry.entry_points)


# The files of a test need not outlive the machine. A run waits for the disk dozens of times, and
# with thousands of files about, some of these waits take ten seconds. That files are flushed before
# they are renamed is tested in tests/core/utils/test_atomic_io.py.
os.fsync = lambda descriptor: None

# Kernels are interpreted where they cannot be compiled; Triton looks when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What data sets keep on disk: one folder for a test run, its workers and the ranks they start.
if "LIGHTFED_TEST_CACHE" not in os.environ:
    os.environ["LIGHTFED_TEST_CACHE"] = tempfile.mkdtemp(prefix="lightfed-cache")
    atexit.register(shutil.rmtree, os.environ["LIGHTFED_TEST_CACHE"], ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = os.environ["LIGHTFED_TEST_CACHE"]

# Where bytecode is not kept beside the sources, every process of a test would compile torch again.
if not os.path.exists(torch.__spec__.cached):
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = os.environ["LIGHTFED_TEST_CACHE"]

_connect, _connect_ex = socket.socket.connect, socket.socket.connect_ex


def _refuse_remote(sock: socket.socket, address: Any) -> None:
    """Local sockets and the loopback device stay open: ranks of a test talk over them."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    host = address[0]
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host in ("localhost", "localhost.localdomain", "")
    if not local:
        raise RuntimeError(f"a test tried to reach {address}: tests do not use the network")


def _guarded_connect(sock: socket.socket, address: Any) -> None:
    _refuse_remote(sock, address)
    _connect(sock, address)


def _guarded_connect_ex(sock: socket.socket, address: Any) -> int:
    _refuse_remote(sock, address)
    return _connect_ex(sock, address)


socket.socket.connect = _guarded_connect  # type: ignore[assignment, method-assign]
socket.socket.connect_ex = _guarded_connect_ex  # type: ignore[assignment, method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is no CUDA device, tests that need one say so, even if they are asked for."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class _Fallbacks(logging.Handler):
    """Collects the warnings of packs that raised, whose clients then train one by one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture(autouse=True)
def _no_pack_raises(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test fails if a pack raises in it, unless it is marked `pack_raises`.

    Clients that train one after the other instead have the same results, so that nothing else in
    a test would tell.
    """
    fallbacks = _Fallbacks()
    logger = logging.getLogger("lightfed.packs.runner")
    logger.addHandler(fallbacks)
    try:
        yield
    finally:
        logger.removeHandler(fallbacks)
    if fallbacks.messages and request.node.get_closest_marker("pack_raises") is None:
        pytest.fail(f"a pack raised: {fallbacks.messages[0]}")


@pytest.fixture
def unchecked_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that are not finite are let through: the shortest way to a session that breaks."""
    monkeypatch.setattr("lightfed.data.checks.first_mistake", lambda *_: None)
