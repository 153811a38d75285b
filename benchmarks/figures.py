"""Ratios of measurements that took turns, and the state of the machine."""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lightning
import torch

import lightfed


def out_folder(text: str) -> Path:
    """The folder of `--out`, made at once: what it cannot hold must not be measured first.

    Raises:
        argparse.ArgumentTypeError: it cannot be made.
    """
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return path


@dataclass(frozen=True)
class Figure:
    """One measured ratio.

    Attributes:
        baseline: the measurements below the ratio, one a pass.
        measured: the measurements above it.
        goal: the largest median that is good enough; None where there is none.
    """

    baseline: list[float]
    measured: list[float]
    goal: float | None = None

    @property
    def ratios(self) -> list[float]:
        """Pass by pass, because both sides of a pass met the same machine."""
        return [new / old for new, old in zip(self.measured, self.baseline, strict=True)]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool:
        return self.goal is None or self.median <= self.goal

    def text(self) -> str:
        """Median, least and largest, and whether the goal is met."""
        line = spread(self.ratios, digits=3)
        if self.goal is None:
            return line
        return f"{line}  goal {self.goal:g}: {'met' if self.met else 'MISSED'}"


def spread(values: list[float], *, digits: int) -> str:
    """The median, and the least and the largest value."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def machine() -> str:
    """Versions, cores and load: what a figure depends on."""
    libraries = (lightfed, torch, lightning)
    software = ", ".join(f"{library.__name__} {library.__version__}" for library in libraries)
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{software}; {os.cpu_count()} cores, load average {load}"


@contextmanager
def busy(loaded: bool) -> Iterator[None]:
    """Keep every core busy with a process of its own, if asked to."""
    count = (os.cpu_count() or 1) if loaded else 0
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
