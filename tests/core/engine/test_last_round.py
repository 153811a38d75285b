"""The last round of a run is evaluated, whatever ends the run."""

import csv
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from lightfed.algorithms.peers.dpsgd import DPSGD
from lightfed.algorithms.topology.topology import Ring
from lightfed.runs.run_logger import RunLogger
from tests.core.engine.spy import Spy, data, federation, state_of
from tests.small import fit

RARELY = {"check_val_every_n_epoch": 4}


class Stop(Callback):
    """Asks for the end within the waves of a round."""

    hears = "rounds"

    def __init__(self, after: int) -> None:
        self.after = after

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 == self.after


def stopped() -> list[Callback]:
    watch: dict[str, Any] = {"stopping_threshold": 100.0, "check_on_train_epoch_end": True}
    return [EarlyStopping("train_loss", **watch)]


ENDS: dict[str, tuple[int, dict[str, Any]]] = {
    "max_epochs": (6, {"rounds": 6}),
    "max_steps": (3, {"rounds": 100, "max_steps": 3}),
    "a divisor": (4, {"rounds": 4}),
    "max_time": (1, {"rounds": 9, "max_time": timedelta(microseconds=1)}),
    "a callback after a round": (1, {"rounds": 9, "callbacks": stopped}),
    "a callback within a round": (2, {"rounds": 9, "callbacks": lambda: [Stop(after=2)]}),
}


def flags_of(flags: dict[str, Any]) -> dict[str, Any]:
    return {k: v() if callable(v) else v for k, v in flags.items()}


def table(folder: Path, name: str = "metrics.csv") -> list[dict[str, str]]:
    with (folder / "run" / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in r.items() if k not in ("seconds", "wire_bytes")} for r in rows]


def evaluated(folder: Path) -> list[int]:
    return [int(row["round"]) for row in table(folder) if row["global/accuracy"]]


@pytest.mark.parametrize(("rounds", "flags"), ENDS.values(), ids=ENDS)
def test_the_last_round_is_evaluated_once_and_nothing_else_is_changed(
    rounds: int, flags: dict[str, Any], tmp_path: Path
) -> None:
    always, rarely = federation(), federation()
    fit(always, data(), tmp_path / "always", **flags_of(flags))
    spy = Spy()
    own = {"callbacks": []} | flags_of(flags) | RARELY
    own["callbacks"].append(spy)
    trainer = fit(rarely, data(), tmp_path / "rarely", **own)
    assert evaluated(tmp_path / "rarely") == [4][: rounds // 4] + [rounds][: rounds % 4]
    assert state_of(rarely) == state_of(always)
    assert table(tmp_path / "rarely")[-1] == table(tmp_path / "always")[-1]
    clients = table(tmp_path / "rarely", "clients.csv")
    found = {row["round"] for row in clients}
    every = table(tmp_path / "always", "clients.csv")
    assert clients == [row for row in every if row["round"] in found]
    assert spy.calls.index("on_train_end") > max(
        i for i, call in enumerate(spy.calls) if call == "on_validation_end"
    )
    assert (trainer.current_epoch, trainer.global_step) == (rounds, rounds)


def test_a_client_that_is_tested_at_its_start_is_tested_in_the_last_round(tmp_path: Path) -> None:
    model = federation(algorithm=DPSGD(Ring()), fraction=1.0)
    fit(model, data(), tmp_path, rounds=3, check_val_every_n_epoch=2)
    assert [bool(row["aggregated/accuracy"]) for row in table(tmp_path)] == [False, True, True]


@pytest.mark.parametrize("rounds", [3, 6])
def test_a_resumed_run_evaluates_its_own_last_round(rounds: int, tmp_path: Path) -> None:
    """Also one that has nothing to train, because it is to end where it was interrupted."""
    whole = federation()
    fit(whole, data(), tmp_path / "whole", rounds=rounds, **RARELY)

    class Break(Callback):
        @override
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 3:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(federation(), data(), tmp_path, rounds=9, callbacks=[Break()], **RARELY)
    resumed = federation()
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    fit(resumed, data(), tmp_path, rounds=rounds, ckpt_path=path, **RARELY)
    assert state_of(resumed) == state_of(whole)
    for name in ("metrics.csv", "clients.csv"):
        assert table(tmp_path, name) == table(tmp_path / "whole", name)


def test_a_stopped_run_that_goes_on_does_not_evaluate_its_end_again(tmp_path: Path) -> None:
    fit(federation(), data(), tmp_path, rounds=9, callbacks=[Stop(after=2)], **RARELY)
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    for rounds in (2, 3):
        fit(federation(), data(), tmp_path, rounds=rounds, ckpt_path=path, **RARELY)
        assert evaluated(tmp_path) == list(range(2, rounds + 1))
        clients = [row["round"] for row in table(tmp_path, "clients.csv")]
        assert clients == [str(n) for n in range(2, rounds + 1) for _ in range(4)]


def test_a_run_that_early_stopping_has_ended_stays_so_until_its_limits_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that dies between its last checkpoint and its end."""

    class Dies(Callback):
        @override
        def on_train_end(self, *_: Any) -> None:
            raise ZeroDivisionError

    def run(folder: Path, *more: Callback, rounds: int = 9, **settings: Any) -> Any:
        model = federation()
        callbacks = [EarlyStopping("global/accuracy", min_delta=1.0, patience=2), *more]
        fit(model, data(), folder, rounds=rounds, callbacks=callbacks, **settings)
        return state_of(model)

    whole = run(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, Dies())
    for _ in range(2):
        assert run(tmp_path, ckpt_path="last") == whole
        assert "was stopped after 3 rounds; give a larger" in capsys.readouterr().out
        assert table(tmp_path) == table(tmp_path / "whole")
    run(tmp_path, ckpt_path="last", rounds=10)
    assert evaluated(tmp_path) == [1, 2, 3, 4]
    fit(federation(), data(), tmp_path, rounds=9, ckpt_path="last")
    assert evaluated(tmp_path) == list(range(1, 10))


def test_more_rounds_in_the_same_trainer_keep_the_rows_of_those_before(tmp_path: Path) -> None:
    whole, model = federation(), federation()
    fit(whole, data(), tmp_path / "whole", rounds=5, **RARELY)
    trainer = fit(model, data(), tmp_path, rounds=2, **RARELY)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(model, datamodule=data())
    assert state_of(model) == state_of(whole)
    assert [row["round"] for row in table(tmp_path)] == list("12345")
    assert table(tmp_path)[2:] == table(tmp_path / "whole")[2:]
    assert [row["round"] for row in table(tmp_path, "clients.csv")] == [*"2222", *"4444", *"5555"]


def test_other_loggers_have_the_figures_of_the_last_round_once(tmp_path: Path) -> None:
    csvs = CSVLogger(tmp_path, name="csv", version=0)
    loggers = [RunLogger(str(tmp_path), "run"), csvs]
    fit(federation(), data(), tmp_path, rounds=9, callbacks=stopped(), logger=loggers, **RARELY)
    rows = list(csv.DictReader((tmp_path / "csv" / "version_0" / "metrics.csv").open()))
    assert [row["step"] for row in rows if row["global/accuracy"]] == ["0"]
    assert [row["step"] for row in rows if row["train_loss"]] == ["0"]
