"""Where the time of a round goes: timings.csv."""

import csv
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from typing_extensions import override

from lightfed.distributed.collectives import Ranks
from lightfed.utils import stopwatch
from lightfed.utils.stopwatch import PARTS, Part, Timings
from tests.core.distributed.threads import on_ranks
from tests.core.engine.spy import data, federation
from tests.small import fit

SLEEP = 0.05


class Clock:
    """Seconds that only a test passes."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(stopwatch, "time", found)
    return found


def spent(timings: Timings) -> dict[str, float]:
    return {part: seconds for part, seconds in timings.take().items() if seconds}


def raise_after(clock: Clock, seconds: float) -> None:
    clock.now += seconds
    raise ZeroDivisionError


def test_every_moment_counts_for_the_innermost_part(clock: Clock) -> None:
    timings = Timings()
    clock.now += 1
    with timings.part("sessions"):
        clock.now += 2
        with pytest.raises(ZeroDivisionError), timings.part("waiting"):
            raise_after(clock, 4)
        clock.now += 8
    clock.now += 16
    assert spent(timings) == {"rest": 17, "sessions": 10, "waiting": 4}
    with timings.part("merge"):
        clock.now += 1
        assert spent(timings) == {"merge": 1}
        clock.now += 2
    assert spent(timings) == {"merge": 2}


def test_items_are_timed_while_they_are_made_not_while_they_are_used(clock: Clock) -> None:
    timings = Timings()

    def made() -> Any:
        for number in range(2):
            clock.now += 1
            yield number
        clock.now += 4

    with timings.part("sessions"):
        for _ in timings.each("data", made()):
            clock.now += 16
    assert spent(timings) == {"data": 6, "sessions": 32}


def test_a_rank_waits_in_a_gather_and_not_in_a_sum_of_rows(clock: Clock) -> None:
    timings: dict[int, Timings] = {}
    all_begin = threading.Barrier(2)

    def passes(part: Part) -> None:
        """A second, when the other rank has come to this part."""
        while timings[1]._part != part:
            time.sleep(0.001)
        clock.now += 1

    def work(ranks: Ranks) -> dict[str, float]:
        timings[ranks.rank] = ranks.timings
        all_begin.wait()
        with ranks.timings.part("merge"):
            if ranks.rank == 0:
                passes("waiting")
            ranks.gather([1])
            if ranks.rank == 0:
                passes("merge")
            ranks.sum_(torch.zeros(3))
        return spent(ranks.timings)

    assert on_ranks(2, work) == [{"merge": 2}, {"waiting": 1, "merge": 1}]


class Slow(Callback):
    hears = "rounds"

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(SLEEP)

    @override
    def on_validation_start(self, *_: Any) -> None:
        time.sleep(2 * SLEEP)


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "run" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_parts_of_every_round_add_up_and_a_resumed_run_goes_on_with_the_table(
    tmp_path: Path,
) -> None:
    fit(federation(), data(), tmp_path, rounds=2, callbacks=[Slow()])
    first = rows_of(tmp_path, "timings.csv")
    assert list(first[0]) == ["round", *PARTS]
    for row, metrics in zip(first, rows_of(tmp_path, "metrics.csv"), strict=True):
        seconds = {part: float(row[part]) for part in PARTS}
        assert seconds["sessions"] > SLEEP
        assert seconds["evaluation"] > 2 * SLEEP
        assert min(seconds["data"], seconds["merge"], seconds["checkpoint"]) > 0
        assert seconds["waiting"] == 0  # the only rank
        assert sum(seconds.values()) > float(metrics["seconds"])  # without the checkpoint
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    fit(federation(), data(), tmp_path, rounds=4, ckpt_path=str(last))
    found = rows_of(tmp_path, "timings.csv")
    assert [row["round"] for row in found] == ["1", "2", "3", "4"]
    assert found[:2] == first
