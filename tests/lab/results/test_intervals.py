"""Paired differences over seeds, their intervals, and how finely a time to a target is known."""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightfed.lab.results.groups import Group, each_seed_once
from lightfed.lab.results.paired import Difference
from lightfed.lab.results.run import Run, read
from lightfed.lab.results.text import goal_text, seeds_text
from tests.lab.report.make_run import ENVIRONMENT, write_run

COLUMN = "personal/accuracy"
T2 = 4.302652729911275  # the .975 quantile of Student's t with two degrees of freedom


def _run(root: Path, name: str, seed: int, values: Any, *, column: str = COLUMN) -> Run:
    stated = {**ENVIRONMENT, "name": name, "seed": seed, "rounds": 2}
    folder = root / f"{name}-{seed}-{len(list(root.glob('*')))}"
    write_run(folder, metrics={column: values}, environment=stated, evaluations=None, counts=None)
    return read(folder)


def test_the_interval_is_that_of_the_paired_t_test() -> None:
    found = Difference.of({0: 0.5, 1: 0.9, 2: 0.1}, {2: 0.07, 0: 0.49, 1: 0.88})
    differences = np.array([0.01, 0.02, 0.03])
    half = T2 * differences.std(ddof=1) / math.sqrt(3)
    np.testing.assert_allclose(
        (found.mean, found.low, found.high), (0.02, 0.02 - half, 0.02 + half), rtol=1e-9
    )
    assert found.seeds == (0, 1, 2)
    assert found.verdict(1) == found.verdict(-1) == "not shown"
    # of so many seeds t_.975 + t_.8 standard errors are no more than the mean
    assert found.seeds_needed() == 5


@pytest.mark.parametrize(
    ("sign", "direction", "verdict"),
    [(1, 1, "better"), (-1, 1, "worse"), (1, -1, "worse"), (-1, -1, "better")],
)
def test_an_interval_beside_zero_is_a_difference(sign: int, direction: int, verdict: str) -> None:
    gains = {seed: 0.5 + sign * step for seed, step in enumerate((0.02, 0.03, 0.025, 0.02))}
    rival = dict.fromkeys(range(4), 0.5)
    assert Difference.of(gains, rival).verdict(direction) == verdict
    two = Difference.of({seed: gains[seed] for seed in (0, 1)}, rival)
    assert two.verdict(direction) == "not shown"  # one degree of freedom


def test_one_common_seed_shows_no_interval_and_none_nothing() -> None:
    found = Difference.of({0: 0.6, 1: math.nan}, {0: 0.5, 1: 0.1, 2: 0.2})
    assert found.seeds == (0,)
    assert found.mean == pytest.approx(0.1)
    assert math.isnan(found.low)
    assert found.verdict(1) == "not shown"
    assert found.seeds_needed() is None
    none = Difference.of({0: 0.6}, {1: 0.5})
    assert math.isnan(none.mean)
    assert (none.seeds, none.verdict(1)) == ((), "not shown")


def test_seeds_needed_show_a_difference_four_times_out_of_five() -> None:
    rng = np.random.default_rng(1)
    sample = rng.normal(0.0, 1.0, 7)
    sample = 1.2 * (sample - sample.mean()) / sample.std(ddof=1) + 1.0
    needed = Difference.of(dict(enumerate(sample)), dict.fromkeys(range(7), 0.0))
    n = needed.seeds_needed()
    assert n is not None
    draws = rng.normal(1.0, 1.2, (2000, n))
    rival = dict.fromkeys(range(n), 0.0)
    shown = [Difference.of(dict(enumerate(x)), rival).verdict(1) == "better" for x in draws]
    assert 0.77 <= np.mean(shown) <= 0.86


def test_stretches_of_seeds_are_short() -> None:
    assert seeds_text(()) == ""
    assert seeds_text((4, 5, 6, 8, 10, 11)) == "4-6 8 10-11"


def test_equal_runs_differ_by_nothing_and_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Difference.of({0: 0.5, 1: 0.7}, {0: 0.5, 1: 0.7})
        alike = Difference.of({0: 0.5, 1: 0.7, 2: 0.9}, {0: 0.4, 1: 0.6, 2: 0.8})
    assert (found.low, found.high, found.verdict(1)) == (0.0, 0.0, "not shown")
    assert found.seeds_needed() is None
    np.testing.assert_allclose((alike.low, alike.high), (0.1, 0.1))


def test_a_run_that_is_not_over_has_no_final_figure(tmp_path: Path) -> None:
    over = _run(tmp_path, "rival", 0, (0.1, 0.4))
    short = _run(tmp_path, "rival", 1, (0.9,))
    group = Group("rival", (over, short))
    assert group.finals(COLUMN) == {0: 0.4}
    short.environment["finished"] = {"rounds": 1, "limits": {}}  # as early stopping leaves it
    assert group.finals(COLUMN) == {0: 0.4, 1: 0.9}


def test_of_two_runs_of_a_seed_the_longest_counts(tmp_path: Path) -> None:
    short, long = (_run(tmp_path, "x", 0, values) for values in ((0.9,), (0.1, 0.4)))
    other = _run(tmp_path, "x", 1, (0.2, 0.3))
    assert each_seed_once([short, long, other]) == [long, other]


def test_a_goal_is_in_words() -> None:
    assert goal_text(COLUMN, 0.79764) == "79.76 % personal accuracy"
