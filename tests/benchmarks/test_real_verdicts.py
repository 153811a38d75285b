"""What is made of a bank of runs: comparisons without a difference, planted gains, and choices."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    import real_verdicts  # type: ignore[import-not-found]

    yield real_verdicts
    for name in ("verdicts", "real_verdicts"):
        sys.modules.pop(name, None)


def test_no_run_occurs_twice_in_a_comparison(real: ModuleType) -> None:
    # The accuracy of seed s is 2^s, so that a difference says which two runs it is of.
    accuracy = 2.0 ** np.arange(40)
    comparisons = real.null_comparisons(accuracy, 7, 5)
    assert comparisons.shape == (7, 5)
    # The first matching has the pairs 2i and 2i + 1, in order.
    assert comparisons[:4].ravel() == pytest.approx(2.0 ** np.arange(0, 40, 2))
    for comparison in comparisons:
        seeds = []
        for difference in comparison:
            # 2^a - 2^b is known by its binary digits: ones from the lower to below the higher.
            digits = bin(int(abs(difference)))[2:]
            low = len(digits) - len(digits.rstrip("0"))
            seeds += [low, len(digits)]
        assert len(set(seeds)) == 10


def test_a_choice_on_test_samples_is_biased_and_one_on_validation_is_not(real: ModuleType) -> None:
    rng = np.random.default_rng(0)
    first, second = 90 + rng.standard_normal((2, 2, 20_000))
    biases = real.bias_of_choice(first, second)
    # The larger of two exceeds their mean by half of |x - y|, whose mean is 2 / sqrt(pi).
    assert biases["test samples"][0] == pytest.approx(1 / np.sqrt(np.pi), abs=0.02)
    assert biases["validation samples"][0] == pytest.approx(0, abs=0.02)


def test_a_bank_gives_errors_power_and_seeds(
    real: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(1)
    null = 94 + rng.standard_normal((2, 240))
    worse = null[:, :60] - 1 + rng.standard_normal((2, 60))
    near = 94 + rng.standard_normal((2, 50))
    real.report({"null": null, "worse": worse, "near": near}, 1000)
    lines = capsys.readouterr().out.splitlines()

    def line(start: str) -> str:
        (only,) = [one for one in lines if one.startswith(start)]
        return only

    for name in ("20 seeds", "until decided"):
        declared, *percents = re.findall(
            r": (\d+) of 200 .* simulated ([\d.]+) %, one or more of 21 ([\d.]+) %", line(name)
        )[0]
        assert 0 < int(declared) <= 24
        assert all(0 < float(percent) <= 8 for percent in percents)
    for name in ("a planted gain of one paired deviation", "a planted gain of one point"):
        found = re.findall(r"(\d+) seeds announced find it in ([\d.]+) %", line(name))[0]
        assert int(found[0]) in range(7, 14)
        assert 74 <= float(found[1]) <= 92
    assert float(re.findall(r"design: (0\.\d+) over", line("runs of the fixed"))[0]) < 0.6
