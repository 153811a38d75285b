"""Delays against their textbook laws, and traces that cannot be used."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from lightfed.devices.delays import (
    Constant,
    Delay,
    Exponential,
    LogNormal,
    Trace,
    Uniform,
    Weibull,
)
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator

LAWS: list[tuple[Delay, Any]] = [
    (Exponential(0.5), stats.expon(scale=0.5)),
    (Weibull(0.5, 3.0), stats.weibull_min(0.5, scale=3.0)),
    (Weibull(2.0, 3.0), stats.weibull_min(2.0, scale=3.0)),
    (LogNormal(0.5, 1.5), stats.lognorm(1.5, scale=math.exp(0.5))),
    (Uniform(0.0, 2.0), stats.uniform(0.0, 2.0)),
    (Uniform(3.0, 4.0), stats.uniform(3.0, 1.0)),
]
FIRST_DRAWS = [
    0.23334608497630047,
    0.653404744485202,
    2.0494461519087075,
    0.5310833362653111,
    0.5802758016599747,
    3.290137900829987,
]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    path = tmp_path / "delays.txt"
    path.write_text("4\n0.5\n 1 \n1e0\n")
    return Trace(path)


@pytest.mark.parametrize(
    ("delay", "mean"),
    [
        (Exponential(1e90), 1e90),
        (Weibull(2.0, 3.0), 1.5 * math.sqrt(math.pi)),
        (Weibull(1 / 99), float(math.factorial(99))),
        (Weibull(3000.0), math.gamma(1 + 1 / 3000)),
        (LogNormal(1.0, 2.0), math.exp(3.0)),
        (LogNormal(0.0, 9.9), math.exp(9.9 * 9.9 / 2)),
        (Uniform(1.0, 5.0), 3.0),
        (Constant(2.0), 2.0),
    ],
)
def test_the_mean_is_the_first_of_one(delay: Delay, mean: float) -> None:
    assert delay.expected(1, 1) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize(("wait", "servers", "devices"), [(3, 5, 1), (7, 7, 2)])
@pytest.mark.parametrize(("delay", "law"), LAWS, ids=[str(delay) for delay, _ in LAWS])
def test_expected_order_statistics(
    delay: Delay, law: Any, wait: int, servers: int, devices: int
) -> None:
    """The integral of P(tau_(B) > t), where P(tau_(B) <= t) is a tail of the binomial law."""

    def exceeds(t: float) -> float:
        return float(stats.binom.cdf(wait - 1, servers, law.cdf(t) ** devices))

    places = [law.support()[0], *law.isf([0.9, 0.5, 0.1, 1e-3, 1e-6, 1e-9, 1e-14])]
    value = places[0] + sum(integrate.quad(exceeds, a, b)[0] for a, b in pairwise(places))
    assert delay.expected(wait, servers, devices) == pytest.approx(value, rel=1e-7)


@pytest.mark.parametrize(("delay", "law"), LAWS, ids=[str(delay) for delay, _ in LAWS])
def test_draws_and_quantiles_follow_the_law(delay: Delay, law: Any) -> None:
    drawn = delay.draw(numpy_generator(0, "delays"), (40, 100))
    assert drawn.shape == (40, 100)
    assert stats.kstest(drawn.ravel(), law.cdf).pvalue > 1e-4
    for p in (1e-9, 0.3, 0.5, 0.999):
        assert delay.quantile(p) == pytest.approx(law.ppf(p), rel=1e-9)


def test_draws_are_repeated_to_the_bit() -> None:
    """By every version, as runs are: recorded from the first."""
    drawn = [delay.draw(numpy_generator(0, "delays"), 1)[0] for delay, _ in LAWS]
    assert drawn == FIRST_DRAWS


def test_a_constant_is_constant() -> None:
    drawn = Constant(2.0).draw(numpy_generator(0, "delays"), (2, 3))
    assert np.array_equal(drawn, np.full((2, 3), 2.0))
    assert Constant(2.0).quantile(0.1) == Constant(2.0).quantile(0.9) == 2.0
    assert Constant(2.0).expected(2, 5, 3) == 2.0


def test_a_trace_is_its_numbers(trace: Trace) -> None:
    assert [trace.quantile(p) for p in (0.25, 0.26, 0.75, 0.76)] == [0.5, 1, 1, 4]
    assert str(trace) == f"Trace(path={trace.path})"
    assert trace.expected(1, 1) == 6.5 / 4
    # The larger of two delays: 0.5 with 1/16, 1 with 8/16, 4 with 7/16.
    larger = pytest.approx(0.5 / 16 + 8 / 16 + 4 * 7 / 16)
    assert trace.expected(1, 1, 2) == trace.expected(2, 2, 1) == larger
    drawn = trace.draw(numpy_generator(0, "delays"), 4000)
    shares = [(drawn == value).mean() for value in (0.5, 1.0, 4.0)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.04)


def test_a_trace_may_be_a_table(tmp_path: Path) -> None:
    path = tmp_path / "delays.csv"
    path.write_text("# seconds\n4,0.5\n1,2\n")
    assert Trace(path).values.tolist() == [0.5, 1, 2, 4]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1\n2\n-0.5\n",
        b"nan\n",
        b"1\nx\n",
        b"1\n2 3\n",
        b"0\n0\n",
        b"\xff",
    ],
)
def test_a_bad_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        Trace(path)
    assert caught.value.key == "Trace.path"
    assert str(path) in caught.value.found
    assert "\n" not in str(caught.value)


def test_a_trace_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for named in (tmp_path, tmp_path / "absent.txt"):
        with pytest.raises(UserError, match=r"Trace\.path: .*; name a text file"):
            Trace(named)


@pytest.mark.parametrize(
    ("kind", "arguments", "key", "fix"),
    [
        (Exponential, {"mean": math.nan}, "mean", "above 0"),
        (Weibull, {"shape": 1.0, "scale": 0.0}, "scale", "above 0"),
        (LogNormal, {"mu": 0.0, "sigma": 0.0}, "sigma", "above 0"),
        (Weibull, {"shape": 1e-308}, "shape", "above 0.01"),
        (LogNormal, {"mu": -800.0, "sigma": 1.0}, "mu", "above -200"),
        (LogNormal, {"mu": math.nan, "sigma": 1.0}, "mu", "above -200"),
        (LogNormal, {"mu": 0.0, "sigma": 1e200}, "sigma", "below 10"),
        (Uniform, {"low": -0.1, "high": 1.0}, "low", "above 0"),
        (Uniform, {"low": 1.0, "high": 1.0}, "high", "above 1"),
        (Constant, {"value": 0.0}, "value", "above 0"),
        (Constant, {"value": math.inf}, "value", "above 0"),
    ],
)
def test_parameters_have_bounds(
    kind: type[Delay], arguments: dict[str, float], key: str, fix: str
) -> None:
    with pytest.raises(UserError) as caught:
        kind(**arguments)
    assert caught.value.key == f"{kind.__name__}.{key}"
    assert fix in caught.value.fix
    assert f"{arguments[key]:g}" in caught.value.found
