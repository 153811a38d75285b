"""A thousand wrong inputs of other kinds than values of keys, each answered by one line.

`pytest -m fuzz -n 0 tests/promises/refusals/test_fuzz_inputs.py`. Files of configurations that are
no YAML of ours, words of commands, variables of launchers, numbers of methods out of their bounds,
checkpoints that lack parts, and folders that claim to be runs. Every answer has a key, what was
found and a fix, the status is 2, and nothing is left behind.
"""

import io
import json
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from lightfed.cli.command_line import USAGE_ERROR, main
from lightfed.utils.bounds import Bound, bound_of
from tests.algorithms.test_bounds import METHODS, numbers
from tests.promises.refusals.mistakes import BASE, SMALL, edited
from tests.promises.refusals.test_fuzz import is_good, limits
from tests.promises.stopping.test_before_last import WRONG

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(3600)]
NUMBER = 1000
ENOUGH = 0.995  # of the answers; what is left is named by the failing test
FIT = ["fit", "--config", "case.yaml"]
Case = tuple[str, list[str], dict[str, str]]  # kind, words, variables

TEXTS = (
    "",
    "x",
    "-1",
    "1.5",
    "nan",
    "[]",
    "{}",
    "null",
    "true",
    "x" * 300,
    "1e999",
    "[1,",
    "é\x07",
)
NUMBERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT", "SLURM_RESTART_COUNT")
OPTIONS = (
    "trainer.max_epochs", "trainer.devices", "trainer.num_threads", "trainer.precision",
    "trainer.max_time", "model.fraction", "model.local_epochs", "model.clients.0.count",
    "model.algorithm", "model.optimizer.lr", "model.evaluate", "model.seed", "model.store",
    "data.batch_size", "data.partition.alpha", "data.dataset", "data.chunks", "trainer.accelerator",
)  # fmt: skip
COMMANDS = (
    ["report"], ["report", "nowhere"], ["report", "."], ["report", "case.yaml"],
    ["sweep"], ["sweep", "nowhere"], ["sweep", "case.yaml", "--line", "99"],
    ["compare", "case.yaml"], ["compare", "nowhere.yaml", "case.yaml"], ["study", "nowhere"],
    ["control", "nowhere"], ["latency"], ["latency", "--delay", "Nothing"],
    ["configs", "nowhere"],
    ["nothing"], ["fit"], ["fit", "--config"],
    ["test", "--config", "case.yaml", "--ckpt_path", "x"],
)  # fmt: skip
MORE = ("--seeds", "--metric", "--target", "--tune", "--jobs", "--set", "--x", "-x", "--std")


def value_of_another_type(value: Any, draw: random.Random) -> Any:
    """A value that a key with this one cannot have."""
    if isinstance(value, dict):
        return draw.choice([3, "x", [], [value]])
    if isinstance(value, list):
        return draw.choice([3, "x", {}, []])
    return draw.choice([[], {}, ["x"], {"x": 1}, "no such text"])


def damaged_text(text: str, draw: random.Random) -> str:
    """A configuration whose text is cut, or has characters that end it."""
    lines = text.splitlines()
    at = draw.randrange(1, len(lines))
    odd = draw.choice(["{", "[1, ", "\t- x", ": :", "key: [", "'", '"', "&a *b", "? x", "%"])
    return "\n".join([*lines[:at], lines[at] + odd, *lines[at + 1 :]])


def without_a_key(draw: random.Random) -> str:
    config = yaml.safe_load(BASE)
    owner = draw.choice([config["model"], config["data"], config])
    del owner[draw.choice([key for key in owner if key not in ("trainer", "optimizer")])]
    return str(yaml.safe_dump(config))


def with_another_type(draw: random.Random) -> str:
    config = yaml.safe_load(BASE)
    owner: Any = draw.choice([config["model"], config["data"], config["model"]["clients"][0]])
    key = draw.choice(list(owner))
    owner[key] = value_of_another_type(owner[key], draw)
    return str(yaml.safe_dump(config))


def with_an_unknown_key(draw: random.Random) -> str:
    config = yaml.safe_load(BASE)
    owner: Any = draw.choice([config, *config.values(), config["model"]["clients"][0]])
    owner[draw.choice(["nothing", "lrr", "Model", "0", "clients "])] = draw.choice([1, "x", [], {}])
    return str(yaml.safe_dump(config))


def outside(bound: Bound, draw: random.Random) -> float:
    """A number outside of an interval."""
    whole = [bound.low - 1, bound.low - 10**6]
    if bound.ends[0] == "(":
        whole.append(bound.low)
    if bound.high < float("inf"):
        whole += [bound.high + 1, bound.high + 10**6]
    return draw.choice(whole)


def method_out_of_bounds(draw: random.Random) -> str:
    kind = draw.choice([kind for kind in METHODS if numbers(kind)])
    name = draw.choice(list(numbers(kind)))
    bound = bound_of(numbers(kind)[name])
    assert bound is not None
    arguments: dict[str, Any] = {name: outside(bound, draw)}
    annotations = {n for k in kind.__mro__ for n in getattr(k.__init__, "__annotations__", {})}
    given: dict[str, Any] = {"shared": SMALL, "head": "net", "lipschitz": 1.0, "q": 1.0}
    given |= {"mu": 1.0, "global_layers": 1}
    arguments = {k: v for k, v in given.items() if k in annotations} | arguments
    annotation = str(numbers(kind)[name])
    if "tuple" in annotation or "Sequence" in annotation:
        arguments[name] = [arguments[name]] * 2
    elif "list" in annotation:
        arguments[name] = [arguments[name]]
    made = {"class_path": f"{kind.__module__}.{kind.__name__}", "init_args": arguments}
    key = "model.algorithm"
    if "penalt" in kind.__module__:
        key = "model.local_penalty"
    if "optimizers" in kind.__module__:
        key = "model.server_optimizer"
    return edited({"model.clients": [{"count": 2, "model": SMALL}]} | {key: made})


