"""Delays against their textbook laws, and traces that cannot be used."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.simulation.delays import (
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

CONTINUOUS = [
    Exponential(0.5),
    Weibull(0.5, 3.0),
    Weibull(2.0, 3.0),
    LogNormal(0.5, 1.5),
    Uniform(0.0, 2.0),
    Uniform(3.0, 4.0),
]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    path = tmp_path / "delays.txt"
    path.write_text("4\n0.5\n 1 \n1e0\n")
    return Trace(path)


@pytest.mark.parametrize(
    ("delay", "t", "survival"),
    [
        (Exponential(2.0), 0.0, 1.0),
        (Exponential(2.0), 4.0, math.exp(-2)),
        (Exponential(2.0), 200.0, math.exp(-100)),
        (Weibull(2.0, 3.0), 6.0, math.exp(-4)),
        (Weibull(0.5, 3.0), 12.0, math.exp(-2)),
        (LogNormal(1.0, 2.0), 0.0, 1.0),
        (LogNormal(1.0, 2.0), math.e, 0.5),
        (LogNormal(1.0, 2.0), math.exp(3), 0.15865525393145705),  # one deviation
        (LogNormal(1.0, 2.0), math.exp(21), 7.619853024160526e-24),  # ten
        (Uniform(1.0, 5.0), 0.5, 1.0),
        (Uniform(1.0, 5.0), 2.0, 0.75),
        (Uniform(1.0, 5.0), 9.0, 0.0),
        (Constant(2.0), 1.999, 1.0),
        (Constant(2.0), 2.0, 0.0),
    ],
)
def test_laws(delay: Delay, t: float, survival: float) -> None:
    times = np.array([[t]])
    assert delay.survival(times) == pytest.approx(np.array([[survival]]), rel=1e-12)
    assert delay.cdf(times) == pytest.approx(np.array([[1 - survival]]), abs=1e-15)


@pytest.mark.parametrize(
    ("delay", "mean"),
    [
        (Exponential(2.0), 2.0),
        (Weibull(0.5, 3.0), 6.0),
        (Weibull(2.0, 3.0), 1.5 * math.sqrt(math.pi)),
        (Weibull(0.05), float(math.factorial(20))),
        (LogNormal(1.0, 2.0), math.exp(3.0)),
        (LogNormal(0.0, 8.0), math.exp(32.0)),
        (Uniform(1.0, 5.0), 3.0),
        (Constant(2.0), 2.0),
        (Exponential(1e200), 1e200),
    ],
)
def test_the_mean_is_the_integral_of_the_survival_function(delay: Delay, mean: float) -> None:
    assert delay.mean_delay == pytest.approx(mean, rel=1e-12)
    found = delay.integral(lambda survival: survival)
    assert found.value == pytest.approx(mean, rel=1e-12)
    assert found.error <= 1e-12 * mean


def test_an_integral_that_does_not_settle_says_so() -> None:
    found = Weibull(3000.0).integral(lambda survival: survival)
    assert 1e-10 < abs(found.value - Weibull(3000.0).mean_delay) <= found.error < 1e-2


@pytest.mark.parametrize("delay", CONTINUOUS, ids=str)
def test_draws_follow_the_law(delay: Delay) -> None:
    """Kolmogorov's distance of 4,000 draws; 2.2 / sqrt(n) is exceeded once in 8,000 times."""
    drawn = delay.draw(numpy_generator(0, "delays"), (40, 100))
    assert drawn.shape == (40, 100)
    steps = np.arange(4001) / 4000
    cdf = delay.cdf(np.sort(drawn.ravel()))
    assert max((cdf - steps[:-1]).max(), (steps[1:] - cdf).max()) < 2.2 / math.sqrt(4000)


@settings(deadline=None)
@given(st.sampled_from(CONTINUOUS), st.floats(0.0, 1.0 - 1e-9))
def test_the_quantile_inverts_the_law(delay: Delay, p: float) -> None:
    t = np.array(delay.quantile(p))
    assert delay.survival(t) == pytest.approx(1 - p, rel=1e-6)


def test_quantiles_begin_where_delays_do() -> None:
    assert [delay.quantile(0.0) for delay in CONTINUOUS] == [0, 0, 0, 0, 0, 3]


