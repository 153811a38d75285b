"""Ratios of interleaved measurements, and what a result depends on."""

import platform
import statistics
from dataclasses import asdict, dataclass, field
from importlib.metadata import version


@dataclass(frozen=True)
class Figure:
    """One measured ratio.

    Attributes:
        name: of what is measured.
        ratio: of the smallest values; the least noisy figure.
        median: of the ratios within the passes.
        spread: least and largest ratio of a pass.
        target: the largest median that is good enough; None where there is none.
        baseline: the measurements below the ratio, one a pass.
        measured: the measurements above it.
        extra: anything else that belongs to the figure.
    """

    name: str
    ratio: float
    median: float
    spread: tuple[float, float]
    target: float | None
    baseline: list[float]
    measured: list[float]
    extra: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        *,
        baseline: list[float],
        measured: list[float],
        target: float | None,
        extra: dict[str, float] | None = None,
    ) -> "Figure":
        """The ratios of `measured` to `baseline`, pass by pass."""
        ratios = [new / old for new, old in zip(measured, baseline, strict=True)]
        return cls(
            name=name,
            ratio=min(measured) / min(baseline),
            median=statistics.median(ratios),
            spread=(min(ratios), max(ratios)),
            target=target,
            baseline=baseline,
            measured=measured,
            extra=extra or {},
        )

    @property
    def met(self) -> bool:
        return self.target is None or self.median <= self.target

    def text(self) -> str:
        """One line for people."""
        low, high = self.spread
        line = (
            f"ratio {self.ratio:.3f} of the least, {self.median:.3f} median ({low:.3f}-{high:.3f})"
        )
        if self.target is None:
            return line
        return f"{line}; at most {self.target:g}: {'met' if self.met else 'MISSED'}"

    def row(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self) | {"met": self.met}


def software() -> dict[str, str]:
    """The versions that figures depend on."""
    return {"python": platform.python_version(), "machine": platform.machine()} | {
        name: version(name) for name in ("lightfed", "torch", "lightning", "numpy")
    }
