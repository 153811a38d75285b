"""The table, the requirements, and the files."""

import csv
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from lightfed_kernels.bench.case import COMPILED, OFFICIAL, OURS, Case
from lightfed_kernels.bench.environment import Environment
from lightfed_kernels.bench.measure import Row

_COLUMNS = (
    f"{'operation':16} {'model':8} {'shape':24} {'dtype':8} {'code':9} {'ms':>9} {'p20':>9} "
    f"{'p80':>9} {'GB/s':>7} {'%copy':>6} {'official/':>9} {'/ours':>7} {'launches':>8} "
    f"{'error':>8} {'H200 floor ms':>13}"
)


def header() -> str:
    return _COLUMNS


def line(row: Row) -> str:
    launches = "-" if row.launches is None else str(row.launches)
    text = (
        f"{row.operation:16} {row.model:8} {row.shape:24} {row.dtype:8} {row.contender:9} "
        f"{_ms(row.ms)} {_ms(row.ms_p20)} {_ms(row.ms_p80)} {row.gb_per_s:7.4g} "
        f"{row.copy_percent:6.1f} {row.times_official:9.2f} {row.times_ours:7.2f} {launches:>8} "
        f"{row.error:8.1e} {row.h200_floor_ms:13.3g}"
    )
    return text if row.passed else f"{text}  FAIL"


def _ms(value: float) -> str:
    return f"{value:9.3f}" if value < 1000 else f"{value:9.0f}"


@dataclass(frozen=True)
class Gate:
    """A required number, of ResNet-18 in float32 (or masks alone).

    Attributes:
        column: the field of a row that has to be at least `least`.
    """

    device: str
    operation: str
    shape: str
    contender: str
    column: str
    least: float

    def title(self) -> str:
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
    Gate("cuda", "slice_merge", "10 clients", OURS, "copy_percent", 85),
    Gate("cuda", "slice_merge", "100 clients", OURS, "copy_percent", 85),
    Gate("cuda", "masked_mean", "1 receiver of 11", OURS, "copy_percent", 85),
    Gate("cuda", "masked_mean", "13 receivers of 100", OURS, "read_percent", 85),
    Gate("cuda", "masked_mean", "100 receivers of 100", OURS, "copy_percent", 50),
    Gate("cuda", "slice_merge", "10 clients", OURS, "times_official", 50),
    Gate("cuda", "slice_merge", "100 clients", OURS, "times_official", 50),
    Gate("cuda", "masked_mean", "1 receiver of 11", OURS, "times_official", 50),
    Gate("cuda", "masked_mean", "13 receivers of 100", OURS, "times_official", 50),
    Gate("cuda", "masked_mean", "100 receivers of 100", OURS, "times_official", 50),
)


def required(case: Case, device: str) -> set[str]:
    """The codes of a case that the requirements compare."""
    found = {
        gate.contender
        for gate in GATES
        if (gate.device, gate.operation, gate.shape) == (device, case.operation, case.shape)
    }
    return {*found, OURS, OFFICIAL} if found else set()


def gates(rows: Iterable[Row], device: str, operations: Collection[str]) -> tuple[list[str], bool]:
    """A line for every requirement on this device, and whether all were measured and met."""
    measured = {
        (row.operation, row.shape, row.contender): row
        for row in rows
        if row.model == "resnet18" and row.dtype in ("float32", "bool")
    }
    lines, met = [], True
    for gate in GATES:
        if gate.device != device or gate.operation not in operations:
            continue
        row = measured.get((gate.operation, gate.shape, gate.contender))
        if row is None:
            met = False
            lines.append(f"  not measured  {'':8} >= {gate.least:<5g} {gate.title()}")
            continue
        found = getattr(row, gate.column)
        passed = row.passed and found >= gate.least
        met &= passed
        word = "PASS" if passed else "FAIL"
        lines.append(f"  {word:12}  {found:8.2f} >= {gate.least:<5g} {gate.title()}")
    return lines, met


def write_json(path: Path, environment: Environment, rows: Sequence[Row]) -> None:
    """{env, rows}; what is no number is null."""
    lines = [{name: _or_null(value) for name, value in row.as_dict().items()} for row in rows]
    content = {"env": environment.as_dict(), "rows": lines}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


def write_csv(path: Path, environment: Environment, rows: Sequence[Row]) -> None:
    """One line a row; the environment is repeated in each, so that files can be joined."""
    lines = [{**row.as_dict(), **environment.as_dict()} for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
