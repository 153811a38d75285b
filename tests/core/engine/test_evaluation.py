"""The metrics of an evaluation, each compared with a sum made by hand."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torchmetrics.classification import MulticlassF1Score
from torchmetrics.functional.classification import multiclass_f1_score
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.peers.dpsgd import DPSGD
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.topology.topology import Ring
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.engine.evaluation import Evaluation, client_metrics
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.local.session import Report, weighted_means
from lightfed.networks.mlp import MLP
from lightfed.runs.environment import environment
from tests.core.engine.spy import Noisy, evaluated
from tests.small import data_of, fit, fleet_of, module_of, random_data

CLIENTS = 12


class Score(L.LightningModule):
    """Its score on a sample is the sample's first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.w

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return 0.0 * self(batch[0]).sum()

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        score = self(batch[0]).mean()
        self.log("score", score)
        self.log("loss", -score)


def scored(values: list[float], *, eval_batch_size: int = 2) -> FederatedDataModule:
    """Train and test client k on k + 1 samples of class k, all of which have the k-th value."""
    sizes = [k + 1 for k in range(len(values))]
    y = torch.repeat_interleave(torch.arange(len(values)), torch.tensor(sizes))
    x = torch.tensor(values)[y][:, None]

    samples_of_clients = []
    first = 0
    for size in sizes:
        samples_of_clients.append(range(first, first + size))
        first += size
    data = data_of(x, y, samples_of_clients, eval_batch_size=eval_batch_size)
    data.personal_test = "labels"  # all test samples of a client's classes
    return data


def evaluate(fleet: Fleet, **settings: Any) -> tuple[dict[str, float], list[Report]]:
    """Return the metrics, and the reports of what clients hold."""
    options: dict[str, Any] = {"kinds": ("global", "personal"), "clients": None} | settings
    metrics, reports = evaluated(fleet, **options).finish()
    return metrics, reports["personal"]


# The score of every client's samples.
VALUES = [0.5, 0.25, 1.0, 0.75, 0.0, 0.5, 0.25, 1.0, 0.125, 0.5, 0.75, 0.375]


def fleet_with(groups: list[ClientGroup], **settings: Any) -> Fleet:
    return fleet_of(groups, FedAvg(), scored(VALUES), **settings)


def test_personal_figures_count_every_client_once() -> None:
    metrics, reports = evaluate(fleet_with([ClientGroup(CLIENTS, Score)]), kinds=("personal",))

    reported = [(r.client, r.samples, r.metrics["score"]) for r in reports]
    assert reported == [(k, k + 1, value) for k, value in enumerate(VALUES)]

    mean = sum(VALUES) / CLIENTS
    deviation = (sum((v - mean) ** 2 for v in VALUES) / CLIENTS) ** 0.5
    worst = (0.0 + 0.125) / 2  # a tenth of 12 clients, rounded up
    assert metrics == {
        "personal/score": pytest.approx(mean, rel=1e-12),
        "personal/score_std": pytest.approx(deviation, rel=1e-12),
        "personal/score_worst10": worst,
        "personal/loss": pytest.approx(-mean, rel=1e-12),
    }


