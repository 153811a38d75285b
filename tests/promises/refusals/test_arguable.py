"""Inputs of which one may argue whether they are mistakes, or whose they are.

Each has its answer here, and the reason for it.
"""

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn
from typing_extensions import override

from lightfed.cli.command_line import main
from tests.datasets import tiny
from tests.forked import forked
from tests.promises.refusals.mistakes import edited, of_class, one_group
from tests.promises.refusals.own_code import Net
from tests.promises.refusals.test_exits import client
from tests.promises.refusals.test_fuzz import is_good

FIT = ["fit", "--config", "run.yaml"]
ROOT = Path(__file__).parents[3]


class NotFinite(Net):
    """A client whose loss is not a number."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * float("nan")


class Resized(Net):
    """A client that has fewer outputs than there are classes, whatever it is given."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes)
        self.layer = nn.Linear(64, 2)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self(batch[0]).mean())


class Input(NamedTuple):
    """An arguable input.

    Attributes:
        edits: Of the configuration.
        key: What the answer names; empty if it is accepted.
        found: What it says.
        reason: Why it is so.
        prepare: What is done before.
    """

    edits: dict[str, Any]
    key: str
    found: str
    reason: str
    prepare: Callable[[], object] = lambda: None


def mnist_of_class_200() -> None:
    tiny.mnist(Path("data"))
    labels = Path("data/MNIST/raw/train-labels-idx1-ubyte")
    content = bytearray(labels.read_bytes())
    content[8] = 200
    labels.write_bytes(content)


def cifar_without_samples() -> None:
    tiny.cifar10(Path("data"))
    empty = pickle.dumps({"data": np.zeros((0, 3072), np.uint8), "labels": []})
    for path in Path("data").rglob("*_batch*"):
        path.write_bytes(empty)


def of_data(name: str, **arguments: Any) -> dict[str, Any]:
    conv = of_class("Conv", hidden=[4])
    return one_group(conv) | {"data.dataset": of_class(name, root="data", **arguments)}


INPUTS = {
    "more clients than there are samples": Input(
        {"model.clients.0.count": 10**30},
        "data.partition",
        "clients need a sample each",
        "a number of clients is too large for these data only; the fix names model.clients",
    ),
    "no client may fail, and every update is not finite": Input(
        one_group(f"{__name__}.NotFinite") | {"model.max_failed_clients": 0},
        "model.optimizer",
        "2 of 2 sessions of round 0 failed",
        "where all fail, more tolerance would not help; where some do, "
        "tests/core/api/test_failures.py shows that model.max_failed_clients is named",
    ),
    "a label that is none": Input(
        of_data("MNIST", verify_checksums=False),
        "data.dataset",
        "sample 0 has class 200, of 10 classes",
        "what is wrong is in a file, and not in an argument of the data set",
        mnist_of_class_200,
    ),
    "a data set without samples": Input(
        of_data("CIFAR10", verify_checksums=False),
        "data.dataset",
        "0 samples",
        "the same",
        cifar_without_samples,
    ),
    "targets beyond a network's outputs": Input(
        one_group(f"{__name__}.Resized"),
        "model.max_failed_clients",
        "Target",
        "only a session shows it: one that raises is left out, and where all do, the run ends",
    ),
    "a scheduler of Lightning's with all of its arguments": Input(
        {"model.lr_schedule": of_class("torch.optim.lr_scheduler.StepLR", step_size=1)},
        "",
        "",
        "a schedule over rounds is what the key is for",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", INPUTS)
def test_the_answer_to_an_arguable_configuration(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = INPUTS[name]
    case.prepare()
    Path("run.yaml").write_text(edited(case.edits | {"trainer.enable_page": False}))
    if not case.key:
        main(FIT)
        return
    with pytest.raises(SystemExit) as left:
        main(FIT)
    *_, line = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert is_good(line), line
    assert line.startswith(f"lightfed: error: {case.key}")
    assert case.found in line


def test_levels_of_a_control_string_may_have_any_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The released code of HeteroFL reads them so, and the larger one is the server's."""
    printed = []
    for modes in ("a1-b1", "b1-a1"):
        with pytest.raises(SystemExit) as left:
            main(["configs", f"control:MNIST:1_100_0.1_iid_fix_{modes}_bn_1_1"])
        assert left.value.code in (0, None)
        printed.append(capsys.readouterr().out)
    first, second = (yaml.safe_load(text) for text in printed)
    assert first["model"]["clients"] == second["model"]["clients"][::-1]


def test_a_process_that_ends_itself_has_the_status_that_it_asked_for(folder: Path) -> None:
    """Of one process nothing is left that could speak. Its folder is not that of a finished run.

    A sweep says so (test_exits.py), and so do other ranks (test_bad_ranks.py).
    """
    edits = client("training_step", "at once") | {"trainer.enable_page": False}
    Path("run.yaml").write_text(edited(edits))
    pid = forked(lambda: main(FIT))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    (record,) = Path("runs").glob("*/environment.json")
    assert "finished" not in record.read_text()


# What else is arguable, the test that has its answer, and the reason.
ELSEWHERE = {
    "a disk that is full after the last round": (
        "tests/promises/stopping/test_struck.py",
        "test_a_full_disk_after_the_last_round_is_a_warning",
        "the run is finished, and its page can be made at any time: status 0 with a warning",
    ),
    "a disk that is full during a run": (
        "tests/promises/stopping/test_full_disk.py",
        "def test_",
        "the run ends with status 1, and goes on from the checkpoint before",
    ),
    "parameters that are complex": (
        "tests/core/local/test_types.py",
        "view_as_real",
        "rows are of float32: they are refused where they are trained, and kept where not",
    ),
    "a line of a sweep with another number of clients": (
        "tests/lab/test_sweep.py",
        "def test_",
        "it is a run of its own",
    ),
    "code that leaves with a status of its own": (
        "tests/promises/refusals/test_exits.py",
        "test_a_status_other_than_0_stays_that_of_the_command",
        "the status is what it asked for, and a line says who asked",
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_arguable_and_shown_elsewhere_is_there(name: str) -> None:
    path, test, reason = ELSEWHERE[name]
    assert re.search(test, (ROOT / path).read_text())
    assert reason
