"""Tests on validation samples: the same models, other samples, columns of their own."""

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.optim import SGD

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.api.fleet import Fleet
from lightfed.federation import Federation
from lightfed.lab.report.tables import key_figures
from lightfed.lab.results.run import primary_metric, read
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import RoundPlan
from lightfed.networks.mlp import MLP
from lightfed.packs.packing import SideBySide
from lightfed.trainer import FederatedTrainer
from tests.core.engine.spy import evaluated
from tests.small import fit, fleet_of, module_of, random_data, run_round

SIZES = (24, 12, 9, 15)
mlp = partial(MLP, hidden=(8,))


def fleet(algorithm: Any, side_by_side: SideBySide = "off") -> Fleet:
    source = random_data(SIZES, batch_size=4, validation=0.3, eval_batch_size=3)
    made = fleet_of(
        [ClientGroup(len(SIZES), mlp)],
        algorithm,
        source,
        optimizer=partial(SGD, lr=0.3),
        side_by_side=side_by_side,
    )
    run_round(made, 0)
    return made


def whole(batches: Any) -> tuple[Tensor, Tensor]:
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


def figures(module: Any, x: Tensor, y: Tensor) -> tuple[float, float]:
    with torch.no_grad():
        logits = module.eval()(x)
    return float((logits.argmax(1) == y).float().mean()), float(F.cross_entropy(logits, y))


def reported(report: Any) -> tuple[float, float]:
    return report.metrics["accuracy"], report.metrics["loss"]


@pytest.mark.parametrize("side_by_side", ["off", 3])
def test_the_servers_model_is_tested_on_the_samples_of_all_clients(
    side_by_side: SideBySide,
) -> None:
    made = fleet(FedAvg(), side_by_side)
    metrics, reports = evaluated(made, kinds=("global", "personal")).finish()
    samples = made.data.tested["validation"]

    union = whole(samples.whole_batch(i) for i in range(samples.num_whole_batches))
    accuracy, loss = figures(module_of(made, None), *union)
    assert metrics["validation/global/accuracy"] == pytest.approx(accuracy)
    assert metrics["validation/global/loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["global/loss"] != pytest.approx(loss, abs=1e-4)

    by_client = reports["validation/personal"]
    assert [report.client for report in by_client] == [0, 1, 2, 3]
    for client, report in enumerate(by_client):
        own = whole(samples.batches(client))
        assert reported(report) == pytest.approx(figures(module_of(made, None), *own), abs=1e-5)
        assert report.samples == len(made.data.partition_.validation(client))
    mean = sum(report.metrics["accuracy"] for report in by_client) / len(by_client)
    assert metrics["validation/personal/accuracy"] == pytest.approx(mean)


def test_models_of_clients_are_tested_in_their_sessions_too() -> None:
    made = fleet(LGFedAvg(1))
    made.plan = RoundPlan(tested={"trained": range(4)})
    run_round(made, 1)
    _, reports = evaluated(made, kinds=("personal",), at="trained").finish(made.tests)
    samples = made.data.tested["validation"]
    for client in range(4):
        expected = figures(made.bind(client), *whole(samples.batches(client)))
        assert reported(reports["validation/personal"][client]) == pytest.approx(expected, abs=1e-5)
    assert len(reports["personal"]) == 4


def test_a_finetuned_model_is_tested_on_both() -> None:
    metrics, reports = evaluated(fleet(FedAvg()), kinds=("finetuned",)).finish()
    assert len(reports["finetuned"]) == len(reports["validation/finetuned"]) == 4
    assert metrics["finetuned/loss"] != metrics["validation/finetuned/loss"]


def validated_run(folder: Path, monitor: str, **settings: Any) -> FederatedTrainer:
    stop = EarlyStopping(monitor, patience=0, min_delta=10.0)
    federation = Federation(
        FedAvg(), [ClientGroup(len(SIZES), mlp)], optimizer=partial(SGD, lr=0.3), **settings
    )
    source = random_data(SIZES, batch_size=4, validation=0.3)
    return fit(federation, source, folder, rounds=6, callbacks=[stop])


def test_a_run_stops_early_by_validation_and_writes_its_columns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = validated_run(tmp_path, "validation/personal/loss")
    assert trainer.current_epoch == 2  # the second evaluation gains less than 10
    assert "chooses by" not in caplog.text

    rounds = pd.read_csv(tmp_path / "run" / "metrics.csv")
    clients = pd.read_csv(tmp_path / "run" / "clients.csv")
    last = clients[clients["round"] == clients["round"].max()]
    expected = rounds["validation/personal/accuracy"].iloc[-1]
    assert last["validation/accuracy"].mean() == pytest.approx(expected)
    assert "accuracy" in last
    data = trainer.datamodule
    assert last["samples"].tolist() == [len(data.test_index(client)) for client in range(4)]

    validated_run(tmp_path / "other", "personal/loss")
    said = "EarlyStopping chooses by personal/loss, which is measured on test samples"
    assert said in caplog.text


def test_the_best_round_of_a_run_is_chosen_by_validation(tmp_path: Path) -> None:
    """The round that is best on test samples is another one."""
    validated_run(tmp_path, "validation/personal/loss")
    table = pd.read_csv(tmp_path / "run" / "metrics.csv").iloc[:1]
    rows = pd.concat([table] * 3, ignore_index=True)
    rows["round"] = [1, 2, 3]
    rows["personal/accuracy"] = [0.5, 0.9, 0.7]
    rows["validation/personal/accuracy"] = [0.5, 0.6, 0.8]
    rows.to_csv(tmp_path / "run" / "metrics.csv", index=False)

    run = read(tmp_path / "run")
    assert run.best("personal/accuracy") == (0.7, 3)
    assert run.best("validation/personal/accuracy") == (0.8, 3)
    assert primary_metric(run) == "global/accuracy"
    notes = key_figures(run)["note"].tolist()
    assert any("best on validation samples" in note for note in notes)
