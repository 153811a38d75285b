"""What documents, docstrings and comments name in back-quotes exists: attributes, files, options.

Looked at are words in back-quotes alone:

- files and folders, such as `engine/loop.py` and `tests/promises/`, by their path or the end of it;
- attributes, such as `Fleet.send`, of our classes and of those of torch and Lightning;
- keys of a configuration, and attributes of what `trainer`, `data`, `model`, `fed` and `s` name;
- dotted names of the package, such as `lightfed.testing.record`;
- commands such as `lightfed compare`, and options of commands, such as `--seeds`.
"""

import ast
import importlib
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from bench.__main__ import parser as bench_parser

from lightfed.api.fleet import Fleet
from lightfed.cli.usage import COMMANDS
from lightfed.data.datamodule import FederatedDataModule
from lightfed.federation import Federation
from lightfed.lab.studies.latency import latency
from lightfed.lightning_fits.session_trainer import SessionTrainer
from lightfed.local.hooks import SessionContext
from lightfed.state.server_model import ServerModel
from lightfed.trainer import FederatedTrainer

ROOT = Path(__file__).parents[2]
CODE = ("lightfed", "kernels", "benchmarks", "tests", "examples")

# What a word before a dot stands for.
OBJECTS: dict[str, tuple[type, ...]] = {
    "trainer": (FederatedTrainer, SessionTrainer),
    "data": (FederatedDataModule,),
    "model": (Federation, ServerModel),
    "fed": (Fleet,),
    "s": (SessionContext,),
}
FOREIGN = (torch, torch.nn, torch.optim, torch.distributed, L, L.callbacks, L.strategies)

NOT_OURS = {
    # Files that a reader writes.
    *("mine.py", "slurm/site.sh"),
    # Files of a folder to share.
    *("model.safetensors", "base/"),
    # Folders of pages that commands make.
    *("runs/compare/", "runs/comparison/"),
    # Beginnings of the names of metrics, and of columns.
    *("global/", "personal/", "aggregated/", "trained/", "finetuned/", "official/"),
    *("unseen/", "unseen_finetuned/", "gap/"),
}
# Programs whose options are not looked at.
FOREIGN_PROGRAMS = {"pip", "pytest", "sbatch", "squeue", "srun"}
FOREIGN_OPTIONS = {
    # Of SLURM.
    *("--cpus-per-task", "--gpu-bind", "--gpus-per-task", "--mem", "--ntasks-per-node"),
    *("--signal", "--time"),
    # Of the released code of FedPer.
    "--alg",
}


@cache
def files() -> tuple[str, ...]:
    """All files of the checkout with / in front, without what programs have made."""
    found = [f"/{path.name}" for path in ROOT.iterdir() if path.is_file()]
    for top in (*CODE, "docs", "configs", "slurm", "findings", ".ci"):
        for path in (ROOT / top).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and not re.search(r"__pycache__|docs/_build|\.log$", name):
                found.append(f"/{name}")
    return tuple(found)


def documented(
    node: ast.Module | ast.ClassDef | ast.FunctionDef,
) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """A module, its classes and functions, and those in them."""
    yield node
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from documented(child)


def comments_and_docstrings(path: Path) -> str:
    """The prose of a module."""
    text = path.read_text()
    if "`" not in text:
        return ""
    prose = [ast.get_docstring(node) or "" for node in documented(ast.parse(text))]
    comments: list[str] = []
    if not re.search("#.*`", text):  # to find the comments takes longer than all the rest
        return "\n\n".join(prose)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.append(token.string.lstrip("# "))
    return "\n\n".join([*prose, " ".join(comments)])


