"""Figures of a session after which nothing is kept, against sessions made by hand."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.cloudfedavg import CloudFedAvg
from lightfed.algorithms.fedprox import FedProx
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.algorithms.peers.dpsgd import DPSGD
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.topology.topology import Ring
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.algorithm import Algorithm
from lightfed.data.datamodule import FederatedDataModule
from lightfed.engine.evaluation import KINDS, Evaluation
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.trainer import FederatedTrainer
from lightfed.utils.errors import UserError
from lightfed.utils.rng import torch_generator
from tests.core.engine.spy import (
    data,
    evaluated,
    federation,
    lr_schedule,
    state_of,
    two_labels_each,
)
from tests.small import fit, fleet_of, random_data, row_held, run_round, state_dict

LR, MOMENTUM, EPOCHS = 0.2, 0.9, 2
SIZES = [10, 6, 12, 7]
mlp = partial(MLP, hidden=(6,))


class Normed(nn.Module):
    """With statistics, which a session changes and an evaluation does not."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, num_classes)
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def session_by_hand(
    net: nn.Module, source: FederatedDataModule, client: int, *, mu: float, masked: bool
) -> tuple[float, float]:
    """Accuracy and loss of a client on its test split, after SGD from what `net` holds."""
    absent = torch.ones(3, dtype=torch.bool)
    absent[source.labels(client)] = False
    absent &= masked
    received = [p.detach().clone() for p in net.parameters()]
    optimizer = SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    order = torch_generator(0, "finetune-order", -1, client)
    net.train()
    for _ in range(EPOCHS):
        for x, y in source.batches(source.train_plan(client, order=order, augment=None)):
            loss = F.cross_entropy(net(x).masked_fill(absent, 0.0), y)
            far = sum(((p - r) ** 2).sum() for p, r in zip(net.parameters(), received, strict=True))
            optimizer.zero_grad()
            (loss + mu / 2 * far).backward()
            optimizer.step()
    net.eval()
    batches = list(source.test_batches(client))
    x, y = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
    logits = net(x).detach().masked_fill(absent, 0.0)
    return float((logits.argmax(1) == y).float().mean()), float(F.cross_entropy(logits, y))


CASES: dict[str, tuple[Callable[[], Algorithm], list[Any], bool]] = {
    "fedavg": (FedAvg, [ClientGroup(4, mlp)], False),
    "fedavg_statistics": (FedAvg, [ClientGroup(4, Normed)], False),
    "fedprox": (partial(FedProx, mu=0.7), [ClientGroup(4, mlp)], False),
    "heterofl": (HeteroFL, [ClientGroup(1, mlp, level="a"), ClientGroup(2, mlp, level="b")], True),
    "heterofl_dynamic": (
        partial(HeteroFL, "dynamic"), [ClientGroup(1, mlp, level="a"), ClientGroup(2, mlp,
        level="b")], True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "groups", "masked"), CASES.values(), ids=CASES)
