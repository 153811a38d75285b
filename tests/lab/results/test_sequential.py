"""Comparisons that end as soon as they are decided: their boundaries, errors, power and costs."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.special import ndtri, stdtr

from lightfed.lab.results.sequential import (
    SPENDING,
    Design,
    boundaries,
    null_step,
    obrien_fleming,
    pocock,
    size_of,
)

DESIGN = Design((5, 8, 12, 16, 20))

# Standard deviations of paired differences, in points of accuracy: quantiles of the 91 that the
# pages of docs/studies state, from 5 seeds each.
SPREADS = (0.29, 0.91, 2.05, 4.08, 6.03, 8.73, 21.1)


def p_values(values: np.ndarray, looks: Sequence[int]) -> np.ndarray:
    """The p values of the looks in the last axis, of differences in the last axis."""
    found = []
    for n in looks:
        seen = values[..., :n]
        t = seen.mean(-1) / (seen.std(-1, ddof=1) / math.sqrt(n))
        found.append(2 * stdtr(n - 1, -np.abs(t)))
    return np.stack(found, axis=-1)


# Boundaries.


def test_the_boundaries_are_the_published_ones_where_t_is_normal() -> None:
    """K = 5 equal looks, 5 %: Lan and DeMets (1983), as ldbounds and gsDesign print them."""
    looks = (20, 40, 60, 80, 100)
    shares = np.arange(1, 6) / 5
    found = boundaries(looks, obrien_fleming(0.05, shares).tolist())
    z = -ndtri(np.array(found) / 2)
    np.testing.assert_allclose(z, [4.877, 3.357, 2.680, 2.290, 2.031], atol=0.01)


def test_five_looks_at_pococks_level_spend_5_percent_where_t_is_normal() -> None:
    """The constant 2.413 of Pocock (1977), and 14.2 % for five looks at 5 % (Armitage 1969)."""
    looks = (20, 40, 60, 80, 100)
    p = 2 * (1 - 0.5 * (1 + math.erf(2.413 / math.sqrt(2))))
    assert size_of(looks, [p] * 5) == pytest.approx(0.05, abs=0.0015)
    assert size_of(looks, [0.05] * 5) == pytest.approx(0.142, abs=0.0025)


def test_what_may_be_spent_begins_small_and_ends_with_the_level() -> None:
    shares = np.array([0.25, 0.5, 1.0])
    for spending in SPENDING.values():
        spent = spending(0.05, shares)
        assert spent[-1] == pytest.approx(0.05)
        assert (np.diff(spent) > 0).all()
    assert pocock(0.05, shares)[0] > 100 * obrien_fleming(0.05, shares)[0]


@pytest.mark.parametrize("looks", [(2,), (2, 3, 4), (5, 8, 12, 16, 20)])
def test_a_design_spends_its_level_and_no_more(looks: tuple[int, ...]) -> None:
    for spending in SPENDING:
        found = Design(looks, spending).boundaries()
        assert size_of(looks, found) == pytest.approx(0.05, abs=2e-5)


@pytest.mark.parametrize("level", [1e-6, 0.05 / 21, 0.5])
def test_a_design_spends_other_levels_as_well(level: float) -> None:
    """Those of a corrected claim, however small and however few the seeds are."""
    for design in (DESIGN, Design.up_to(12), Design((2, 3, 4))):
        found = design.boundaries(level)
        assert max(found) <= level * (1 + 1e-6)
        assert size_of(design.looks, found) == pytest.approx(level, rel=0.02)


@pytest.mark.parametrize("looks", [(2, 3, 4), (3, 5, 9)])
def test_the_integral_is_what_draws_say(looks: tuple[int, ...]) -> None:
    """Looks at 5 % each, with few degrees of freedom."""
    values = np.random.default_rng(3).standard_normal((200_000, looks[-1]))
    drawn = (p_values(values, looks) <= 0.05).any(-1).mean()
    assert size_of(looks, [0.05] * 3) == pytest.approx(drawn, abs=0.0025)


def test_boundaries_of_normal_statistics_would_spend_too_much() -> None:
    """Why they are not used, even as p values of t: 5.8 % for looks at 2, 4, 6, 8 and 10 seeds."""
    of_normal = (0.01477, 0.015231, 0.015943, 0.016545, 0.017032)
    assert size_of((2, 4, 6, 8, 10), of_normal) == pytest.approx(0.0582, abs=0.0005)


def test_a_step_is_a_probability() -> None:
    for n in (2, 3, 19):
        step = null_step(n, 100)
        assert (step >= -1e-12).all()
        np.testing.assert_allclose(step.sum(axis=1), 1.0, atol=1e-9)


# Errors.


def nulls(comparisons: int, methods: int, seed: int) -> np.ndarray:
    """Accuracies of methods that are alike, (comparisons, methods, seeds), in points.

    Their spread is one of real runs, and they are shares of 360 test samples.
    """
    rng = np.random.default_rng(seed)
    spread = rng.choice(SPREADS, (comparisons, 1, 1)) / math.sqrt(2)
    values = 80 + spread * rng.standard_normal((comparisons, methods, DESIGN.most))
    return np.round(values * 3.6) / 3.6


def test_a_difference_is_shown_in_one_of_twenty_nulls() -> None:
    accuracies = nulls(10_000, 2, seed=1)
    # Differences of 0 in all seeds have no t, and show nothing.
    differences = accuracies[:, 1] - accuracies[:, 0]
    differences[:, 0] += 1e-9
    for design in (DESIGN, Design.up_to(10), Design((5, 8, 12, 16, 20), "O'Brien-Fleming")):
        shown, _ = design.ends(differences[:, : design.most])
        assert shown.mean() <= 0.055
        # Who goes on where it is futile does not lose the level either.
        unbound = (p_values(differences, design.looks) <= np.array(design.boundaries())).any(-1)
        assert shown.mean() <= unbound.mean() <= 0.055


@pytest.mark.parametrize("true_claims", [0, 10])
def test_21_claims_that_share_a_rival_have_one_wrong_in_one_study_of_twenty(
    true_claims: int,
) -> None:
    """Holm's procedure on the p values of whole comparisons; some of the claims may be true."""
    accuracies = nulls(10_000, 22, seed=2)
    differences = accuracies[:, 1:] - accuracies[:, :1]
    differences[:, :, 0] += 1e-9
    differences[:, :true_claims] += 100.0
    p = p_values(differences, DESIGN.looks)  # (studies, claims, looks)

    # A claim is shown at a level if one of the looks passes its boundary at that level.
    shown = np.zeros(p.shape[:2], dtype=bool)
    for claims_left in range(21, 0, -1):
        limits = np.array(DESIGN.boundaries(0.05 / claims_left))
        passes = (p <= limits).any(-1)
        may_go_on = shown.sum(axis=1) >= 21 - claims_left
        shown |= passes & may_go_on[:, None]
    assert shown[:, :true_claims].all()
    assert shown[:, true_claims:].any(axis=1).mean() <= 0.055


