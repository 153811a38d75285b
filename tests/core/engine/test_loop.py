"""Rounds as Lightning epochs, waves as batches: hooks, counters and whatever ends a run."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.fedbcd.fedbcdi import FedBCDI
from lightfed.api.fleet import Fleet
from lightfed.engine.strategy import FederatedStrategy
from lightfed.federation import Federation
from lightfed.runs.checkpoint import load
from lightfed.trainer import FederatedTrainer
from tests.core.engine.spy import SIZES, Spy, data, federation
from tests.small import fit

WAVES = 3  # sessions of a round on one rank: ceil(0.7 * 4)
TRAINING = ["on_train_epoch_start"] + ["on_train_batch_start", "on_train_batch_end"] * WAVES
VALIDATION = [
    "on_validation_start", "on_validation_epoch_start",
    *["on_validation_batch_start", "on_validation_batch_end"] * (1 + len(SIZES)),
    "on_validation_epoch_end", "on_validation_end",
]  # fmt: skip


def steps_of(model: Federation) -> int:
    """Return the number of steps that all clients have taken in all of their sessions."""
    return int(model.fleet.updates.sum())


def test_hooks_come_in_the_order_of_a_trainer_and_counters_count_rounds(tmp_path: Path) -> None:
    def counts(trainer: FederatedTrainer) -> tuple[int, int, int | float]:
        return trainer.current_epoch, trainer.global_step, trainer.num_training_batches

    spy = Spy(on_train_batch_end=counts, on_validation_end=counts, on_train_epoch_end=counts)
    flags: dict[str, Any] = {"callbacks": [spy], "enable_checkpointing": False}
    trainer = fit(federation(), data(), tmp_path, rounds=2, **flags)

    a_round = [*TRAINING, *VALIDATION, "on_train_epoch_end"]
    assert spy.calls == [
        "setup", "on_fit_start", "on_train_start", *a_round, *a_round, "on_train_end",
        "on_fit_end", "teardown",
    ]  # fmt: skip

    # The server is updated once a round, after the waves and before validation.
    assert spy.seen == [
        *[(0, 0, WAVES)] * WAVES, (0, 1, WAVES), (0, 1, WAVES),
        *[(1, 1, WAVES)] * WAVES, (1, 2, WAVES), (1, 2, WAVES),
    ]  # fmt: skip
    assert (trainer.current_epoch, trainer.global_step) == (2, 2)


def test_a_batch_hook_is_given_the_waves_client(tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []

    class Watch(Callback):
        hears = "rounds"

        @override
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            seen.append((batch, outputs.client, batch_idx))

    model = federation()
    fit(model, data(), tmp_path, callbacks=[Watch()])

    participants = model.fleet.participants(0)
    assert seen == [(client, client, wave) for wave, client in enumerate(participants)]


def test_checkpoints_can_follow_the_global_accuracy(tmp_path: Path) -> None:
    def accuracy(trainer: FederatedTrainer) -> float:
        return float(trainer.callback_metrics["global/accuracy"])

    spy = Spy(on_train_epoch_end=accuracy)
    keep = ModelCheckpoint(monitor="global/accuracy", mode="max", save_top_k=1, filename="{epoch}")
    fit(federation(local_epochs=2), data(), tmp_path, rounds=5, callbacks=[spy, keep])

    assert len(set(spy.seen)) > 1, "all rounds have the same accuracy, so any would be the best"
    best = max(spy.seen)
    assert keep.best_model_score is not None
    assert float(keep.best_model_score) == pytest.approx(best)
    assert Path(keep.best_model_path).name == f"epoch={spy.seen.index(best)}.ckpt"


@pytest.mark.parametrize("every", [{"every_n_epochs": 2}, {"save_last": True}])
def test_a_users_checkpoints_stand_beside_the_last_one(
    every: dict[str, Any], tmp_path: Path
) -> None:
    keep = ModelCheckpoint(save_top_k=-1, filename="{epoch}", **every)
    fit(federation(), data(), tmp_path, rounds=4, callbacks=[keep])

    interval = every.get("every_n_epochs", 1)
    kept = [f"epoch={t}.ckpt" for t in range(interval - 1, 4, interval)]
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["before-last.ckpt", *kept, "last.ckpt"]
    assert load(folder / "last.ckpt")["epoch"] == 3


def test_a_fast_dev_run_is_one_batch_a_client_and_leaves_nothing(tmp_path: Path) -> None:
    model = federation(fraction=1.0, local_epochs=3)
    trainer = fit(
        model, data(), tmp_path, rounds=5, fast_dev_run=True, logger=True,
        default_root_dir=str(tmp_path / "runs"),
    )  # fmt: skip

    assert steps_of(model) == len(SIZES)
    assert trainer.global_step == 1
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    ("limit", "epochs", "steps_of_clients"),
    [
        (1.0, 2, [6, 10, 4, 6]),
        (4, 1, [3, 4, 2, 3]),
        (0.5, 2, [3, 5, 2, 3]),
        (0.01, 1, [1, 1, 1, 1]),  # at least one step, however small the share
    ],
)
def test_limit_train_batches_limits_sessions(
    limit: float, epochs: int, steps_of_clients: list[int], tmp_path: Path
) -> None:
    model = federation(fraction=1.0, local_epochs=epochs)
    fit(model, data(), tmp_path, limit_train_batches=limit, enable_checkpointing=False)
    assert steps_of(model) == sum(steps_of_clients)


def test_no_validation_is_no_validation(tmp_path: Path) -> None:
    spy = Spy()
    trainer = fit(federation(), data(), tmp_path, callbacks=[spy], limit_val_batches=0)
    assert not any("validation" in call for call in spy.calls)
    assert not any("accuracy" in name for name in trainer.callback_metrics)
    assert "train_loss" in trainer.callback_metrics


def test_a_round_in_which_nobody_trains_is_not_the_end_of_the_run(tmp_path: Path) -> None:
    """In FedBCD-I, devices pause that have trained offline for long enough."""
    algorithm = FedBCDI(1, 1, 2, patience=1)
    model = federation(algorithm=algorithm, fraction=1.0, optimizer=partial(ASPG, lr=0.05))
    trainer = fit(model, data(), tmp_path, rounds=12)

    with (tmp_path / "run" / "metrics.csv").open() as file:
        participants = [float(row["participants"]) for row in csv.DictReader(file)]
    assert 0.0 in participants[:-1]
    assert trainer.current_epoch == 12


def test_a_stop_iteration_in_a_round_is_an_error_and_not_the_end_of_the_run(
    tmp_path: Path,
) -> None:
    class Empty(FedAvg):
        @override
        def round(self, fed: Fleet, t: int) -> None:
            super().round(fed, t)
            next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        fit(federation(algorithm=Empty()), data(), tmp_path, rounds=2)


def test_the_other_ranks_hear_of_an_error_before_callbacks_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a callback that saves a checkpoint waits for ranks that never come."""
    heard: list[str] = []

    class Fails(Callback):
        @override
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            raise ZeroDivisionError

        @override
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            heard.append("callback")

    monkeypatch.setattr(FederatedStrategy, "on_exception", lambda *_: heard.append("ranks"))
    with pytest.raises(ZeroDivisionError):
        fit(federation(), data(), tmp_path, callbacks=[Fails()])
    assert heard[:2] == ["ranks", "callback"]
