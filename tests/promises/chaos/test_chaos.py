"""Fifty hits at random moments of runs of thirty rounds: the bits of one that nobody disturbed."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.promises.chaos.driver import HITS, KINDS, ROUNDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

_OF_THIS_MACHINE = ("seconds", "wire_bytes")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k not in _OF_THIS_MACHINE} for row in rows]


@pytest.mark.parametrize("case", ["heterofl", "my1", "fedapen"])
def test_a_run_that_is_hit_again_and_again_has_the_bits_of_one_that_is_not(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "tests.promises.chaos.driver", str(tmp_path), case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    stated: dict[str, Any] = json.loads((tmp_path / "chaos.json").read_text())
    counted = stated["counted"]
    with capsys.disabled():
        print(f"\n{case}: {len(stated['folders']) - 1} runs of {ROUNDS} rounds")
        for kind in KINDS:
            print(f"  {counted.get(kind, 0):3d} x {kind}")
    assert sum(counted.values()) >= HITS
    assert min(counted[kind] for kind in KINDS) >= HITS // len(KINDS)
    for hit in stated["hits"]:
        assert hit["finished"] == (0 in hit["statuses"]), hit
        if not hit["finished"]:
            assert all(hit["statuses"]), f"a rank of a run that is not finished ended with 0: {hit}"
    straight, *others = [Path(folder) for folder in stated["folders"]]
    for folder in others:
        for name in ("digest.json", "run/clients.csv"):
            assert (folder / name).read_text() == (straight / name).read_text(), (folder, name)
        assert rows_of(folder / "run/metrics.csv") == rows_of(straight / "run/metrics.csv")
        assert [p.name for p in folder.iterdir() if p.name.startswith("run")] == ["run"]
