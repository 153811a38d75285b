"""Paired differences over seeds, their intervals, and how finely a time to a target is known."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightfed.results.groups import (
    Group,
    Paired,
    each_seed_once,
    paired,
    resolution_text,
)
from lightfed.results.run import Run, read
from lightfed.results.text import goal_text, seeds_text
from tests.report.make_run import ENVIRONMENT, write_run

COLUMN = "personal/accuracy"
T2 = 4.302652729911275  # the .975 quantile of Student's t with two degrees of freedom


def _run(root: Path, name: str, seed: int, values: Any, *, column: str = COLUMN) -> Run:
    stated = {**ENVIRONMENT, "name": name, "seed": seed, "rounds": 2}
    folder = root / f"{name}-{seed}-{len(list(root.glob('*')))}"
    write_run(folder, metrics={column: values}, environment=stated, evaluations=None, counts=None)
    return read(folder)


def _group(root: Path, name: str, finals: Mapping[int, float], column: str = COLUMN) -> Group:
    runs = [_run(root, name, s, (0.0, final), column=column) for s, final in finals.items()]
    return Group(name, tuple(runs))


def _paired(root: Path, own: Mapping[int, float], rival: Mapping[int, float]) -> Paired:
    groups = _group(root, "own", own), _group(root, "rival", rival)
    return paired(*groups, "accuracy", (COLUMN, COLUMN))


def test_the_interval_is_that_of_the_paired_t_test(tmp_path: Path) -> None:
    found = _paired(tmp_path, {0: 0.5, 1: 0.9, 2: 0.1}, {2: 0.07, 0: 0.49, 1: 0.88})
    differences = np.array([0.01, 0.02, 0.03])
    half = T2 * differences.std(ddof=1) / math.sqrt(3)
    np.testing.assert_allclose(
        (found.difference, found.low, found.high), (0.02, 0.02 - half, 0.02 + half), rtol=1e-9
    )
    assert found.seeds == (0, 1, 2)
    assert found.verdict == "no difference shown"
    assert found.sentence("own", "rival") == (
        "+2.00 points over rival, 95 % paired t interval -0.48 to 4.48, 3 seeds (0-2): "
        "no difference shown"
    )


@pytest.mark.parametrize(("sign", "verdict"), [(1, "better"), (-1, "worse")])
def test_an_interval_beside_zero_is_a_difference(tmp_path: Path, sign: int, verdict: str) -> None:
    gains = {seed: 0.5 + sign * step for seed, step in enumerate((0.02, 0.03, 0.025, 0.02))}
    assert _paired(tmp_path, gains, dict.fromkeys(range(4), 0.5)).verdict == verdict
    two = _paired(tmp_path, {seed: gains[seed] for seed in (0, 1)}, dict.fromkeys(range(2), 0.5))
    assert two.verdict == "no difference shown"  # one degree of freedom


def test_of_a_loss_less_is_better(tmp_path: Path) -> None:
    column = "personal/loss"
    own = _group(tmp_path, "own", {0: 1.0, 1: 1.1, 2: 1.05}, column)
    rival = _group(tmp_path, "rival", {0: 2.0, 1: 2.1, 2: 2.0}, column)
    found = paired(own, rival, "loss", (column, column))
    assert found.difference == pytest.approx(2.95 / 3)
    assert found.verdict == "better"
    assert found.gain == "+0.983"


def test_one_seed_shows_no_interval(tmp_path: Path) -> None:
    found = _paired(tmp_path, {0: 0.6}, {0: 0.5})
    assert math.isnan(found.low)
    assert found.interval == ""
    stated = "+10.00 points over FML, the next, 1 seed (0): one seed shows no interval"
    assert found.sentence("own", "FML", role="the next") == stated


def test_seeds_that_one_lacks_are_named_and_count_for_neither(tmp_path: Path) -> None:
    found = _paired(tmp_path, {0: 0.6, 1: 0.7, 2: 0.0, 3: 0.0}, {0: 0.5, 1: 0.6, 7: 1.0})
    assert found.difference == pytest.approx(0.1)
    assert found.seeds == (0, 1)
    assert found.lacking("A", "B") == "A lacks seed 7, B lacks seeds 2-3"
    assert "2 seeds (0-1), A lacks seed 7, B lacks seeds 2-3: " in found.sentence("A", "B")


def test_without_a_common_seed_there_is_nothing_to_tell(tmp_path: Path) -> None:
    found = _paired(tmp_path, {0: 0.6}, {1: 0.5})
    assert math.isnan(found.difference)
    assert found.sentence("A", "B") == "over B: no seed in common"


def test_stretches_of_seeds_are_short() -> None:
    assert seeds_text(()) == ""
    assert seeds_text((4, 5, 6, 8, 10, 11)) == "4-6 8 10-11"


def test_equal_runs_differ_by_nothing_and_warn_of_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = _paired(tmp_path, {0: 0.5, 1: 0.7}, {0: 0.5, 1: 0.7})
        alike = _paired(tmp_path, {0: 0.5, 1: 0.7, 2: 0.9}, {0: 0.4, 1: 0.6, 2: 0.8})
    assert (found.low, found.high, found.verdict) == (0.0, 0.0, "no difference shown")
    np.testing.assert_allclose((alike.low, alike.high), (0.1, 0.1))


def test_a_run_that_is_not_over_has_no_final_figure(tmp_path: Path) -> None:
    own = _group(tmp_path, "own", {0: 0.5, 1: 0.6})
    over = _run(tmp_path, "rival", 0, (0.1, 0.4))
    short = _run(tmp_path, "rival", 1, (0.9,))
    found = paired(own, Group("rival", (over, short)), "accuracy", (COLUMN, COLUMN))
    assert found.seeds == (0,)
    assert found.lacking("own", "rival") == "rival lacks seed 1"
    short.environment["finished"] = {"rounds": 1, "limits": {}}  # as early stopping leaves it
    found = paired(own, Group("rival", (over, short)), "accuracy", (COLUMN, COLUMN))
    assert found.seeds == (0, 1)


def test_of_two_runs_of_a_seed_the_longest_counts(tmp_path: Path) -> None:
    short, long = (_run(tmp_path, "x", 0, values) for values in ((0.9,), (0.1, 0.4)))
    other = _run(tmp_path, "x", 1, (0.2, 0.3))
    assert each_seed_once([short, long, other]) == [long, other]


@pytest.mark.parametrize(
    ("values", "rounds"),
    [
        (("", "", "", 0.1, "", "", "", 0.2), "4 rounds"),
        (
            ("", "", "", 0.1, "", 0.2),
            "4 rounds",
        ),  # the last one always is measured
        ((0.1, "", "", 0.2), "3 rounds"),
        ((0.1, 0.2), "1 round"),
        (("", ""), ""),
    ],
)
def test_the_resolution_is_the_most_rounds_between_evaluations(
    tmp_path: Path, values: tuple[Any, ...], rounds: str
) -> None:
    run = _run(tmp_path, "x", 0, values)
    assert resolution_text([run], COLUMN) == rounds


def test_runs_may_differ_in_their_resolution(tmp_path: Path) -> None:
    runs = [_run(tmp_path, "x", 0, values) for values in ((0.1,), ("", "", 0.1), ("", ""))]
    assert resolution_text(runs[:1], COLUMN) == "1 round"
    assert resolution_text(runs, COLUMN) == "1 to 3 rounds"
    assert resolution_text(runs[2:], COLUMN) == ""
    assert goal_text(COLUMN, 0.79764) == "79.76 % personal accuracy"