def test_a_constant_is_constant() -> None:
    drawn = Constant(2.0).draw(numpy_generator(0, "delays"), (2, 3))
    assert np.array_equal(drawn, np.full((2, 3), 2.0))
    assert Constant(2.0).quantile(0.0) == Constant(2.0).quantile(0.9) == 2.0
    assert Constant(2.0).integral(lambda survival: survival**3) == (2.0, 0.0)


def test_a_trace_is_its_lines(trace: Trace) -> None:
    assert trace.mean_delay == 6.5 / 4
    assert trace.survival(np.array([0.0, 0.5, 0.9, 1.0, 4.0])).tolist() == [1, 0.75, 0.75, 0.25, 0]
    assert [trace.quantile(p) for p in (0.0, 0.25, 0.26, 0.75, 0.76)] == [0.5, 0.5, 1, 1, 4]
    # The larger of two delays: 0.5 with 1/16, 1 with 8/16, 4 with 7/16.
    found = trace.integral(lambda survival: 1 - (1 - survival) ** 2)
    assert found == (pytest.approx(0.5 / 16 + 8 / 16 + 4 * 7 / 16), 0.0)
    drawn = trace.draw(numpy_generator(0, "delays"), 4000)
    shares = [(drawn == value).mean() for value in (0.5, 1.0, 4.0)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.04)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "is empty"),
        ("1\n\n2\n", "line 2: empty"),
        ("1\n \n2\n", "line 2: empty"),
        ("1\n2\n-0.5\n", "line 3: '-0.5'"),
        ("nan\n", "line 1: 'nan'"),
        ("1\ninf\nx\n", "line 2: 'inf'"),
        ("1\n2 3\n", "line 2: '2 3'"),
        ("0\n0\n", "are 0"),
    ],
)
def test_a_bad_trace_is_refused(tmp_path: Path, text: str, fragment: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        Trace(path)
    assert caught.value.key == "delay.init_args.path"
    assert str(path) in caught.value.found
    assert fragment in caught.value.found


def test_a_trace_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"\xff\xfe")
    for named in (path, tmp_path, tmp_path / "absent.txt"):
        with pytest.raises(UserError, match=r"delay\.init_args\.path: .*; name a text file"):
            Trace(named)


@pytest.mark.parametrize(
    ("kind", "arguments", "key", "fix"),
    [
        (Exponential, {"mean": 0.0}, "mean", "above 0"),
        (Exponential, {"mean": math.nan}, "mean", "above 0"),
        (Weibull, {"shape": -1.0}, "shape", "above 0"),
        (Weibull, {"shape": 1.0, "scale": 0.0}, "scale", "above 0"),
        (LogNormal, {"mu": 0.0, "sigma": 0.0}, "sigma", "above 0"),
        (LogNormal, {"mu": 0.0, "sigma": math.inf}, "sigma", "above 0"),
        (Uniform, {"low": -0.1, "high": 1.0}, "low", "at least 0"),
        (Uniform, {"low": 1.0, "high": 1.0}, "high", "above low, 1"),
        (Uniform, {"low": 1.0, "high": math.inf}, "high", "above low, 1"),
        (Constant, {"value": 0.0}, "value", "above 0"),
        (Constant, {"value": math.inf}, "value", "above 0"),
    ],
)
def test_parameters_have_bounds(
    kind: type[Delay], arguments: dict[str, float], key: str, fix: str
) -> None:
    with pytest.raises(UserError) as caught:
        kind(**arguments)
    assert caught.value.key == f"delay.init_args.{key}"
    assert fix in caught.value.fix
    assert f"{arguments[key]:g}" in caught.value.found


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (Weibull, {"shape": 0.001}),
        (Weibull, {"shape": 1e-308}),
        (LogNormal, {"mu": 0.0, "sigma": 1e200}),
        (LogNormal, {"mu": -800.0, "sigma": 1.0}),
        (LogNormal, {"mu": math.nan, "sigma": 1.0}),
    ],
)
def test_a_mean_that_is_no_number_is_refused(
    kind: type[Delay], arguments: dict[str, float]
) -> None:
    with pytest.raises(UserError, match=r"delay: .* has a mean of exp\("):
        kind(**arguments)


def test_they_are_told_by_their_arguments(trace: Trace) -> None:
    assert str(Weibull(0.5)) == "Weibull(shape=0.5, scale=1)"
    assert str(trace) == f"Trace(path={trace.path})"