def test_figures_are_those_of_sessions_from_what_the_server_has(
    make: Callable[[], Algorithm], groups: list[ClientGroup], masked: bool
) -> None:
    source = two_labels_each() if masked else random_data(SIZES, batch_size=4, eval_batch_size=5)
    optimizer = partial(SGD, lr=LR, momentum=MOMENTUM)
    fed = fleet_of(groups, make(), source, optimizer=optimizer, epochs=EPOCHS)
    for t in range(2):
        run_round(fed, t)
    mu = 0.7 if isinstance(fed.algorithm, FedProx) else 0.0
    expected = []
    for client in range(fed.clients):
        layout, row = row_held(fed, client)
        group = groups[fed.home_group(client)]
        net = group.build(source, position=0, seed=0).net
        assert isinstance(net, nn.Module)
        net.load_state_dict(state_dict(layout, row))
        expected.append(session_by_hand(net, source, client, mu=mu, masked=masked))
    figures = evaluated(fed, kinds=KINDS).finish()[0]
    accuracies, losses = np.array(expected).T
    assert figures["finetuned/accuracy"] == pytest.approx(accuracies.mean(), abs=1e-6)
    assert figures["finetuned/accuracy_std"] == pytest.approx(accuracies.std(), abs=1e-6)
    assert figures["finetuned/accuracy_worst10"] == pytest.approx(accuracies.min(), abs=1e-6)
    assert figures["finetuned/loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert abs(figures["finetuned/loss"] - figures["personal/loss"]) > 0.02
    assert evaluated(fed, kinds=KINDS).finish()[0] == figures


@pytest.mark.parametrize("store", ["device", "host"])
def test_nothing_of_it_survives(store: str, tmp_path: Path) -> None:
    """Dropout and momentum, three rounds: a run that looks is one that does not."""
    plain = federation(evaluate=("global", "personal"))
    looking = federation(evaluate=KINDS, store=store)
    before = fit(plain, data(), tmp_path / "plain", rounds=3).callback_metrics
    after = fit(looking, data(), tmp_path / "looking", rounds=3).callback_metrics
    assert state_of(looking) == state_of(plain)
    assert {k: v for k, v in after.items() if not k.startswith(("finetuned", "trained"))} == before
    assert after["finetuned/loss"] != after["personal/loss"]
    assert looking.fleet.metrics.keys() == plain.fleet.metrics.keys()


def test_the_steps_of_a_rounds_sessions_are_not_those_of_an_evaluation() -> None:
    """Some clients were in the round, whose sessions are of one step; figures are as of none."""
    source, trained = random_data(SIZES, batch_size=2), CloudFedAvg(2, 1, steps=(1, 1))
    fed = fleet_of([ClientGroup(4, mlp)], trained, source)
    run_round(fed, 0)
    loaded = CloudFedAvg(2, 1, steps=(1, 1))
    other = fleet_of([ClientGroup(4, mlp)], loaded, random_data(SIZES, batch_size=2))
    loaded.load_state_dict(trained.state_dict())
    one, alike = (evaluated(each, kinds=KINDS).finish()[0] for each in (fed, other))
    assert one == alike


@pytest.mark.parametrize("make", [Standalone, partial(LGFedAvg, 1), partial(DPSGD, Ring())])
def test_clients_that_keep_rows_are_refused(make: Callable[[], Algorithm]) -> None:
    source = random_data(SIZES)
    fed = fleet_of([ClientGroup(4, mlp)], make(), source)
    with pytest.raises(UserError, match=r"model\.evaluate: finetuned, but clients of"):
        Evaluation(fed, source, kinds=("finetuned",), clients=None)
    Evaluation(fed, source, kinds=("global", "personal"), clients=None)


def test_mixed_precision_trains_it_too(tmp_path: Path) -> None:
    found = []
    for precision in ("32", "bf16-mixed"):
        model = federation(evaluate=KINDS)
        trainer = fit(model, data(), tmp_path / precision, rounds=1, precision=precision)
        found.append({k: float(v) for k, v in trainer.callback_metrics.items()})
    full, mixed = found
    assert abs(full["finetuned/loss"] - full["personal/loss"]) > 0.03
    assert mixed["finetuned/loss"] == pytest.approx(full["finetuned/loss"], abs=0.01)


def test_a_checkpoint_is_evaluated_at_the_rate_of_its_round(tmp_path: Path) -> None:
    """By `validate`, and by a run that was stopped while it validated."""
    settings: dict[str, Any] = {"evaluate": KINDS, "lr_schedule": lr_schedule}
    keep = ModelCheckpoint(
        monitor="step", mode="max", save_top_k=-1, filename="{epoch}", save_on_train_epoch_end=False
    )
    trainer = fit(federation(**settings), data(), tmp_path, rounds=3, callbacks=[keep])
    expected = trainer.callback_metrics
    folder = tmp_path / "run" / "checkpoints"
    validator = FederatedTrainer(accelerator="cpu", enable_progress_bar=False, logger=False)
    (found,) = validator.validate(
        federation(**settings), datamodule=data(), ckpt_path=folder / "epoch=2.ckpt", verbose=False
    )
    assert found == pytest.approx({k: float(expected[k]) for k in found}, rel=1e-6)
    assert "finetuned/loss" in found
    resumed = fit(
        federation(**settings), data(), tmp_path, rounds=3, ckpt_path=folder / "epoch=2.ckpt"
    )
    assert resumed.callback_metrics == expected
