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
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from lightfed.cli.command_line import USAGE_ERROR, main, prepared
from lightfed.utils.bounds import Bound, bound_of
from tests.algorithms.test_bounds import METHODS, numbers
from tests.forked import result_of
from tests.promises.refusals.mistakes import BASE, SMALL, edited
from tests.promises.refusals.test_fuzz import Long, is_good, limits
from tests.promises.stopping.test_before_last import WRONG

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(3600)]
NUMBER = 1000
ENOUGH = 0.995  # of the answers; what is left is named by the failing test
FIT = ["fit", "--config", "case.yaml"]
Case = tuple[str, str, list[str], dict[str, str]]  # kind, what is wrong, words, variables

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
    ["configs", "control:nowhere"], ["configs", "control:MNIST:1_1"], ["configs", "nowhere"],
    ["configs", "control:", "copy"],
    ["nothing"], ["fit"], ["fit", "--config"],
    ["test", "--config", "case.yaml", "--ckpt_path", "x"],
)  # fmt: skip
# What is accepted, and why it is no mistake.
ARGUABLE = {
    r"word: .* --data\.partition\.alpha=1\.5": "a concentration may be above 1",
    r"word: .* --model\.optimizer\.lr=1\.5": "whether a rate is too high only training shows",
    r"word: .* --trainer\.max_time=null": "the default, by which there is no limit",
    r"word: .* --trainer\.max_epochs=-1": "Lightning's word for no limit of rounds",
}
MORE = ("--seeds", "--metric", "--target", "--tune", "--jobs", "--set", "--x", "-x", "--std")


def value_of_another_type(value: Any, draw: random.Random) -> Any:
    """A value that a key with this one cannot have."""
    if isinstance(value, dict):
        return draw.choice([3, "x", [], [value]])
    if isinstance(value, list):
        return draw.choice([3, "x", {}, []])
    return draw.choice([[], {}, ["x"], {"x": 1}, "no such text"])


def damaged_text(draw: random.Random) -> tuple[str, str]:
    """A configuration whose text has characters that end it, and which."""
    lines = BASE.splitlines()
    at = draw.randrange(1, len(lines))
    odd = draw.choice(["{", "[1, ", "\t- x", ": :", "key: [", "'", '"', "&a *b", "? x", "%"])
    damaged = lines[at] + odd
    return "\n".join([*lines[:at], damaged, *lines[at + 1 :]]), damaged


def without_a_key(draw: random.Random) -> tuple[str, str]:
    config = yaml.safe_load(BASE)
    owner = draw.choice([config["model"], config["data"], config])
    key = draw.choice([key for key in owner if key not in ("trainer", "optimizer")])
    del owner[key]
    return str(yaml.safe_dump(config)), key


def with_another_type(draw: random.Random) -> tuple[str, str]:
    config = yaml.safe_load(BASE)
    owner: Any = draw.choice([config["model"], config["data"], config["model"]["clients"][0]])
    key = draw.choice(list(owner))
    owner[key] = value_of_another_type(owner[key], draw)
    return str(yaml.safe_dump(config)), f"{key}={owner[key]}"


def with_an_unknown_key(draw: random.Random) -> tuple[str, str]:
    config = yaml.safe_load(BASE)
    model = config["model"]
    network, partition = model["clients"][0]["model"], config["data"]["partition"]
    inner = [model["clients"][0], network, network["init_args"], partition, model["optimizer"]]
    owner: Any = draw.choice([config, *config.values(), *inner])
    key = draw.choice(["nothing", "lrr", "Model", "0", "clients "])
    owner[key] = draw.choice([1, "x", [], {}, {"x": {}}, None])
    return str(yaml.safe_dump(config)), f"{key}={owner[key]} beside {', '.join(owner)}"


def outside(bound: Bound, draw: random.Random) -> float:
    """A number outside of an interval."""
    whole = [bound.low - 1, bound.low - 10**6]
    if bound.ends[0] == "(":
        whole.append(bound.low)
    if bound.high < float("inf"):
        whole += [bound.high + 1, bound.high + 10**6]
    return draw.choice(whole)


def method_out_of_bounds(draw: random.Random) -> tuple[str, str]:
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
    text = edited({"model.clients": [{"count": 2, "model": SMALL}]} | {key: made})
    return text, f"{kind.__name__}.{name}={arguments[name]}"


def checkpoint_without_a_part(draw: random.Random, whole: dict[str, Any]) -> str:
    """A checkpoint of the base configuration with one or two faults, as given.ckpt; which."""
    content = dict(whole)
    content |= {k: dict(v) for k, v in whole.items() if isinstance(v, dict)}
    faults = draw.sample(sorted(WRONG), draw.choice([1, 1, 2]))
    for name in faults:
        try:
            WRONG[name][0](content)
        except (KeyError, TypeError):
            continue  # the other fault took it away
    torch.save(content, "given.ckpt")
    return " and ".join(faults)


