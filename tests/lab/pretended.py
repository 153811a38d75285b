"""Runs of comparisons that are written instead of being trained."""

from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from lightfed.cli.wanted import Wanted
from tests.lab.report.make_run import write_run


class Pretended:
    """Runs that are written at once instead of being trained.

    Attributes:
        seeds: The seeds of each batch, by the order of batches.
        gains: What a method with so many local epochs gains over that with one, in each seed.
        failing: Seeds in which the others fail.
    """

    def __init__(self, gains: Mapping[int, Sequence[float]]) -> None:
        self.seeds: list[list[int]] = []
        self.gains = dict(gains)
        self.failing: tuple[int, ...] = ()

    def run(
        self,
        runs: Sequence[Wanted],
        *,
        jobs: int,
        to: TextIO | None = None,
        after: Callable[[Wanted], None] | None = None,
    ) -> int:
        """Stand for `sweep.run`."""
        self.seeds.append([wanted.values["model.seed"] for wanted in runs])
        status = 0
        for wanted in runs:
            seed = wanted.values["model.seed"]
            epochs = wanted.values["model.local_epochs"]
            if epochs > 1 and seed in self.failing:
                status = 2
                continue
            loss = 2.0 + 0.1 * seed
            if epochs > 1:
                loss -= self.gains[epochs][seed]
            environment = {
                "name": wanted.name,
                "config": wanted.digest,
                "algorithm": "FedAvg",
                "dataset": "Digits",
                "clients": 3,
                "groups": {"0": 3},
                "rounds": 1,
                "seed": seed,
                "finished": {"rounds": 1, "limits": dict(wanted.limits)},
                "experiment": {
                    "digest": f"{epochs}",
                    "settings": {"model.local_epochs": f"{epochs}"},
                },
            }
            write_run(
                wanted.root / f"{wanted.name}-{wanted.digest[:8]}-{epochs}-{seed}",
                metrics={"train_loss": (loss,), "bytes_up": (1,), "bytes_down": (1,)},
                environment=environment,
                config=None,
                evaluations=None,
                counts=None,
            )
            if after is not None:
                after(wanted)
        return status
