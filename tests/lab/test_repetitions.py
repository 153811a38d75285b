"""A comparison that is repeated, on any number of ranks, has the same bits."""

import contextlib
import io
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

import pytest

from lightfed.cli.command_line import main
from lightfed.cli.wanted import Wanted
from lightfed.lab import sweep
from lightfed.testing.ranks import start_job, wait
from tests.forked import in_new_process
from tests.lab.reading import check_once
from tests.lab.test_sweep import results
from tests.promises.refusals.mistakes import edited

CONV = {"class_path": "Conv", "init_args": {"hidden": [4]}}
SEVEN = {
    "model.algorithm": "FedAvg",
    "model.clients": [{"count": 7, "model": CONV}],
    "trainer.max_epochs": 2,
    "trainer.enable_page": False,
}
RANKS = (1, 2, 4)
SETS = "--seeds 0-1 --metric train_loss --set-b model.local_epochs=2 --json --set trainer.devices="


def run(
    runs: Sequence[Wanted], *, jobs: int, to: TextIO | None, after: Callable[[Wanted], None]
) -> int:
    """Missing runs, on ranks that are forked instead of imported again."""
    for wanted in runs:
        assert wait(start_job(wanted.ranks, partial(_train, wanted.words)))
        after(wanted)
    return 0


def _train(words: Sequence[str], rank: int) -> None:
    main([*words])


def repeat(folder: Path, times: int) -> None:
    """All answers and runs of the comparison are equal, each in a folder of its own."""
    sweep.check, sweep.run = check_once, run  # type: ignore[assignment]
    config, found = edited(SEVEN), set()
    for number in range(times * len(RANKS)):
        place = folder / str(number)
        place.mkdir()
        os.chdir(place)
        (place / "run.yaml").write_text(config)
        words = f"compare run.yaml run.yaml {SETS}{RANKS[number % len(RANKS)]}".split()
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
            main(words)
        answer = json.loads(said.getvalue())
        assert answer["rows"]["train_loss"]["difference"] < 0
        assert answer["rows"].pop("seconds")
        kept = {key: answer[key] for key in ("rows", "verdict", "seeds_needed")}
        folders = sorted(path.parent for path in place.glob("runs/*/metrics.csv"))
        assert len(folders) == 4
        found.add(json.dumps(kept) + repr([results(own) for own in folders]))
    assert len(found) == 1


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(1, marks=pytest.mark.matrix),
        pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_repetitions_on_any_number_of_ranks_have_the_same_bits(times: int, tmp_path: Path) -> None:
    in_new_process(partial(repeat, tmp_path, times))
