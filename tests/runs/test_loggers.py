"""What loggers and monitors see of a run: their steps are rounds."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from torch.optim import SGD
from typing_extensions import override

from lightfed.runs.run_logger import RunLogger
from tests.engine.spy import SIZES, Spy, data, federation, lr_schedule
from tests.small import fit

LEARNING_RATES = [0.2, 0.1, 0.05, 0.025]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(None not in row and None not in row.values() for row in rows), "ragged rows"
    return rows


def column(folder: Path, name: str) -> list[float]:
    return [float(row[name]) for row in rows_of(folder / "run" / "metrics.csv")]


def test_a_round_is_a_row_with_its_own_figures(tmp_path: Path) -> None:
    spy = Spy(on_train_epoch_end=lambda trainer: float(trainer.callback_metrics["global/loss"]))
    model = federation(fraction=1.0)
    fit(model, data(), tmp_path, rounds=3, callbacks=[spy])
    assert column(tmp_path, "round") == [1.0, 2.0, 3.0]
    assert column(tmp_path, "global/loss") == pytest.approx(spy.seen, rel=1e-6)
    assert column(tmp_path, "participants") == [4.0, 4.0, 4.0]
    assert column(tmp_path, "excluded") == [0.0, 0.0, 0.0]
    assert column(tmp_path, "wire_bytes") == [0.0, 0.0, 0.0]
    assert min(column(tmp_path, "seconds")) > 0.0
    clients = rows_of(tmp_path / "run" / "clients.csv")
    assert [(row["round"], row["client"]) for row in clients] == [
        (str(r), str(k)) for r in (1, 2, 3) for k in range(len(SIZES))
    ]
    totals = model.fleet.ledger.totals
    last = [[float(row[n]) for n in ("bytes_up", "bytes_down", "flops")] for row in clients[-4:]]
    assert last == totals.tolist()
    costs = np.load(tmp_path / "run" / "costs.npz")
    ends = np.cumsum([state.group.count for state in model.fleet.groups])[:-1]
    expected = [part.sum(0).tolist() for part in np.split(totals, ends)]
    assert (int(costs["round"]), costs["sums"].tolist()) == (3, expected)


def test_rounds_without_evaluation_have_one_row_too(tmp_path: Path) -> None:
    fit(federation(), data(), tmp_path, rounds=5, check_val_every_n_epoch=2)
    rows = rows_of(tmp_path / "run" / "metrics.csv")
    assert [row["round"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [bool(row["global/accuracy"]) for row in rows] == [False, True, False, True, True]
    assert all(row["train_loss"] for row in rows)


class Late(Callback):
    """Logs at the end of an evaluation and of a round, as many a user's callback does."""

    @override
    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("evaluated", float(trainer.current_epoch))

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("late", float(trainer.current_epoch))


def test_steps_of_other_loggers_are_rounds_and_both_have_what_callbacks_log(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name="csv", version=0), RunLogger(str(tmp_path), "run")]
    fit(federation(), data(), tmp_path, rounds=3, logger=loggers, callbacks=[Late()])
    rows = rows_of(tmp_path / "csv" / "version_0" / "metrics.csv")
    figures: dict[int, dict[str, float]] = {}
    for row in rows:
        given = {k: float(v) for k, v in row.items() if v and k != "step"}
        figures.setdefault(int(row["step"]), {}).update(given)
    assert sorted(figures) == [0, 1, 2]
    for name in ("train_loss", "global/accuracy", "personal/loss", "evaluated", "late"):
        ours = column(tmp_path, name)
        assert [figures[step][name] for step in range(3)] == pytest.approx(ours, rel=1e-6)
    for name in ("evaluated", "late"):
        assert column(tmp_path, name) == [0.0, 1.0, 2.0]


def test_steps_of_mlflow_are_rounds(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    logger = MLFlowLogger(tracking_uri=uri)
    fit(federation(fraction=1.0), data(), tmp_path, rounds=3, logger=logger)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs(["1"])
    found = client.get_metric_history(run.info.run_id, "global/accuracy")
    assert run.info.status == "FINISHED"
    assert run.data.params["model/fraction"] == "1.0"
    assert [metric.step for metric in found] == [0, 1, 2]


def test_w_and_b_writes_offline_beside_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    logger = WandbLogger(save_dir=tmp_path / "logs", offline=True)
    loggers = [logger, RunLogger(str(tmp_path), "run")]
    fit(federation(fraction=1.0), data(), tmp_path, rounds=3, logger=loggers)
    assert logger.experiment.summary["global/accuracy"] == pytest.approx(
        column(tmp_path, "global/accuracy")[-1]
    )
    assert logger.experiment.config["model"]["fraction"] == 1.0
    assert list(tmp_path.glob("logs/wandb/offline-run-*/*.wandb"))


def test_the_configuration_of_a_script_names_its_loggers(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name="csv"), RunLogger(str(tmp_path), "run")]
    fit(federation(), data(), tmp_path, logger=loggers)
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    named = [logger["class_path"] for logger in config["trainer"]["logger"]]
    assert named == [
        "lightning.pytorch.loggers.csv_logs.CSVLogger", "lightfed.runs.run_logger.RunLogger"
    ]  # fmt: skip


def scheduled(**settings: Any) -> Any:
    optimizer = partial(SGD, lr=0.2)
    return federation(optimizer=optimizer, lr_schedule=lr_schedule, **settings)


class Used(Callback):
    """The learning rate that sessions have been given, by round."""

    def __init__(self) -> None:
        self.rates: list[float | None] = []

    @override
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.rates.append(pl_module.fleet.plan.lr)


def test_a_resumed_run_goes_on_with_the_learning_rates_that_the_monitor_logs(
    tmp_path: Path,
) -> None:
    keep = ModelCheckpoint(monitor="step", mode="max", save_top_k=-1, filename="{epoch}")
    callbacks = [keep, LearningRateMonitor()]
    fit(scheduled(), data(), tmp_path, rounds=3, callbacks=callbacks)
    path, used = tmp_path / "run" / "checkpoints" / "epoch=1.ckpt", Used()
    callbacks = [used, LearningRateMonitor()]
    fit(scheduled(), data(), tmp_path, rounds=4, ckpt_path=path, callbacks=callbacks)
    assert used.rates == LEARNING_RATES[2:]
    assert column(tmp_path, "lr-SGD") == LEARNING_RATES
