"""What loggers and monitors see of a run: their steps are rounds."""

import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, WandbLogger
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.models.client_module import ClientModule
from lightfed.networks.mlp import MLP
from lightfed.runs.run_logger import RunLogger
from lightfed.utils.keys import flat
from tests.core.engine.spy import SIZES, Counting, Spy, data, federation, lr_schedule
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


def test_runs_without_loggers_have_folders_of_their_own(tmp_path: Path) -> None:
    """Each has its own last checkpoint, its tables, and goes on in its folder."""
    quiet = {"logger": False, "default_root_dir": str(tmp_path)}
    for name, seed in (("one", 0), ("two", 1)):
        fit(federation(seed=seed), data(), tmp_path, name=name, **quiet)
    other = (tmp_path / "two" / "checkpoints" / "last.ckpt").read_bytes()

    trainer = fit(federation(), data(), tmp_path, rounds=3, ckpt_path="last", name="one", **quiet)
    assert [type(logger) for logger in trainer.loggers] == [RunLogger]
    assert list(trainer.results.rounds.index) == [1, 2, 3]
    last = tmp_path / "one" / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 3
    assert (tmp_path / "two" / "checkpoints" / "last.ckpt").read_bytes() == other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_run_without_loggers_and_checkpoints_leaves_nothing(tmp_path: Path) -> None:
    nothing = {"logger": False, "enable_checkpointing": False}
    trainer = fit(federation(), data(), tmp_path, default_root_dir=str(tmp_path), **nothing)
    assert trainer.loggers == []
    assert list(tmp_path.iterdir()) == []


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


class Scheduled(Counting):
    """Configures its own optimizer, whose rate is halved after every batch of a session."""

    schedules = True

    @override
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.8, momentum=0.5)
        if not self.schedules:
            return optimizer
        schedule = ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Hooked(Scheduled):
    """Its sessions are Lightning fits."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


class Constant(Scheduled):
    schedules = False


class Warm(ClientModule):
    """Trains side by side with others, by its own optimizer."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(MLP(num_classes, input_shape, hidden=(6,)), num_classes=num_classes)

    @override
    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.3)


def rate_of_a_round(sizes: Sequence[int], batch: int) -> float:
    """The mean over samples of .8 / 2^i in the i-th batch of every client."""
    total = 0.0
    for size in sizes:
        counts = [min(batch, size - start) for start in range(0, size, batch)]
        total += sum(0.8 * 0.5**i * n for i, n in enumerate(counts))
    return total / sum(sizes)


@pytest.mark.parametrize("module", [Scheduled, Hooked])
def test_the_monitor_logs_the_rates_of_a_module_s_own_scheduler(
    module: type, tmp_path: Path
) -> None:
    """A session's schedule starts again in the next one, so that every round has the same mean."""
    model = Federation(FedAvg(), [ClientGroup(len(SIZES), module)])
    monitor = LearningRateMonitor(log_momentum=True)
    trainer = fit(model, data(), tmp_path, rounds=2, callbacks=[monitor])
    expected = [rate_of_a_round(SIZES, batch=2)] * 2
    assert column(tmp_path, "lr-SGD") == pytest.approx(expected)
    assert column(tmp_path, "lr-SGD-momentum") == pytest.approx([0.5] * 2)
    assert float(trainer.callback_metrics["lr-SGD"]) == pytest.approx(expected[0])


def test_groups_with_optimizers_of_their_own_have_rates_of_their_own(tmp_path: Path) -> None:
    groups = [ClientGroup(1, module) for module in (Scheduled, Constant, Warm, Counting)]
    optimizer = partial(SGD, lr=0.2)
    model = Federation(Standalone(), groups, optimizer=optimizer, lr_schedule=lr_schedule)
    fit(model, data(), tmp_path, rounds=2, callbacks=[LearningRateMonitor()])
    assert column(tmp_path, "lr-SGD") == LEARNING_RATES[:2]
    expected = [rate_of_a_round(SIZES[:1], batch=2)] * 2
    assert column(tmp_path, "lr-SGD/Scheduled") == pytest.approx(expected)
    assert column(tmp_path, "lr-SGD/Constant") == pytest.approx([0.8] * 2)
    assert column(tmp_path, "lr-SGD/Warm") == pytest.approx([0.3] * 2)


def test_clients_side_by_side_log_their_rates(tmp_path: Path) -> None:
    model = Federation(FedAvg(), [ClientGroup(len(SIZES), Warm)], side_by_side=4)
    fit(model, data(), tmp_path, callbacks=[LearningRateMonitor()])
    assert model.fleet.groups[0].packing.most > 1
    assert column(tmp_path, "lr-SGD") == pytest.approx([0.3])


class LikeMLflow(Logger):
    """Keeps parameters as MLflow does: by run, as texts, and none of them changes."""

    runs: ClassVar[dict[str, dict[str, str]]] = {}

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self.run_id = run_id
        self.steps: list[int | None] = []

    @property
    @override
    def name(self) -> str:
        return "like-mlflow"

    @property
    @override
    def version(self) -> str:
        return self.run_id

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        known = self.runs.setdefault(self.run_id, {})
        for name, value in flat(params):
            if known.setdefault(name, str(value)) != str(value):
                raise ValueError(f"Changing param values is not allowed: {name}")

    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.steps.append(step)


def test_a_logger_that_keeps_its_parameters_goes_on_with_more_rounds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = LikeMLflow("a"), LikeMLflow("a")
    fit(federation(), data(), tmp_path, rounds=1, logger=[first, RunLogger(str(tmp_path), "run")])
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    loggers = [second, RunLogger(str(tmp_path), "run")]
    trainer = fit(federation(), data(), tmp_path, rounds=3, logger=loggers, ckpt_path=last)
    assert list(trainer.results.rounds.index) == [1, 2, 3]
    assert {*first.steps} == {0}
    assert {*second.steps} == {1, 2}
    (line,) = [r.getMessage() for r in caplog.records if "LikeMLflow" in r.getMessage()]
    assert "still shows the configuration with which the run began" in line
    assert "trainer.max_epochs" in line


def test_a_new_run_is_not_mixed_into_that_of_another_configuration(tmp_path: Path) -> None:
    run = [LikeMLflow("b"), RunLogger(str(tmp_path), "run")]
    fit(federation(), data(), tmp_path, logger=run)
    with pytest.raises(ValueError, match="Changing param values"):
        fit(federation(seed=1), data(), tmp_path, logger=run)


def test_mlflow_goes_on_with_more_rounds_under_one_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    logger = MLFlowLogger(tracking_uri=uri)
    fit(federation(), data(), tmp_path, rounds=1, logger=[logger, RunLogger(str(tmp_path), "run")])
    again = MLFlowLogger(tracking_uri=uri, run_id=logger.run_id)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    loggers = [again, RunLogger(str(tmp_path), "run")]
    fit(federation(), data(), tmp_path, rounds=3, logger=loggers, ckpt_path=last)
    history = mlflow.MlflowClient(uri).get_metric_history(logger.run_id, "train_loss")
    assert [metric.step for metric in history] == [0, 1, 2]