def foreign_folder(draw: random.Random) -> str:
    """A folder `foreign` that claims to be a run, and cannot be read as one; what is in it."""
    folder = Path("foreign")
    folder.mkdir(exist_ok=True)
    rows = draw.choice(["round,train_loss\none,1\n", "round\n2\n1\n", "loss\n1\n", "\n", "round\n"])
    record = {draw.choice(["groups", "clients", "seed", "finished", "experiment"]): "x"}
    table = rows if draw.random() < 0.7 else "round,train_loss\n1,1\n"
    (folder / "metrics.csv").write_text(table)
    odd = draw.choice([json.dumps(record), "{", "[]", "3", json.dumps({"name": [1]})])
    (folder / "environment.json").write_text(odd)
    return f"{table!r} and {odd}"


def cases(whole: dict[str, Any], root: Path) -> Iterator[Case]:
    """A thousand of them, always the same; each begins in a new folder with what it needs."""
    draw = random.Random(49)
    texts: dict[str, Callable[[random.Random], tuple[str, str]]] = {
        "no yaml": damaged_text,
        "no key": without_a_key,
        "another type": with_another_type,
        "unknown key": with_an_unknown_key,
        "out of bounds": method_out_of_bounds,
    }
    kinds = [*texts, "word", "variable", "command", "checkpoint", "folder"]
    for number in range(NUMBER):
        (root / f"{number}").mkdir()
        os.chdir(root / f"{number}")
        kind = kinds[number % len(kinds)]
        text, what = BASE, ""
        variables: dict[str, str] = {}
        words = [*FIT]
        if kind in texts:
            text, what = texts[kind](draw)
        elif kind == "word":
            words.append(f"--{draw.choice(OPTIONS)}={draw.choice(TEXTS)}")
        elif kind == "variable":
            name = draw.choice(NUMBERS)
            variables[name] = draw.choice(["", "x", "-1", "1.5", "99999999999", "é"])
            what = f"{name}={variables[name]}"
        elif kind == "command":
            words = [*draw.choice(COMMANDS)]
            if draw.random() < 0.5:
                words += [draw.choice(MORE), draw.choice(TEXTS)]
        elif kind == "checkpoint":
            what = checkpoint_without_a_part(draw, whole)
            words += ["--ckpt_path", "given.ckpt"]
        else:
            what = foreign_folder(draw)
            words = ["report", "foreign"]
        Path("case.yaml").write_text(text)
        yield kind, what or " ".join(words), words, variables


def files() -> set[str]:
    return {str(path) for path in Path().rglob("*") if path.is_file()}


def answer(words: list[str], variables: dict[str, str]) -> str:
    """How a command takes a case: `refused`, `accepted`, or what is wrong with the answer."""
    errors = io.StringIO()
    before = files()
    os.environ.update(variables)
    warnings.simplefilter("ignore")
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
    except Long:
        return "accepted"  # and the run goes on
    except BaseException as error:
        return f"raised {error!r:.300}"
    return "accepted"


def answer_of_child(words: list[str], variables: dict[str, str]) -> str:
    """The same of a child, which keeps what it does to modules and variables for itself."""
    try:
        return result_of(lambda: answer(words, variables))
    except ChildProcessError as error:
        return f"raised {error}"


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The checkpoint of a run, and this process ready to be forked: it has parsed, and not run."""
    launchers = ("SLURM_", "MASTER_", "LOCAL_", "RANK", "WORLD_SIZE", "NODE_RANK")
    for name in [n for n in os.environ if n.startswith(launchers)]:
        monkeypatch.delenv(name)
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    Path("case.yaml").write_text(BASE)
    prepared(FIT)
    assert answer_of_child([*FIT, "--trainer.enable_page=false"], {}) == "accepted"
    content: dict[str, Any] = torch.load("runs/case/checkpoints/last.ckpt", weights_only=True)
    return content


def test_a_thousand_wrong_inputs(whole: dict[str, Any], tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    accepted: list[str] = []
    wrong: dict[str, str] = {}
    for number, (kind, what, words, variables) in enumerate(cases(whole, tmp_path)):
        found = answer_of_child(words, variables)
        case = f"{kind}: {what}"
        if found != "refused":
            print(f"{number} {case}: {found}", flush=True)
        if found == "accepted":
            accepted.append(case)
        elif found != "refused":
            wrong.setdefault(found, case)
        seen[found if found in ("refused", "accepted") else "wrong"] += 1
        shutil.rmtree(Path.cwd())
    print(dict(seen))
    said = "\n\n".join(f"{case}\n{found}" for found, case in wrong.items())
    assert not any(found.startswith("raised") for found in wrong), said
    unnamed = [case for case in accepted if not any(re.fullmatch(a, case) for a in ARGUABLE)]
    assert unnamed == []
    assert seen["refused"] >= ENOUGH * (seen["refused"] + seen["wrong"]), said
    assert seen["refused"] >= NUMBER * 0.95, accepted