@pytest.mark.parametrize(
    ("eval_clients", "tested"), [(None, 4), (6, 6), (CLIENTS, CLIENTS), (99, CLIENTS)]
)
def test_a_large_federation_tests_some_of_its_clients_by_default(
    eval_clients: int | None,
    tested: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("lightfed.engine.evaluation.MOST", 4)
    fleet = fleet_with([ClientGroup(CLIENTS, Score)])
    evaluation = Evaluation(fleet, fleet.data, kinds=["personal"], clients=eval_clients)
    assert len(evaluation.clients) == tested
    assert ("model.eval_clients" in caplog.text) == (eval_clients is None)


def test_groups_have_figures_of_their_own() -> None:
    groups = [
        ClientGroup(4, Score, name="wide"),
        ClientGroup(5, Score, level="c"),
        ClientGroup(3, Score),
    ]
    metrics, _ = evaluate(fleet_with(groups), kinds=("personal",))
    assert metrics["personal/score/wide"] == sum(VALUES[:4]) / 4
    assert metrics["personal/score/c"] == sum(VALUES[4:9]) / 5
    assert metrics["personal/score/Score"] == sum(VALUES[9:]) / 3
    assert not any(name.startswith("personal/loss/") for name in metrics)


def test_the_global_figure_counts_every_sample_once() -> None:
    fleet = fleet_with([ClientGroup(CLIENTS, Score)])
    metrics, reports = evaluate(fleet, kinds=("global",))
    samples = CLIENTS * (CLIENTS + 1) // 2
    mean = sum((k + 1) * v for k, v in enumerate(VALUES)) / samples
    # Batches of two samples: quarters and eighths, exact in float32.
    assert metrics == {"global/score": mean, "global/loss": -mean}
    assert reports == []


def test_a_share_of_the_clients_is_drawn_once() -> None:
    fleet = fleet_with([ClientGroup(CLIENTS, Score)])

    def jobs(fleet: Fleet) -> list[int]:
        return list(Evaluation(fleet, fleet.data, kinds=("personal",), clients=5).jobs)

    chosen = jobs(fleet)
    assert len(chosen) == 5
    assert chosen == sorted(set(chosen))
    assert jobs(fleet) == chosen
    assert jobs(fleet_with([ClientGroup(CLIENTS, Score)], seed=1)) != chosen

    metrics, reports = evaluate(fleet, kinds=("personal",), clients=5)
    assert [r.client for r in reports] == chosen
    assert metrics["personal/score"] == pytest.approx(sum(VALUES[k] for k in chosen) / 5)


@pytest.mark.parametrize(
    "algorithm", [Standalone(), DPSGD(Ring()), DisPFL(Ring(), static=True)]
)  # fmt: skip
def test_without_a_server_there_is_no_global_figure(algorithm: Algorithm) -> None:
    data = scored(VALUES)
    fleet = fleet_of([ClientGroup(CLIENTS, Score)], algorithm, data)
    metrics, reports = evaluate(fleet)
    assert len(reports) == CLIENTS
    assert {name.split("/")[0] for name in metrics} == {"personal"}


def test_clients_without_a_test_sample_have_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_with([ClientGroup(CLIENTS, Score)])
    tested = fleet.data.tested["test"]
    whole = tested.batches
    monkeypatch.setattr(tested, "batches", lambda k: iter(()) if k == 4 else whole(k))
    metrics, reports = evaluate(fleet, kinds=("personal",))
    assert [r.client for r in reports] == [k for k in range(CLIENTS) if k != 4]
    assert metrics["personal/score"] == pytest.approx((sum(VALUES) - VALUES[4]) / (CLIENTS - 1))


@pytest.mark.parametrize("eval_batch_size", [7, 1000])
def test_batches_of_any_size_give_the_mean_over_the_whole_test_set(
    eval_batch_size: int, tmp_path: Path
) -> None:
    data = random_data([9, 14], batch_size=4, eval_batch_size=eval_batch_size)
    optimizer = partial(SGD, lr=0.1)
    model = Federation(FedAvg(), [ClientGroup(2, partial(MLP, hidden=(5,)))], optimizer=optimizer)
    trainer = fit(model, data, tmp_path, rounds=2)
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    module = module_of(model.fleet, None)
    test = data.dataset.load("test")
    with torch.no_grad():
        logits = module(test.x)
    assert metrics["global/loss"] == pytest.approx(float(F.cross_entropy(logits, test.y)), rel=1e-5)
    hits = int((logits.argmax(1) == test.y).sum())
    assert metrics["global/accuracy"] == pytest.approx(hits / 23, abs=1e-6)


class Macro(Score):
    """Logs a macro F1, which over a whole set is not the mean over its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.f1 = MulticlassF1Score(CLIENTS, average="macro")

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.f1.update(*self.guess(*batch))
        self.log("f1", self.f1)

    @staticmethod
    def guess(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(x[:, 0] > 0.4, y, 0), y


@pytest.mark.parametrize("eval_batch_size", [2, 13])
def test_a_metric_object_sees_the_whole_global_test_set(eval_batch_size: int) -> None:
    data = scored(VALUES, eval_batch_size=eval_batch_size)
    fleet = fleet_of([ClientGroup(CLIENTS, Macro)], FedAvg(), data)
    metrics, _ = evaluate(fleet, kinds=("global",))
    test = data.dataset.load("test")
    whole = multiclass_f1_score(*Macro.guess(test.x, test.y), CLIENTS, average="macro")
    assert metrics["global/f1"] == pytest.approx(float(whole), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "worst"),
    [
        ("accuracy", 1.0), ("rmse", 3.0), ("val/nll", 3.0), ("val/ppl", 3.0), ("top1_err", 3.0),
        ("overridden", 1.0), ("kled", 1.0),
    ],
)  # fmt: skip
def test_the_worst_clients_of_an_error_have_the_largest(name: str, worst: float) -> None:
    reports = [Report(k, 1, metrics={name: value}) for k, value in enumerate([2.0, 1.0, 3.0])]
    assert client_metrics(reports, "personal")[f"personal/{name}_worst10"] == worst


def test_a_client_whose_metric_is_nan_is_not_left_out_of_the_worst() -> None:
    for name in ("auroc", "rmse"):
        reports = [Report(k, 1, metrics={name: v}) for k, v in enumerate([2.0, math.nan, 3.0])]
        assert math.isnan(client_metrics(reports, "personal")[f"personal/{name}_worst10"])


class Unsaid(FedAvg):
    """It does not say what clients test."""

    holds = ""


class Kept(Standalone):
    holds = ""


@pytest.mark.parametrize(
    ("algorithm", "said"), [(Unsaid, "the server's model"), (Kept, "the model that it keeps")]
)
def test_only_a_client_that_tests_its_row_is_said_to_keep_the_model(
    algorithm: type[Algorithm], said: str, tmp_path: Path
) -> None:
    model = Federation(algorithm(), [ClientGroup(2, Score)], optimizer=partial(SGD, lr=0.1))
    trainer = fit(model, random_data([9, 14]), tmp_path)
    assert environment(model.fleet, trainer, evaluation=model.evaluation)["personal"] == said


def test_weighted_means_leave_out_what_a_report_does_not_have() -> None:
    reports = [
        Report(0, 2, metrics={"loss": 1.0, "accuracy": 0.5}),
        Report(1, 6, metrics={"loss": 3.0}),
        Report(2, 0, metrics={"accuracy": 9.0, "never": 1.0}),
    ]
    assert weighted_means(reports) == {"loss": 2.5, "accuracy": 0.5}
    assert weighted_means([]) == {}


def test_what_a_module_draws_does_not_depend_on_what_was_drawn_before() -> None:
    data = random_data([6, 5, 7])
    fleet = fleet_of([ClientGroup(3, Noisy)], FedAvg(), data)
    first, _ = evaluate(fleet)
    torch.rand(3)
    assert evaluate(fleet)[0] == first
    _, reports = evaluate(fleet, kinds=("personal",), clients=1)
    chosen = reports[0].client
    assert reports[0].metrics == evaluate(fleet)[1][chosen].metrics


def test_a_report_says_what_a_client_keeps() -> None:
    data = random_data([6, 5])
    parameters = 4 * 3 + 3
    for algorithm, stored in ((FedAvg(), 0), (Standalone(), 4 * parameters)):
        fleet = fleet_of([ClientGroup(2, Noisy)], algorithm, data)
        assert [report.stored for report in evaluate(fleet)[1]] == [stored] * 2