@cache
def prose() -> dict[str, str]:
    """Text by the file that it is from."""
    found = {}
    for name in files():
        path = ROOT / name[1:]
        if name == "/CHANGELOG.md":  # names what is gone
            continue
        if path.suffix == ".md":
            found[name[1:]] = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
        elif path.suffix == ".py" and name.split("/")[1] in CODE:
            found[name[1:]] = comments_and_docstrings(path)
        elif path.suffix in (".yaml", ".sweep", ".sbatch"):
            lines = path.read_text().splitlines()
            found[name[1:]] = "\n".join(line for line in lines if line.startswith("#"))
    return found


def quoted(text: str) -> Iterator[str]:
    """What stands in single or double back-quotes."""
    for match in re.finditer(r"(?<!`)(`{1,2})(?!`)(.+?)(?<!`)\1(?!`)", text, re.S):
        yield " ".join(match[2].split())


# Files.


def is_a_path(word: str) -> bool:
    if not re.fullmatch(r"[\w.*{},/-]+", word) or word.startswith(("/", "~", "-")):
        return False
    if word.endswith("/"):
        return True
    _, dot, end = word.rpartition(".")
    if not dot:
        return False
    if end in ("yaml", "sh"):
        return "/" in word and not word.startswith("runs/")  # the folder of a user's runs
    return end in ("py", "md", "sbatch", "sweep")


@cache
def exists(word: str) -> bool:
    """Whether a path, or one that ends so, is in the checkout.

    `*` and `{a,b}` mean what they do in a shell, and a word in capitals is any name.
    """
    word = re.sub(r"(?<=/)[A-Z]+(?=\.)", "*", word.removeprefix("../"))
    pattern = re.escape(word.rstrip("/")).replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    pattern = re.sub(r"\\\{([^}]*)\\\}", lambda m: f"(?:{m[1].replace(',', '|')})", pattern)
    end = "/" if word.endswith("/") else "$"
    return any(re.search(f"/{pattern}{end}", name) for name in files())


# Classes.


@cache
def classes() -> dict[str, list[tuple[str, ast.ClassDef]]]:
    """The classes of the package by name: the modules that have one, and what stands there."""
    found: dict[str, list[tuple[str, ast.ClassDef]]] = {}
    for top in (ROOT / "lightfed", ROOT / "kernels" / "lightfed_kernels", ROOT / "kernels/bench"):
        for path in top.rglob("*.py"):
            module = ".".join(path.relative_to(top.parent).with_suffix("").parts)
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append((module, node))
    return found


def assigned(node: ast.ClassDef) -> set[str]:
    """Attributes that the methods of a class set on `self`."""
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


@cache
def has(kind: type, name: str) -> bool:
    """Whether a class has an attribute or a parameter of that name, or sets it on itself."""
    if hasattr(kind, name) or name in inspect.signature(kind).parameters:
        return True
    for base in kind.__mro__:
        if name in vars(base).get("__annotations__", {}):
            return True
        for module, node in classes().get(base.__name__, []):
            if module == base.__module__ and name in assigned(node):
                return True
        if base.__module__.startswith(("lightning", "torch")):
            text = _source(base)
            if re.search(rf"self\.{name}\b", text):
                return True
    return False


@cache
def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def kinds(name: str) -> list[type]:
    """The classes of a name: ours, or those of torch and Lightning."""
    ours = [getattr(importlib.import_module(module), name) for module, _ in classes().get(name, [])]
    return ours or [getattr(module, name) for module in FOREIGN if hasattr(module, name)]


# Dotted names.


def resolves(dotted: str) -> bool:
    """Whether a dotted name of the package can be imported and read."""
    words = dotted.split(".")
    for n in range(len(words), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(words[:n]))
        except ModuleNotFoundError:
            continue
        for word in words[n:]:
            if isinstance(found, type) and has(found, word):
                return True
            if not hasattr(found, word):
                return False
            found = getattr(found, word)
        return True
    return False


# Options.


