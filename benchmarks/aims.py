"""What a card is expected to reach, and what was measured."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Aim:
    """A figure of a card, and what is expected of it.

    Attributes:
        name: what was measured.
        value: the figure; None if it was not measured.
        goal: at least so much.
        floor: the least that is good enough for now.
        unit: of all three.
    """

    name: str
    value: float | None
    goal: float
    floor: float
    unit: str = "x"

    def line(self) -> str:
        """A row of the table of goals."""
        expected = f"goal {self.goal:g} {self.unit}, floor {self.floor:g} {self.unit}"
        if self.value is None:
            return f"{self.name:58} {'not measured':>14}  {expected}"
        if self.value >= self.goal:
            verdict = "met"
        elif self.value >= self.floor:
            verdict = "above the floor"
        else:
            verdict = "MISSED"
        return f"{self.name:58} {self.value:>10.2f} {self.unit:3}  {expected}: {verdict}"


AIMS_FILE = "aims.json"


def write_aims(folder: Path | None, aims: list[Aim]) -> None:
    """Print the aims of a benchmark, and keep them for the table of all."""
    for aim in aims:
        print(aim.line(), flush=True)
    if folder is not None:
        (folder / AIMS_FILE).write_text(json.dumps([asdict(aim) for aim in aims], indent=1) + "\n")


def read_aims(folder: Path) -> list[Aim]:
    """What `write_aims` kept in a folder; nothing if it kept nothing."""
    path = folder / AIMS_FILE
    if not path.exists():
        return []
    return [Aim(**fields) for fields in json.loads(path.read_text())]
