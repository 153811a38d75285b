"""`sweep`, `compare` and `study` are struck at random moments: the numbers of those that are not.

No run is trained twice: a strike costs the rounds that were under way, and no more.
"""

import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import lightfed.cli.federation_cli
import lightfed.report.page  # noqa: F401  (both before commands are forked)
from tests.promises.chaos.contests import (
    COMMANDS,
    JOBS,
    KINDS,
    ROUNDS,
    RUNS,
    Result,
    is_gone,
    is_locked,
    result,
    rounds_begun,
    start,
    strike,
    until,
    wait,
    write_files,
)

STRIKES = 8  # of each command alone
TOGETHER = 4  # of two at once
_LOST = 2  # rounds of a training that a strike costs: the one under way, and the one being saved
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def unstruck(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """The result of each command that nothing disturbs."""

    @cache
    def run(name: str) -> Result:
        before = Path.cwd()
        os.chdir(tmp_path_factory.mktemp(name))
        try:
            write_files()
            assert wait(start(name, "output")) == 0, Path("output.err").read_text()
            found = result(name, "output")
            assert len(found.tables) == RUNS[name]
            assert rounds_begun().total() == RUNS[name] * ROUNDS
        finally:
            os.chdir(before)
        return found

    return run


def trials(number: int, *default: tuple[str, int]) -> list[object]:
    """Trials of all commands by name and number; those by default, and those of the slow tier."""
    every = [(name, trial) for name in COMMANDS for trial in range(number)]
    return [pytest.param(*t, marks=() if t in default else pytest.mark.slow) for t in every]


def kind_of(trial: int) -> str:
    return [*KINDS][trial % len(KINDS)]


def check(name: str, output: str, unstruck: Result) -> None:
    """The result is that of a command that was not struck, and no run was trained twice."""
    assert result(name, output) == unstruck
    begun = rounds_begun()
    assert len(begun) == RUNS[name] * ROUNDS
    assert begun.total() - len(begun) <= _LOST * JOBS[name], begun
    assert not any(is_locked(path) for path in Path("runs/.locks").glob("*"))


@pytest.mark.parametrize(("name", "trial"), trials(STRIKES, ("sweep", 0)))
def test_a_command_that_is_struck_goes_on(
    name: str,
    trial: int,
    unstruck: Callable[[str], Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = unstruck(name)
    kind = KINDS[kind_of(trial)]
    draw = random.Random(f"{name} {trial}")
    number = 0
    struck = False
    while not struck:  # a command that was quicker than its strike is no trial
        number += 1
        (tmp_path / f"{number}").mkdir()
        monkeypatch.chdir(tmp_path / f"{number}")
        write_files()
        pid = start(name, "struck")
        struck = strike(kind, pid, draw, name)
        status = wait(pid)

    if not kind.ends:
        assert status == 0, Path("struck.err").read_text()
        check(name, "struck", expected)
    assert status != 0 or len(result(name, "struck").tables) == RUNS[name]
    assert wait(start(name, "again")) == 0, Path("again.err").read_text()
    check(name, "again", expected)
    until(lambda: is_gone(pid))


@pytest.mark.parametrize(("name", "trial"), trials(TOGETHER))
def test_of_two_at_once_the_other_does_the_work_of_the_struck_one(
    name: str,
    trial: int,
    unstruck: Callable[[str], Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = unstruck(name)
    monkeypatch.chdir(tmp_path)
    write_files()
    draw = random.Random(f"two {name} {trial}")
    first, second = start(name, "first"), start(name, "second")
    strike(KINDS[kind_of(trial)], first, draw, name)
    status = wait(first)
    assert wait(second) == 0, Path("second.err").read_text()
    check(name, "second", expected)
    if status != 0:
        assert wait(start(name, "first")) == 0, Path("first.err").read_text()
    check(name, "first", expected)
    until(lambda: is_gone(first) and is_gone(second))
