"""Whole runs on a device that is not the CPU: set-up, rounds, evaluation, checkpoints, export."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.pytorch.accelerators import CPUAccelerator

from lightfed.engine.strategy import FederatedStrategy
from lightfed.testing.case import Case
from lightfed.testing.digest import fit
from tests.pretend import DEVICE, pretended_device
from tests.promises.conformance.cases import CASES

# FedKD keeps rows on the host, and writes them there after a merge.
QUICK = {("fedbcd_async", 128), ("fedkd", "off"), ("flexifed_max", "off")}
RUNS = [
    pytest.param(name, side, marks=() if (name, side) in QUICK else pytest.mark.matrix)
    for name in CASES
    for side in ("off", 128)
]
OF_THE_MACHINE = ("seconds", "wire_bytes")


def metrics(case: Case, folder: Path) -> list[dict[str, float]]:
    """A row for each round."""
    fit(case, folder)
    with (folder / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name not in OF_THE_MACHINE]
    return [{name: float(row[name] or "nan") for name in names} for row in rows]


@pytest.mark.parametrize(("name", "side_by_side"), RUNS)
def test_a_run_has_the_metrics_of_a_cpu(
    name: str, side_by_side: str | int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = CASES[name]
    case = replace(case, federation=case.federation | {"side_by_side": side_by_side})
    expected = metrics(case, tmp_path / "cpu")
    with monkeypatch.context() as patches:
        patches.setattr(FederatedStrategy, "root_device", DEVICE)
        patches.setattr(CPUAccelerator, "setup_device", lambda *_: None)
        with pretended_device(patches):
            found = metrics(case, tmp_path / "device")
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        # One sample more or less may be right.
        assert ours == pytest.approx(theirs, rel=1e-3, abs=0.03, nan_ok=True)
