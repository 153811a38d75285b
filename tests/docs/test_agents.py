"""The commands and files of AGENTS.md, in order, in an empty folder."""

import json
import re
import runpy
import shlex
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from lightfed.cli import command_line
from lightfed.testing.digest import fit
from tests import forked
from tests.promises.conformance.cases import CASES
from tests.small import quiet, server_row

# `lightfed.testing.conformance` is the function; the module has to be asked for by name.
CONFORMANCE = import_module("lightfed.testing.conformance")

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "AGENTS.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
# The first block builds and tests a checkout.
IN_A_CHECKOUT = BLOCKS[0][1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    quiet()
    # Ranks are forked from a process that has imported everything, instead of from a new one.
    # `tests/core/distributed/test_new_processes.py` compares both.
    monkeypatch.setattr(CONFORMANCE, "in_new_process", forked.in_new_process)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def write_files() -> None:
    for _, block in BLOCKS:
        named = re.match(r"# (\w+\.\w+)\n", block)
        if named:
            Path(named[1]).write_text(block)


def run(line: str, output: pytest.CaptureFixture[str]) -> str:
    """A command of lightfed, or a script, in this process; what it has printed."""
    words, _, target = line.partition(" > ")
    program, *arguments = shlex.split(words)
    output.readouterr()
    if program == "python":
        # Absolute, because the processes that a script starts import it again.
        runpy.run_path(str(Path(arguments[0]).resolve()), run_name="__main__")
    else:
        assert program == "lightfed"
        status: Any = 0
        try:
            command_line.main(arguments)
        except SystemExit as exit_:
            status = exit_.code
        assert not status, line
    printed = output.readouterr().out
    if target:
        Path(target).write_text(printed)
    return printed


def test_a_scratch_method_goes_all_the_way(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files()
    lines = []
    for language, block in BLOCKS[1:]:
        if language == "sh":
            lines += block.splitlines()
    printed = {line.split()[1]: run(line, capsys) for line in lines}

    assert printed.keys() == {"plan", "fit", "check.py", "compare", "gate.py", "partition"}
    assert "odd" in printed["partition"] or "samples" in printed["partition"]
    compared = json.loads(Path("compare.json").read_text())
    assert compared["verdict"] in ("better", "worse", "not shown")
    assert list(Path("runs").glob("scratch*"))


def test_the_rule_of_adapters_trains(folder: Path) -> None:
    write_files()
    rule = runpy.run_path("rule.py")["AlikeMean"]
    case = CASES["rankmean"]
    own: Any = case.algorithm
    _, expected = fit(case, folder / "a", rounds=1)
    _, federation = fit(
        replace(case, algorithm=partial(rule, **own.keywords)), folder / "b", rounds=1
    )
    assert server_row(federation).isfinite().all()
    # Clients have unlike numbers of samples, which only the rule of the package counts.
    assert not torch.equal(server_row(federation), server_row(expected))


def test_what_it_names_in_a_checkout_exists() -> None:
    for path in re.findall(r"tests/[\w/]+\.py", IN_A_CHECKOUT):
        assert (ROOT / path).is_file(), path
    assert "'.[dev]'" in IN_A_CHECKOUT
    for path in re.findall(r"`((?:docs|tests|lightfed)/[\w/]+(?:\.\w+|/))`", TEXT):
        assert (ROOT / path).exists(), path
