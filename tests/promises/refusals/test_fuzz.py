"""Configurations with one or two wrong values: accepted, or answered by a line with status 2.

`pytest -m fuzz -n 0`, or with other cases: `pytest -m fuzz -n 0 --hypothesis-seed=7`. The keys are
those of shipped configurations with all defaults; every value may be dropped, emptied, get another
type or be far too large. A case runs the command in this process, for one round of one batch a
client.
"""

import copy
import io
import math
import re
import resource
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lightfed.cli.command_line import USAGE_ERROR, main
from lightfed.engine.loop import RoundLoop
from lightfed.utils.errors import UserError
from tests.promises.refusals.mistakes import GONE

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(3600)]
CASES = 1000
BASES = (
    "quickstart", "digits/fedavg", "dispfl/digits", "fedbcd/digits-async", "flexifed/digits-vgg",
    "heterofl/mnist", "pfedmoe/digits", "pfedmoe/digits-fedapen", "lgfedavg/digits",
)  # fmt: skip
# What a case must not change: ranks, the length of the run, and what it writes.
WORDS = (
    "--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.fast_dev_run=true",
    "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--data.dataset=Digits",
)  # fmt: skip
VALUES = (
    GONE, None, "", "text", "x" * 2000, True, False, 0, 1, -1, 3, 10**6, 10**12, -(10**12), 2.5,
    -0.5, 1e-300, 1e300, math.nan, math.inf, [], [1], [0, -1], ["text"], [[]], {}, {"key": 1},
    {"class_path": "Nothing"}, {"class_path": "torch.nn.Linear"}, {"class_path": 3},
    {"class_path": "FedAvg", "init_args": {"nothing": 1}}, {"init_args": {}},
)  # fmt: skip
NUMBERS = [value for value in VALUES if type(value) in (int, float)]
SECONDS = 30  # of a case that is accepted and takes its time
MEMORY = 4 * 2**30  # of a case: what needs more is refused as on a small machine
LINE = re.compile(r"lightfed: error: [^:;]+: \S.*; \S.*")


def is_good(line: str) -> bool:
    return len(line) <= 400 and LINE.fullmatch(line) is not None


class Long(BaseException):
    """A case still runs."""


@cache
def base(name: str) -> dict[str, Any]:
    """A shipped configuration with all defaults."""
    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit):
        main(["fit", "--config", f"lightfed:{name}", *WORDS, "--print_config"])
    return dict(yaml.safe_load(printed.getvalue()))


def keys_of(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in inner:
        yield (*above, key)
        if isinstance(below, dict | list):
            yield from keys_of(below, (*above, key))


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[tuple[tuple[Any, ...], Any]]]:
    name = draw(st.sampled_from(BASES))
    keys = list(keys_of(base(name)))
    found = []
    for key in draw(st.lists(st.sampled_from(keys), min_size=1, max_size=2)):
        number = type(value_at(base(name), key)) in (int, float)
        found.append((key, draw(st.sampled_from(NUMBERS if number else VALUES))))
    return name, found


def value_at(config: Any, key: tuple[Any, ...]) -> Any:
    return value_at(config[key[0]], key[1:]) if key else config


def changed(name: str, edits: list[tuple[tuple[Any, ...], Any]]) -> str:
    config = copy.deepcopy(base(name))
    for (*above, last), value in edits:
        part: Any = config
        try:
            for key in above:
                part = part[key]
            if value is GONE:
                del part[last]
            else:
                part[last] = value
        except (KeyError, IndexError, TypeError):
            continue  # the first edit took it away
    return str(yaml.safe_dump(config))


@contextmanager
def limits() -> Iterator[None]:
    """Bound the time and the memory of a case."""

    def late(*_: object) -> None:
        raise Long

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    # Beyond what the process has already: it must be able to say what is wrong.
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def outcome(text: str) -> str:
    """How the command takes a configuration: "accepted", "refused", or what is wrong with that."""
    Path("case.yaml").write_text(text)
    errors, begun = io.StringIO(), []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = RoundLoop.run
        patch.setattr(RoundLoop, "run", lambda self, *args: (begun.append(1), run(self, *args))[1])
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(errors), limits():
                main(["fit", "--config", "case.yaml", *WORDS])
        except Long:
            return "accepted" if begun else "no answer"
        except SystemExit as left:
            if left.code not in (0, None):
                lines = errors.getvalue().splitlines()
                fits = left.code == USAGE_ERROR and len(lines) == 1 and is_good(lines[0])
                return "refused" if fits else f"status {left.code}: {errors.getvalue()[-500:]}"
        except BaseException as error:
            trace = "".join(traceback.format_tb(error.__traceback__)[-4:])
            return f"{trace}{error!r:.300}"
    return "accepted"


def test_every_value_is_accepted_or_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [outcome(changed(name, [])) for name in BASES] == ["accepted"] * len(BASES)
    seen: Counter[str] = Counter()
    wrong: dict[str, str] = {}

    @settings(
        max_examples=CASES, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cases())
    def one(case: tuple[str, list[tuple[tuple[Any, ...], Any]]]) -> None:
        found = outcome(changed(*case))
        kind = found if found in ("accepted", "refused") else "wrong"
        seen[kind] += 1
        if kind == "wrong":
            wrong.setdefault(found, f"{case[0]} {[('.'.join(map(str, k)), v) for k, v in case[1]]}")

    one()
    print(dict(seen), sorted(path.name for path in tmp_path.iterdir()))
    assert not wrong, "\n\n".join(f"{case}\n{found}" for found, case in wrong.items())
    assert seen.total() >= CASES
    assert seen["refused"] > CASES / 4
    assert [path.name for path in tmp_path.iterdir()] == ["case.yaml"]


def test_the_form_of_the_line() -> None:
    error = UserError("model.clients.0.count", "0 clients", "give at least 1")
    assert is_good(f"lightfed: error: {error.line}")
    assert not is_good("lightfed: error: something happened")
    long = UserError("k" * 900, "found " * 400 + "the end", "a fix " * 200)
    assert is_good(f"lightfed: error: {long.line}")
    assert "the end; a fix" in long.line
