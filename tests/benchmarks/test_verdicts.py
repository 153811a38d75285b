"""The simulation of verdicts prints errors and power of every design."""

import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_every_design_has_its_errors_and_its_power(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["verdicts.py", "--repetitions", "1000"])
    import verdicts  # type: ignore[import-not-found]

    try:
        verdicts.main()
    finally:
        sys.modules.pop("verdicts")
    lines = capsys.readouterr().out.splitlines()

    for name in ("5 seeds", "20 seeds", "until decided, Pocock"):
        errors, power, *_ = [line for line in lines if line.startswith(f"{name} ")]
        for percent in re.findall(r"([\d.]+) %", errors):
            assert float(percent) <= 8  # of 1,000 repetitions
        assert re.findall(r"([\d.]+) %", power)[-1] in ("99.6", "99.7", "99.8", "99.9", "100.0")