def checkpoint_without_a_part(draw: random.Random, whole: dict[str, Any]) -> None:
    """A checkpoint of the base configuration with one or two faults, as given.ckpt."""
    content = dict(whole)
    content |= {k: dict(v) for k, v in whole.items() if isinstance(v, dict)}
    for name in draw.sample(sorted(WRONG), draw.choice([1, 1, 2])):
        try:
            WRONG[name][0](content)
        except (KeyError, TypeError):
            continue  # the other fault took it away
    torch.save(content, "given.ckpt")


def foreign_folder(draw: random.Random) -> None:
    """A folder `foreign` that claims to be a run, and cannot be read as one."""
    folder = Path("foreign")
    folder.mkdir(exist_ok=True)
    rows = draw.choice(["round,train_loss\none,1\n", "round\n2\n1\n", "loss\n1\n", "\n", "round\n"])
    record = {draw.choice(["groups", "clients", "seed", "finished", "experiment"]): "x"}
    (folder / "metrics.csv").write_text(rows if draw.random() < 0.7 else "round,train_loss\n1,1\n")
    odd = [json.dumps(record), "{", "[]", "3", json.dumps({"name": [1]})]
    (folder / "environment.json").write_text(draw.choice(odd))


def cases(whole: dict[str, Any]) -> Iterator[Case]:
    """A thousand of them, always the same; each writes the files that it needs."""
    draw = random.Random(49)
    texts: list[tuple[str, Callable[[random.Random], str]]] = [
        ("no yaml", lambda draw: damaged_text(BASE, draw)),
        ("no key", without_a_key),
        ("another type", with_another_type),
        ("unknown key", with_an_unknown_key),
        ("out of bounds", method_out_of_bounds),
    ]
    kinds = [*(name for name, _ in texts), "word", "variable", "command", "checkpoint", "folder"]
    for number in range(NUMBER):
        kind = kinds[number % len(kinds)]
        Path("case.yaml").write_text(BASE)
        variables: dict[str, str] = {}
        words = [*FIT]
        if kind in dict(texts):
            Path("case.yaml").write_text(dict(texts)[kind](draw))
        elif kind == "word":
            words.append(f"--{draw.choice(OPTIONS)}={draw.choice(TEXTS)}")
        elif kind == "variable":
            variables[draw.choice(NUMBERS)] = draw.choice(
                ["", "x", "-1", "1.5", "99999999999", "é"]
            )
        elif kind == "command":
            words = [*draw.choice(COMMANDS)]
            if draw.random() < 0.5:
                words += [draw.choice(MORE), draw.choice(TEXTS)]
        elif kind == "checkpoint":
            checkpoint_without_a_part(draw, whole)
            words += ["--ckpt_path", "given.ckpt"]
        else:
            foreign_folder(draw)
            words = ["report", "foreign"]
        yield kind, words, variables


def files() -> set[str]:
    return {str(path) for path in Path().rglob("*") if path.is_file()}


def answer(words: list[str], variables: dict[str, str]) -> str:
    """How a command takes a case: `refused`, `accepted`, or what is wrong with the answer."""
    errors = io.StringIO()
    before = files()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(errors), limits():
                main(words)
        except SystemExit as left:
            if left.code not in (0, None):
                lines = errors.getvalue().splitlines()
                if left.code != USAGE_ERROR or len(lines) != 1 or not is_good(lines[0]):
                    return f"status {left.code}: {errors.getvalue()[-400:]}"
                new = files() - before
                return f"left {sorted(new)}" if new else "refused"
        except BaseException as error:
            return f"raised {error!r:.300}"
    return "accepted"


def test_a_thousand_wrong_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launchers = ("SLURM_", "MASTER_", "LOCAL_", "RANK", "WORLD_SIZE", "NODE_RANK")
    for name in [n for n in os.environ if n.startswith(launchers)]:
        monkeypatch.delenv(name)
    Path("case.yaml").write_text(BASE)
    main([*FIT, "--trainer.enable_page=false"])
    whole = torch.load("runs/case/checkpoints/last.ckpt", weights_only=True)
    seen: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    for kind, words, variables in cases(whole):
        found = answer(words, variables)
        if found in ("refused", "accepted"):
            seen[found] += 1
            accepted[kind] += found == "accepted"
        else:
            seen["wrong"] += 1
            text = Path("case.yaml").read_text()[-300:] if words == FIT else ""
            wrong.setdefault(found, f"{kind} {words} {variables}\n{text}")
    print(dict(seen), "accepted:", dict(accepted))
    said = "\n\n".join(f"{case}\n{found}" for found, case in wrong.items())
    assert not any(found.startswith("raised") for found in wrong), said
    answered = seen["refused"] + seen["wrong"]
    assert seen["refused"] >= ENOUGH * answered, said
    assert seen["refused"] >= NUMBER * 0.8, dict(accepted)