# Power and costs.


def test_a_gain_of_one_standard_deviation_is_found_in_four_of_five() -> None:
    power, _ = DESIGN.simulated(1.0)
    assert power >= 0.8
    # And the effect that is announced is found so often.
    for design in (DESIGN, Design.up_to(12)):
        announced = design.detectable()
        values = np.random.default_rng(9).standard_normal((20_000, design.most)) + announced
        assert design.ends(values)[0].mean() == pytest.approx(0.8, abs=0.02)


def test_clear_and_null_cases_need_six_tenths_of_the_runs() -> None:
    """Of the same number of seeds at most, and of the fixed design with the same power."""
    _, clear = DESIGN.simulated(2.0)
    _, middling = DESIGN.simulated(1.0)
    _, null = DESIGN.simulated(0.0)
    assert (clear + null) / 2 <= 0.6 * 20
    assert (middling + null) / 2 <= 0.6 * 20

    # Both find one standard deviation in 80 % or more.
    small = Design.up_to(16)
    fixed = Design((11,))
    assert small.simulated(1.0)[0] >= 0.8
    assert fixed.simulated(1.0)[0] == pytest.approx(0.85, abs=0.03)
    assert (small.simulated(2.0)[1] + small.simulated(0.0)[1]) / 2 <= 0.6 * 11


# A single comparison.


def test_many_comparisons_end_as_each_does_by_itself() -> None:
    values = np.random.default_rng(4).standard_normal((300, 20))
    values += np.linspace(0, 2, 300)[:, None]
    shown, seeds = DESIGN.ends(values)
    for row, own, n in zip(values, shown, seeds, strict=True):
        look = DESIGN.look(row.tolist(), range(20))
        assert look is not None
        assert (look.shown, len(look.difference.seeds)) == (own, n)
        # What was not run changes nothing.
        assert look == DESIGN.look(row[:n].tolist(), range(n))
        # The interval of all looks says the same.
        assert look.shown == (abs(look.difference.mean) > look.half)


def test_a_comparison_goes_on_until_it_ends() -> None:
    values = [0.1, -0.05, 0.12, 0.02, 0.06]
    assert DESIGN.look(values[:4], range(4)) is None
    first = DESIGN.look(values, range(5))
    assert first is not None
    assert not first.ends
    assert first.number == 1
    last = Design((2, 3), futility=0.0).look(values, range(5))
    assert last is not None
    assert (last.number, last.ends) == (2, True)
    # The same difference in every seed is shown at once.
    at_once = DESIGN.look([0.1] * 5, range(5))
    assert at_once is not None
    assert at_once.shown


def test_the_p_value_of_a_whole_comparison_is_its_level() -> None:
    limits = DESIGN.boundaries()
    assert DESIGN.overall_p([limits[0]]) == pytest.approx(0.05, rel=1e-4)
    assert DESIGN.overall_p([0.9, limits[1]]) == pytest.approx(0.05, rel=1e-3)
    assert DESIGN.overall_p([0.9, limits[1] / 2]) < 0.05
    # Also where the smallest levels of few seeds are compared.
    small = Design.up_to(12)
    p = small.overall_p([0.094, 0.033, 0.0079])
    assert small.boundaries(p)[2] == pytest.approx(0.0079, rel=1e-3)
    # It never grows with another look.
    assert DESIGN.overall_p([0.9, 0.02, 0.9]) == DESIGN.overall_p([0.9, 0.02])
