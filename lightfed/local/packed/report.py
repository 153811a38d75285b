"""What the sessions of a pack report, read from the device together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from lightfed.local.session import Report
from lightfed.utils.stopwatch import Stopwatch


class PackResult:
    """What K sessions report; the numbers may still be on the device.

    Args:
        clients: in the order of their rows.
        sizes: samples of each client's batches.
        losses: (K, steps) of the batches; only a client's own steps are used.
        logged: what the modules logged, by name: (2, K) sums over samples, and their numbers.
        squares: (K,) squared norms of the trained rows.
        stopwatch: of the pack.
    """

    def __init__(
        self,
        clients: Sequence[int],
        sizes: Sequence[Sequence[int]],
        losses: Tensor,
        logged: dict[str, Tensor],
        squares: Tensor,
        stopwatch: Stopwatch,
    ) -> None:
        self._clients, self._sizes = clients, sizes
        self._losses, self._logged, self._squares = losses, logged, squares
        self._stopwatch = stopwatch

    def reports(self) -> list["PackedReport"]:
        """One for each client."""
        return [PackedReport(self, place, len(sizes)) for place, sizes in enumerate(self._sizes)]

    @cached_property
    def _numbers(
        self,
    ) -> tuple[list[list[float]], dict[str, list[list[float]]], list[float], float]:
        """All numbers, read from the device once."""
        logged = {name: sums.tolist() for name, sums in self._logged.items()}
        numbers = self._losses.tolist(), logged, self._squares.tolist()
        return *numbers, self._stopwatch.seconds() / len(self._clients)

    def report(self, place: int, flops: float, extra: dict[str, float]) -> Report:
        """The report of one client."""
        losses, logged, squares, seconds = self._numbers
        client, sizes = self._clients[place], self._sizes[place]
        samples = sum(sizes)
        metrics = {
            name: sums[place] / counts[place]
            for name, (sums, counts) in logged.items()
            if counts[place]
        }
        metrics |= extra
        weighted = sum(x * n for x, n in zip(losses[place], sizes, strict=False))
        metrics.setdefault("train_loss", weighted / samples)
        norm = squares[place] ** 0.5
        return Report(client, samples, len(sizes), metrics, norm, flops=flops, seconds=seconds)


@dataclass
class PackedReport:
    """The report of one client of a pack, read with those of the others."""

    result: PackResult
    place: int
    steps: int
    flops: float = 0.0
    logged: dict[str, Tensor | float] = field(default_factory=dict)

    def resolve(self) -> Report:
        extra = {name: float(value) for name, value in self.logged.items()}
        return self.result.report(self.place, self.flops, extra)
