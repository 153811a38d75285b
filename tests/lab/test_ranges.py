"""Ranges of `--tune`: what is drawn from them, what lies beyond them, and what is refused."""

import itertools
import math

import pytest

from lightfed.lab.ranges import Range, Side, drawn, range_of
from lightfed.utils.errors import UserError


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("log(0.01, 1)", Range("log", 0.01, 1)),
        ("log(1e-5,1e-1)", Range("log", 1e-5, 0.1)),
        (" uniform( -1 , 2.5 ) ", Range("uniform", -1, 2.5)),
        ("int(1,8)", Range("int", 1, 8)),
        (".01,.03,.1", None),
        ("torch.nn.ReLU,torch.nn.GELU", None),
        ("a(1),b(2)", None),
    ],
)
def test_a_range_is_read(written: str, found: Range | None) -> None:
    assert range_of(written, f"key={written}") == found


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("log(0, 1)", "give positive numbers"),
        ("log(1, 0.1)", "the smaller one first"),
        ("log(1, 1)", "the smaller one first"),
        ("log(1, inf)", "finite"),
        ("log(1)", "give two numbers: log"),
        ("log(1, 2, 3)", "give two numbers: log"),
        ("uniform(a, b)", "give two numbers: uniform"),
        ("int(1, 2.5)", "give whole numbers"),
        ("lgo(0.1, 1)", "give log(a, b), uniform(a, b) or int(a, b)"),
        ("log(0.1, 1),3", "give one range"),
    ],
)
def test_what_looks_like_a_range_and_is_none_is_refused(written: str, fix: str) -> None:
    with pytest.raises(UserError) as refused:
        range_of(written, f"lr={written}")
    assert refused.value.key == "--tune"
    assert refused.value.found == f"lr={written}"
    assert fix in refused.value.fix


def test_draws_of_a_logarithm_fill_its_decades_evenly() -> None:
    points = drawn({"lr": Range("log", 0.001, 1)}, 12, 0)
    exponents = sorted(math.log10(float(point["lr"])) for point in points)
    assert len(points) == 12
    for decade in (-3, -2, -1):
        assert sum(decade <= exponent < decade + 1 for exponent in exponents) == 4
    # Random draws would leave gaps that are longer than a quarter of the range in one of three.
    gaps = [b - a for a, b in itertools.pairwise(exponents)]
    assert max(gaps) < 3 / 6
    # A value is short, because runs are known by it.
    assert all(len(point["lr"].lstrip("0.")) <= 3 for point in points)


def test_more_trials_begin_with_those_of_fewer_and_another_seed_has_others() -> None:
    axes = {"lr": Range("log", 0.01, 1), "mu": Range("uniform", 0, 1)}
    twelve = drawn(axes, 12, 0)
    assert drawn(axes, 30, 0)[:12] == twelve
    assert drawn(axes, 12, 0) == twelve
    assert not [point for point in drawn(axes, 12, 1) if point in twelve]
    assert not [point for point in drawn(axes, 12, 0, "another purpose") if point in twelve]

    # The order in which keys are given changes no value.
    turned = drawn({"mu": axes["mu"], "lr": axes["lr"]}, 12, 0)
    assert turned == [{"mu": point["mu"], "lr": point["lr"]} for point in twelve]


def test_whole_numbers_and_lists_are_drawn_evenly_and_each_point_once() -> None:
    axes: dict[str, Range | list[str]] = {"epochs": Range("int", 1, 4), "name": ["a", "b"]}
    points = drawn(axes, 64, 3)
    assert {point["epochs"] for point in points} == {"1", "2", "3", "4"}
    assert {point["name"] for point in points} == {"a", "b"}
    assert len(points) == 8


@pytest.mark.parametrize(
    ("axis", "below", "above"),
    [
        (Range("log", 0.01, 1), Range("log", 0.0001, 0.01), Range("log", 1, 100)),
        (Range("uniform", 0.25, 1), Range("uniform", 0, 0.25), Range("uniform", 1, 1.75)),
        (Range("uniform", 0, 1), None, Range("uniform", 1, 2)),
        (Range("uniform", -1, 1), Range("uniform", -3, -1), Range("uniform", 1, 3)),
        (Range("int", 3, 10), Range("int", 1, 2), Range("int", 11, 18)),
        (Range("int", 1, 4), None, Range("int", 5, 8)),
        (Range("int", 0, 3), None, Range("int", 4, 7)),
        (Range("int", -3, 3), Range("int", -10, -4), Range("int", 4, 10)),
    ],
)
def test_what_lies_beyond_a_range_is_as_long(
    axis: Range, below: Range | None, above: Range | None
) -> None:
    expected: dict[Side, Range | None] = {"below": below, "above": above}
    for side, range_beyond in expected.items():
        found = axis.beyond(side)
        if range_beyond is None:
            assert found is None
        else:
            assert found is not None
            assert found.kind == range_beyond.kind
            assert found[1:] == pytest.approx(range_beyond[1:])


@pytest.mark.parametrize(
    "axis",
    [
        Range("log", 0.011, 0.97),
        Range("log", 1, 1.001),
        Range("uniform", 1000, 1001),
        Range("uniform", 0.123456, 0.2),
        Range("int", -2, 2),
    ],
)
def test_no_value_is_outside_of_its_range_and_hundred_values_differ(axis: Range) -> None:
    values = [axis.at(place / 100) for place in range(100)]
    assert all(axis.low <= float(value) <= axis.high for value in values)
    assert len(set(values)) == (5 if axis.kind == "int" else 100)
    assert axis.low <= float(axis.at(math.nextafter(1, 0))) <= axis.high