@cache
def options() -> set[str]:
    """Every option that a program of ours takes, Lightning's included."""
    found = set(FOREIGN_OPTIONS)
    for top in ("lightfed", "kernels", "benchmarks", "slurm"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in (".py", ".sbatch"):
                # Words of programs, in quotes: not those of the prose, which may be wrong.
                found |= set(re.findall(r"[\"'](--[\w-]+)[\"'=]", path.read_text()))
    found |= set(bench_parser()._option_string_actions)
    for call in (latency, L.Trainer.fit, L.Trainer.validate, L.Trainer.test):
        found |= {f"--{name}" for name in inspect.signature(call).parameters}
    return found | {"--config", "--help", "--print_config"}


def is_an_option(option: str) -> bool:
    """Whether a program has it, or it is a key of a configuration."""
    head, _, key = option.removeprefix("--").partition(".")
    if not key:
        # argparse makes `--no-group` beside `--group`.
        return option in options() or option.replace("--no-", "--", 1) in options()
    return head not in OBJECTS or any(has(kind, key.split(".")[0]) for kind in OBJECTS[head])


@cache
def unknown(text: str) -> str:
    """What of a text in back-quotes does not exist; "" if all does."""
    words = text.split()
    command = re.match(r"lightfed ([a-z]+)\b", text)
    if command is not None and command[1] not in COMMANDS:
        return command[0]
    if words[0] not in FOREIGN_PROGRAMS:
        for option in re.findall(r"(?<![\w-])--[a-z][\w.-]*", text):
            if not is_an_option(option):
                return option
    for word in words[1:]:
        if is_a_path(word) and "/" in word and not exists(word) and word not in NOT_OURS:
            return word
    place, _, name = text.partition(": ")
    if name and is_a_path(place):
        return unknown(place) or unknown(name)
    if is_a_path(text):
        return "" if text in NOT_OURS or exists(text) else text
    match = re.fullmatch(r"([A-Za-z]\w*)((?:\.[A-Za-z_]\w*)+)(?:\(.*\))?", text)
    if match is None:
        return ""
    head, rest = match[1], match[2][1:].split(".")
    if head in ("lightfed", "lightfed_kernels"):
        return "" if resolves(text.partition("(")[0]) else text
    if head in OBJECTS and text not in NOT_OURS:
        return "" if any(has(kind, rest[0]) for kind in OBJECTS[head]) else text
    if head[0].isupper():
        return "" if any(has(kind, rest[0]) for kind in kinds(head)) else text
    return ""


def test_what_is_named_exists() -> None:
    mistakes = [
        f"{name}: `{text}`: {mistake}"
        for name, passage in prose().items()
        for text in quoted(passage)
        if (mistake := unknown(text))
    ]
    assert not mistakes, "\n".join(mistakes)


@pytest.mark.parametrize(
    "text",
    [
        "Fleet.deliver",
        "engine/federation.py",
        "engine/evaluation.py: Evaluation.tested",
        "tests/simulation/",
        "configs/nowhere/*.yaml",
        "python benchmarks/nowhere.py --clients 3",
        "--nowhere",
        "lightfed control STRING",
        "lightfed fit --ckpt_paths last",
        "lightfed fit --model.fractions 0.5",
        "model.side_by_sides",
        "trainer.max_round",
        "fed.deliver(clients)",
        "lightfed.testing.records",
        "Trainer.fits",
    ],
)
def test_what_does_not_exist_is_found(text: str) -> None:
    assert unknown(text)


@pytest.mark.parametrize(
    "text",
    [
        "Fleet.send",
        "engine/evaluation.py",
        "api/fleet.py: Fleet.send",
        "tests/promises/",
        "configs/studies/NAME.yaml",
        "python benchmarks/rounds.py --workloads W5",
        "--ckpt_path",
        "lightfed compare A B --seeds 0-4",
        "lightfed fit --model.fraction 0.5",
        "model.side_by_side",
        "trainer.max_epochs",
        "fed.merge(clients, into=model)",
        "lightfed.testing.record",
        "LightningModule.training_step",
        "a plain word",
    ],
)
def test_what_exists_is_left_alone(text: str) -> None:
    assert unknown(text) == ""
