"""Prints the table and the requirements, and writes the CSV."""

import csv
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.case import COMPILED, OFFICIAL, OURS, Case
from bench.measure import Environment, Row

HEADER = (
    f"{'operation':16} {'model':8} {'shape':24} {'dtype':8} {'code':9} {'ms':>9} {'p20':>9} "
    f"{'p80':>9} {'GB/s':>7} {'%copy':>6} {'official/':>9} {'error':>8}"
)


def line(row: Row) -> str:
    """Return a row of the table, with the columns of HEADER."""
    text = (
        f"{row.operation:16} {row.model:8} {row.shape:24} {row.dtype:8} {row.contender:9} "
        f"{row.ms:9.3f} {row.ms_p20:9.3f} {row.ms_p80:9.3f} {row.gb_per_s:7.4g} "
        f"{row.copy_percent:6.1f} {row.times_official:9.2f} {row.error:8.1e}"
    )
    return text if row.passed else f"{text}  FAIL"


@dataclass(frozen=True)
class Gate:
    """A required number of one code, for ResNet-18 in float32, or for its masks alone.

    Attributes:
        device: cpu or cuda.
        operation: As of the case.
        shape: As of the case.
        contender: The name of the code.
        column: The field of a row that has to be at least `least`.
        least: The number.
    """

    device: str
    operation: str
    shape: str
    contender: str
    column: str
    least: float

    def title(self) -> str:
        """Return what is required, in words."""
        what = {
            "times_official": "times the official code",
            "copy_percent": "% of the copy bandwidth, every input read once",
            "read_percent": "% of the copy bandwidth, every receiver's reads",
        }[self.column]
        who = "" if self.contender == OURS else f" {self.contender}"
        return f"{self.operation}{who}, {self.shape}: {what}"


GATES = (
    Gate("cpu", "masked_mean", "1 receiver of 11", OURS, "times_official", 1.2),
    Gate("cpu", "masked_mean", "1 receiver of 11", COMPILED, "times_official", 5),
    Gate("cpu", "slice_merge", "10 clients", OURS, "times_official", 10),
    Gate("cpu", "prune_regrow", "1 client", OURS, "times_official", 2.5),
    Gate("cpu", "pack_mask", "1 client", OURS, "times_official", 15),
    Gate("cuda", "slice_merge", "10 clients", OURS, "copy_percent", 90),
    Gate("cuda", "slice_merge", "100 clients", OURS, "copy_percent", 90),
    Gate("cuda", "masked_mean", "1 receiver of 11", OURS, "copy_percent", 90),
    Gate("cuda", "masked_mean", "13 receivers of 100", OURS, "read_percent", 90),
    Gate("cuda", "masked_mean", "100 receivers of 100", OURS, "copy_percent", 50),
    Gate("cuda", "slice_merge", "10 clients", OURS, "times_official", 50),
    Gate("cuda", "slice_merge", "100 clients", OURS, "times_official", 50),
    Gate("cuda", "masked_mean", "1 receiver of 11", OURS, "times_official", 50),
    Gate("cuda", "masked_mean", "13 receivers of 100", OURS, "times_official", 50),
    Gate("cuda", "masked_mean", "100 receivers of 100", OURS, "times_official", 50),
)


def required(case: Case, device: str) -> set[str]:
    """Return the codes of a case that a requirement on this device compares; none without one."""
    contenders = set()
    for gate in GATES:
        if (gate.device, gate.operation, gate.shape) == (device, case.operation, case.shape):
            contenders.add(gate.contender)
    if not contenders:
        return set()
    return {*contenders, OURS, OFFICIAL}


def gates(rows: Iterable[Row], device: str, operations: Collection[str]) -> tuple[list[str], bool]:
    """Compare rows with the requirements.

    Args:
        rows: What has been measured.
        device: cpu or cuda.
        operations: The operations that were to be measured.

    Returns:
        A line for every requirement on this device, and whether all were measured and met.
    """
    measured: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        if row.model == "resnet18" and row.dtype in ("float32", "bool"):
            measured[row.operation, row.shape, row.contender] = row

    lines = []
    all_are_met = True
    for gate in GATES:
        if gate.device != device or gate.operation not in operations:
            continue
        row_of_gate = measured.get((gate.operation, gate.shape, gate.contender))
        if row_of_gate is None:
            value = float("nan")
            word = "not measured"
        else:
            value = getattr(row_of_gate, gate.column)
            word = "PASS" if row_of_gate.passed and value >= gate.least else "FAIL"
        all_are_met = all_are_met and word == "PASS"
        lines.append(f"  {word:12}  {value:8.2f} >= {gate.least:<5g} {gate.title()}")
    return lines, all_are_met


def write_csv(path: Path, environment: Environment, rows: Sequence[Row]) -> None:
    """Write a line for every row, with the environment in each, so that files can be joined."""
    lines = [{**asdict(row), **asdict(environment)} for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
