"""A federation whose sessions seem to take hours, so that it pays to move rows; on 1 to 3 ranks.

`main` writes digests, and how many rows have moved.
"""

import csv
import json
import sys
from pathlib import Path

from typing_extensions import override

from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.api.fleet import Fleet
from lightfed.distributed.placement import Rates
from lightfed.testing.case import Case, read_digits
from lightfed.testing.digest import digest, fit
from lightfed.testing.ranks import start_job, wait

ROUNDS = 6
WORLDS = (1, 2, 3)


class Hours(Rates):
    """A group's sessions take a thousand seconds a sample, whatever is measured."""

    @override
    def add(self, group: int, *, samples: int, seconds: float) -> None:
        super().add(group, samples=1, seconds=1e3)


class LongSessions(LGFedAvg):
    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        fed.places.rates = Hours()


def algorithm() -> LongSessions:
    return LongSessions(2)


def main(folder: Path) -> None:
    for split in ("train", "test"):
        read_digits(split)
    for ranks in WORLDS:
        place = folder / str(ranks)

        def work(rank: int, ranks: int = ranks, place: Path = place) -> None:
            found = digest(*fit(Case(algorithm), place, rounds=ROUNDS, ranks=ranks))
            with (place / "run" / "timings.csv").open(newline="") as file:
                moved = [int(row["moved"]) for row in csv.DictReader(file)]
            (folder / f"{rank}-of-{ranks}.json").write_text(json.dumps([found, moved]))

        if not wait(start_job(ranks, work)):
            sys.exit(f"the job of {ranks} ranks failed")
