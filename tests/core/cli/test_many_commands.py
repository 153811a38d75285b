"""Many commands are read in one process: what they share, and what they must not."""

import sys
from pathlib import Path
from typing import Any

import pytest

from lightfed.algorithms.fedavg import FedAvg
from lightfed.cli.command_line import prepared
from lightfed.utils.errors import UserError
from tests.promises.refusals.mistakes import edited

FIT = ["fit", "--config", "run.yaml"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(edited({}))


def configuration(*words: str) -> dict[str, Any]:
    trainer: Any = prepared([*FIT, *words]).trainer
    read: dict[str, Any] = trainer.config
    return read


def test_a_command_leaves_nothing_behind_for_the_next_one() -> None:
    plain = configuration()
    rate = plain["model"]["optimizer"]["init_args"]["lr"]
    words = ["--model.optimizer.init_args.lr=0.7", "--model.algorithm=Standalone", "--model.seed=5"]
    words += ["--data.partition=Iid", "--model.clients.0.count=2", "--trainer.max_epochs=7"]
    changed = configuration(*words)
    assert changed["model"]["optimizer"]["init_args"]["lr"] == 0.7 != rate
    assert changed["model"]["algorithm"]["class_path"].endswith("Standalone")
    with pytest.raises(UserError):
        configuration("--model.fraction=none of them")
    assert configuration() == plain


def test_the_parser_of_a_command_is_made_once() -> None:
    one, two = prepared(FIT), prepared([*FIT, "--model.seed=3"])
    assert one.parser is two.parser
    assert prepared(["plan", "--config", "run.yaml"]).parser is not one.parser


def test_a_class_that_is_written_between_two_commands_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a notebook, where no module is imported by that."""
    with pytest.raises(UserError):
        prepared([*FIT, "--model.algorithm=WrittenLate"])
    late = type("WrittenLate", (FedAvg,), {"__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], "WrittenLate", late, raising=False)
    assert type(prepared([*FIT, "--model.algorithm=WrittenLate"]).model.algorithm) is late
