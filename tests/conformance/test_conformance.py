"""The kit: (d) any number of ranks, (e) and a stopped and resumed run, give the same bits."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.cases import CASES

WORLDS = (1, 2, 4)
Digests = dict[int, dict[str, dict[str, dict[str, str]]]]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start_ranks(command: list[str], ranks: int) -> list[subprocess.Popen[str]]:
    """Processes as Lightning finds them when somebody else has started them."""
    base = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    base |= {"NODE_RANK": "0", "WORLD_SIZE": str(ranks)}
    return [
        subprocess.Popen(
            command, env={**base, "LOCAL_RANK": str(rank)}, text=True, stderr=subprocess.PIPE
        )
        for rank in range(ranks)
    ]  # fmt: skip


@pytest.fixture(scope="session")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    found: Digests = {}
    for world in WORLDS:
        folder = tmp_path_factory.mktemp(f"world{world}")
        processes = start_ranks(
            [sys.executable, "-m", "tests.conformance.worker", str(folder), str(world)], world
        )
        for process in processes:
            _, errors = process.communicate(timeout=580)
            assert process.returncode == 0, errors[-3000:]
        found[world] = json.loads(Path(folder / "digests.json").read_text())
    return found


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_ranks_gives_the_same_bits(name: str, world: int, digests: Digests) -> None:
    assert digests[world][name]["straight"] == digests[1][name]["straight"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    name: str, world: int, digests: Digests
) -> None:
    assert digests[world][name]["resumed"] == digests[world][name]["straight"]
