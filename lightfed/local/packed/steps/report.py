"""What the sessions of a pack report, read from the device together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from lightfed.local.session import Report
from lightfed.utils.stopwatch import Stopwatch


@dataclass
class PackResult:
    """What K sessions report; the numbers may still be on the device.

    Attributes:
        clients: in the order of their rows.
        sizes: (K, steps) samples of the batches; 0 after a client's last one.
        losses: (K, steps) of the batches; 0 after a client's last one.
        logged: what the modules logged, by name: (2, K) sums over samples, and their numbers.
        norms: (K,) of the trained rows.
        stopwatch: of the pack.
    """

    clients: Sequence[int]
    sizes: np.ndarray
    losses: Tensor
    logged: dict[str, Tensor]
    norms: Tensor
    stopwatch: Stopwatch

    def reports(self, *, flops: float) -> list["PackedReport"]:
        """One for each client, with the forward FLOPs of a sample."""
        steps = (self.sizes > 0).sum(1).tolist()
        return [PackedReport(self, place, n, flops) for place, n in enumerate(steps)]

    @cached_property
    def numbers(self) -> list[tuple[Report, float]]:
        """Of each client, what its module logged, and its mean loss; read from the device once."""
        samples, total = self.sizes.sum(1), np.zeros(len(self.sizes))
        # One step after the other, as for a client alone.
        for losses, sizes in zip(self.losses.double().cpu().numpy().T, self.sizes.T, strict=True):
            total += losses * sizes
        columns = samples, (self.sizes > 0).sum(1), total / samples
        numbers = zip(
            self.clients, self.norms.tolist(), *(x.tolist() for x in columns), strict=True
        )
        seconds = self.stopwatch.seconds() / len(samples)
        found = [
            (Report(client, count, steps, norm=norm, seconds=seconds), loss)
            for client, norm, count, steps, loss in numbers
        ]
        for name, sums in self.logged.items():
            for (report, _), value, count in zip(found, *sums.tolist(), strict=True):
                if count:
                    report.metrics[name] = value / count
        return found


@dataclass
class PackedReport:
    """The report of one client of a pack, read with those of the others."""

    result: PackResult
    place: int
    steps: int
    flops: Tensor | float
    logged: dict[str, Tensor | float] = field(default_factory=dict)

    def resolve(self) -> Report:
        report, loss = self.result.numbers[self.place]
        report.flops = float(self.flops)
        report.metrics |= {name: float(value) for name, value in self.logged.items()}
        report.metrics.setdefault("train_loss", loss)
        return report
