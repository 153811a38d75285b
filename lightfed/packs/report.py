"""What the sessions of a pack report.

The numbers may still be on a GPU when a session ends. They come to the host together with those of
other sessions (`utils/reading.py`), so that the host waits for the device once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightfed.data.batches import sent
from lightfed.local.session import Report
from lightfed.utils.reading import Pending
from lightfed.utils.stopwatch import Stopwatch


class BatchSizes:
    """The number of samples in every batch of a pack, on the pack's device.

    Args:
        sizes: (K, steps) on the host; 0 after a client's last batch.
        device: Where the losses are.
    """

    def __init__(self, sizes: np.ndarray, device: torch.device) -> None:
        self._sizes = sizes
        self._device = device

    @cached_property
    def _by_step(self) -> Tensor:
        """All sizes as a tensor of shape (steps, K), sent to the device when first needed."""
        by_step = np.ascontiguousarray(self._sizes.T)
        return sent(torch.from_numpy(by_step), self._device)

    def at(self, step: int, active: int) -> Tensor:
        """Return the sizes of the first `active` clients' batches in a step, of shape (active,)."""
        return self._by_step[step, :active]

    def unequal_at(self, step: int, active: int) -> Tensor | None:
        """Return the same as `at`, or None if all these batches have the same size."""
        sizes = self._sizes[:active, step]
        if (sizes == sizes[0]).all():
            return None
        return self.at(step, active)


@dataclass
class PackResult:
    """The numbers of K sessions; they may still be on the device.

    Attributes:
        clients: Numbers of the clients, in the order of their rows.
        sizes: Samples in every batch, of shape (K, steps); 0 after a client's last batch.
        stopwatch: Times the whole pack.
        sizes_on_device: The sizes, where the losses are.
        rates: Learning rates that every session logs, by name.
        losses: For each step the losses of the clients that had a batch, of shape (active,).
        logged: For each name that the module logged, the clients' sums over samples, of shape (K,).
        counts: The numbers of these samples, of shape (K,), by name.
        norms: Norms of the trained rows, of shape (K,).
    """

    clients: Sequence[int]
    sizes: np.ndarray
    stopwatch: Stopwatch
    sizes_on_device: BatchSizes
    rates: Mapping[str, float]
    losses: list[Tensor] = field(default_factory=list)
    logged: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, np.ndarray] = field(default_factory=dict)
    norms: Tensor = field(default_factory=lambda: torch.empty(0))

    def note(self, losses: Tensor, logged: Mapping[str, Tensor], step: int) -> None:
        """Add the numbers of a step, each of shape (active,)."""
        active = len(losses)
        self.losses.append(losses)

        for name, values in logged.items():
            if name not in self.logged:
                # In float64: float32 stops counting samples at 2^24.
                self.logged[name] = values.new_zeros(len(self.clients), dtype=torch.float64)
                self.counts[name] = np.zeros(len(self.clients), np.int64)
            self.logged[name][:active] += values.double() * self.sizes_on_device.at(step, active)
            self.counts[name][:active] += self.sizes[:active, step]

    def pending(self) -> list[Tensor]:
        """Return the tensors whose values `reports` reads."""
        return [*self.losses, self.norms, *self.logged.values()]

    def receive(self, values: Sequence[Tensor]) -> None:
        """Take the values of `pending`, in its order, on the host."""
        arrived = iter(values)
        self.losses = [next(arrived) for _ in self.losses]
        self.norms = next(arrived)
        self.logged = {name: next(arrived) for name in self.logged}

    @cached_property
    def reports(self) -> list[Report]:
        """The report of each client, without FLOPs."""
        steps = (self.sizes > 0).sum(1).tolist()
        samples = self.sizes.sum(1)
        mean_losses = self._mean_losses(samples).tolist()
        sample_counts = samples.tolist()
        norms = self.norms.tolist()

        # The clients of a pack cannot be timed one by one: each gets an equal share.
        seconds = self.stopwatch.seconds() / len(samples)

        reports = []
        for position, client in enumerate(self.clients):
            report = Report(
                client,
                sample_counts[position],
                steps[position],
                metrics={"train_loss": mean_losses[position]},
                norm=norms[position],
                updates=steps[position],
                seconds=seconds,
            )
            reports.append(report)

        for name, sums in self.logged.items():
            counts = self.counts[name].tolist()
            for report, total, count in zip(reports, sums.tolist(), counts, strict=True):
                # A short session may never reach the batches in which the module logs.
                if count:
                    report.metrics[name] = total / count

        for report in reports:
            report.metrics |= self.rates

        return reports

    def _mean_losses(self, samples: np.ndarray) -> np.ndarray:
        """Return each client's mean loss over its samples, of shape (K,)."""
        losses = np.zeros(self.sizes.shape)
        for step, values in enumerate(self.losses):
            losses[: len(values), step] = values.float().numpy()

        means: np.ndarray = (losses * self.sizes).sum(1) / samples
        return means


@dataclass
class PackedReport:
    """The report of one client of a pack, before its numbers have come to the host.

    Attributes:
        result: The numbers of the pack.
        position: Of the client in the pack.
        flops: Forward FLOPs of a sample.
    """

    result: PackResult
    position: int
    flops: Tensor | float

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the session."""
        return int((self.result.sizes[self.position] > 0).sum())

    def sources(self) -> list[Pending]:
        """Return what has to be read from the device before `resolve` is called."""
        return [self, self.result]

    def pending(self) -> list[Tensor]:
        """Return the tensors that `resolve` reads besides those of the pack."""
        return [self.flops] if isinstance(self.flops, Tensor) else []

    def receive(self, values: Sequence[Tensor]) -> None:
        """Take the values of `pending` on the host."""
        for value in values:
            self.flops = value

    def resolve(self) -> Report:
        """Return the report; all numbers must be on the host."""
        report = self.result.reports[self.position]
        report.flops = float(self.flops)
        return report
