"""Processes for ranks are forked from a server that has imported everything, and know this one."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import lightfed.cli.federation_cli  # noqa: F401  (the server of the tests has it, too)
from lightfed.testing import ranks
from tests import forked


def report(place: Path) -> None:
    """Write what a process finds, and say so."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    there = "lightfed.cli.federation_cli" in sys.modules
    place.write_text(f"{os.getpid()} {os.getppid()} {threads} {there} {os.environ.get('NAMED')}")
    print("it is written")


def fail() -> int:
    return 3


def leave() -> None:
    sys.exit("it leaves")


BOTH = pytest.mark.parametrize(
    "in_new_process", [ranks.in_new_process, forked.in_new_process], ids=["package", "tests"]
)
InNewProcess = Callable[..., None]


@BOTH
def test_each_call_has_a_process_of_one_server(
    in_new_process: InNewProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = []
    for name in ("first", "second"):
        monkeypatch.setenv("NAMED", name)
        monkeypatch.setenv("SLURM_JOB_ID", "12")
        in_new_process(report, tmp_path / name)
        found.append((tmp_path / name).read_text().split())
        assert capfd.readouterr().out == "it is written\n"
    (one, server, *first), (other, same, *second) = found
    assert len({one, other, str(os.getpid())}) == 3
    assert server == same
    assert first == ["1", "True", "first"]
    assert second == ["1", "True", "second"]


@BOTH
@pytest.mark.parametrize("function", [fail, leave])
def test_what_fails_in_it_fails_here(
    function: Callable[[], int | None], in_new_process: InNewProcess
) -> None:
    with pytest.raises(AssertionError, match="has printed"):
        in_new_process(function)
