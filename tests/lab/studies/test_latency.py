"""The latency analysis: closed forms, the reference values, simulations, and the command."""

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.cli.command_line import run_program
from lightfed.devices.delays import Constant, Delay, Exponential, LogNormal, Uniform, Weibull
from lightfed.lab.studies.latency import Cloud, main
from lightfed.utils.rng import numpy_generator
from tests.forked import run_script
from tests.small import GOLDEN

REFERENCE = json.loads((GOLDEN / "fedbcd" / "latency_ratio.json").read_text())
DELAYS: dict[str, Delay] = {
    "exp(1)": Exponential(1.0),
    "uniform(0,1)": Uniform(0.0, 1.0),
    "weibull(0.5)": Weibull(0.5),
    "weibull(1.5)": Weibull(1.5),
    "weibull(2)": Weibull(2.0),
    "lognormal(0,1)": LogNormal(0.0, 1.0),
}
TABLE = ["--delay", "Exponential", "--delay.mean", "2"]


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_values(name: str) -> None:
    """They are accurate to 2e-10, by another quadrature."""
    every: dict[int, float] = {}  # how long the last of so many servers takes
    for case, theirs in REFERENCE[name].items():
        servers, wait = (int(word[1:]) for word in case.split("_"))
        cloud = Cloud(DELAYS[name], servers, 1)
        if servers not in every:
            every[servers] = cloud.expected(servers)
        found = cloud.expected(wait)
        assert found == pytest.approx(theirs["E_B"], rel=1e-9)
        ratio = found / every[servers]
        assert ratio == pytest.approx(theirs["r"], rel=1e-9)
        bound = theirs["eq8_upper"]
        expected = math.nan if bound is None else bound
        assert cloud.asymptotic(wait) == pytest.approx(expected, rel=1e-12, nan_ok=True)


@settings(max_examples=10)
@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_uniform_clouds_in_closed_form(servers: int, devices: int, data: st.DataObject) -> None:
    """The largest of m uniform delays is a beta variable to the power 1 / m."""
    wait = data.draw(st.integers(1, servers))
    low, width = data.draw(st.floats(0.0, 9.0)), data.draw(st.floats(0.5, 9.0))
    power = 1 / devices
    log = (
        math.lgamma(servers + 1)
        + math.lgamma(wait + power)
        - math.lgamma(wait)
        - math.lgamma(servers + 1 + power)
    )
    found = Cloud(Uniform(low, low + width), servers, devices).expected(wait)
    assert found == pytest.approx(low + width * math.exp(log), rel=1e-11)


@pytest.mark.parametrize(
    ("cloud", "waits"),
    [(Cloud(Exponential(2.0), 10, 1), (3, 10)), (Cloud(Uniform(0.0, 1.0), 4, 3), (4,))],
)
def test_a_run_is_what_the_analysis_says(cloud: Cloud, waits: tuple[int, ...]) -> None:
    """Of memoryless servers, and of servers that all wait for their slowest device."""
    for wait in waits:
        found, error = cloud.in_a_run(wait, numpy_generator(0, "test", wait))
        assert abs(found - cloud.expected(wait)) < 4 * error
        assert 0 < error < 0.05 * found


def test_in_a_run_of_equal_servers_half_the_servers_take_half_the_time() -> None:
    """While the analysis, where all restart, sees no gain."""
    cloud = Cloud(Constant(2.0), 10, 3)
    assert cloud.expected(5) == cloud.expected(10) == 2.0
    assert cloud.in_a_run(5, numpy_generator(0, "test"))[0] == 1.0
    assert cloud.in_a_run(10, numpy_generator(0, "test"))[0] == 2.0


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TABLE, "--servers", "4", "--devices", "2", "--waits", "[4,1]"]
    main(words)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Exponential(mean=2.0), 4 servers of 2 active devices"
    rows = {line.split()[0]: line.split() for line in printed if line.split()[:1] in (["1"], ["4"])}
    assert list(rows) == ["4", "1"]
    full, first = (Cloud(Exponential(2.0), 4, 2).expected(wait) for wait in (4, 1))
    assert rows["4"][1:5] == [f"{full:.2f}", "s", "1.0000", "-"]
    assert rows["1"][1:4] == [f"{first:.2f}", "s", f"{first / full:.4f}"]


MEAN = ["--delay", "Exponential", "--delay.mean"]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([], "delay"),
        (["--delay", "Expo"], "delay"),
        ([*MEAN, "0"], "Exponential.mean"),
        (["--delay", "Constant", "--delay.valu", "1"], "delay.init_args.valu"),
        (["--delay", "Trace", "--delay.path", "/absent"], "Trace.path"),
        ([*MEAN, "1", "--waits", "[3,11]"], "--waits"),
        ([*MEAN, "1", "--waits", "3,5"], "waits"),
        ([*MEAN, "1", "--servers", "x"], "servers"),
        ([*MEAN, "1", "--servers", "0"], "--servers"),
        ([*MEAN, "1", "--devices", "0"], "--devices"),
        ([*MEAN, "1", "--seed", "-1"], "--seed"),
        ([*MEAN, "1", "--waitz", "3"], "waitz"),
    ],
)
def test_bad_input(words: list[str], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run_program(partial(main, words))
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lightfed: error: {key}: ")


def test_the_program_of_the_documents_prints_the_table(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/commands.md").read_text()
    (command,) = re.findall(r"^python -m (lightfed\.lab\.studies\.latency .*?) +#", page, re.M)
    module, *words = command.split()
    # As `python -m` does, in a process that has been forked.
    script = tmp_path / "program.py"
    script.write_text(
        "import runpy, sys\n"
        f"sys.argv[1:] = {words}\n"
        f"runpy.run_module('{module}', run_name='__main__', alter_sys=True)\n"
    )
    done = run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Exponential(mean=1.0), 10 servers of 1 active device")
