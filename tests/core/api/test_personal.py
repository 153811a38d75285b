"""Tensors that stay with their client, under methods that know nothing of them."""

from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightfed.aggregation.server_optimizers import FedAdam
from lightfed.algorithms.ditto import Ditto
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.cloudfedavg import CloudFedAvg
from lightfed.algorithms.fedbn import FedBN
from lightfed.algorithms.feddyn import FedDyn
from lightfed.algorithms.fednova import FedNova
from lightfed.algorithms.fedper import FedPer
from lightfed.algorithms.fedprox import FedProx
from lightfed.algorithms.peers.dpsgd import DPSGD
from lightfed.algorithms.pfedmoe.pfedmoe import PFedMoE
from lightfed.algorithms.qffl import QFFL
from lightfed.algorithms.scaffold import SCAFFOLD
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.topology.topology import Ring
from lightfed.algorithms.width.fedrolex import FedRolex
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import RoundPlan
from lightfed.networks.cnn import Conv
from lightfed.networks.mlp import MLP
from lightfed.testing.case import images as drawn_images
from lightfed.utils.errors import UserError
from tests.small import fleet_of, has_global_model, random_data, row_held, run_round

SIZES = [12, 9, 15]
DECAYS = partial(SGD, lr=0.5, momentum=0.9, weight_decay=0.1)


class Apart(L.LightningModule):
    """Two models that know nothing of each other, one of which is the client's own."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.body = nn.Linear(4, 3), nn.Linear(4, 3)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy
        return loss(self.body(x), y) + loss(self.own(x), y)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.own(x)


def fleet(algorithm: Any, model: Any = Apart, sizes: Any = SIZES, **settings: Any) -> Fleet:
    data = random_data(sizes, batch_size=4)
    optimizer = settings.pop("optimizer", partial(SGD, lr=0.1, momentum=0.5))
    made = fleet_of(
        [ClientGroup(len(sizes), model)], algorithm, data, optimizer=optimizer, **settings
    )
    made.plan = RoundPlan(lr=0.1)
    return made


def part(fleet: Fleet, row: Tensor, name: str) -> Tensor:
    return fleet.groups[0].layout.floats.views(row)[name]


@pytest.mark.parametrize("side_by_side", ["off", 3])
@pytest.mark.parametrize(
    ("algorithm", "step"),
    [
        (FedAvg, DECAYS), (FedAvg, FedAdam), (partial(FedProx, 0.5), None), (SCAFFOLD, None),
        (partial(FedDyn, 0.1), None), (FedNova, DECAYS), (partial(FedNova, 0.3), None),
    ],
)  # fmt: skip
def test_a_part_of_its_own_trains_as_if_alone(algorithm: Any, step: Any, side_by_side: Any) -> None:
    made = fleet(algorithm(), server_optimizer=step, personal=["own."], side_by_side=side_by_side)
    alone = fleet(Standalone(), side_by_side=side_by_side)
    for t in range(3):
        run_round(made, t)
        run_round(alone, t)
    model: Any = made.algorithm.model
    for name in ("own.weight", "own.bias"):
        start = part(made, made.groups[0].initial.floats, name)
        assert torch.equal(part(made, model.floats, name), start)
        for client in range(3):
            trained = part(made, made.row(client).floats, name)
            assert torch.equal(trained, part(alone, alone.row(client).floats, name))
            assert not torch.equal(trained, start)
    for client in range(3):
        held = row_held(made, client)[1].floats
        assert torch.equal(part(made, held, "body.bias"), part(made, model.floats, "body.bias"))
        assert torch.equal(
            part(made, held, "own.bias"), part(made, made.row(client).floats, "own.bias")
        )
    assert not has_global_model(made)


def test_clients_send_and_receive_the_rest() -> None:
    made = fleet(SCAFFOLD(), personal=["own."])
    sent = run_round(made, 0)
    assert sent["bytes_up"] == sent["bytes_down"] == 3 * 2 * 4 * 15  # a body, and a control
    plain = fleet(SCAFFOLD())
    assert run_round(plain, 0)["bytes_up"] == 3 * 2 * 4 * 30


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("one", "other", "personal"),
    [
        (FedAvg, FedAvg, []),
        (partial(FedPer, "net.3"), FedAvg, ["net.3"]),
        (FedBN, partial(FedAvg, "uniform"), ["norms"]),
        (partial(FedPer, "net.3"), partial(FedPer, "net.3"), ["net.3"]),
    ],
)
def test_a_preset_is_federated_averaging(one: Any, other: Any, personal: list[str]) -> None:
    fleets = [fleet(one(), net), fleet(other(), net, personal=personal)]
    costs = [[run_round(made, t) for t in range(3)] for made in fleets]
    assert costs[0] == costs[1]
    for client in range(3):
        rows = [row_held(made, client)[1].floats for made in fleets]
        assert torch.equal(*rows)


def test_what_a_method_keeps_is_kept_besides() -> None:
    made = fleet(FedBN(), net, personal=["net.3"])
    views = made.groups[0].layout.floats.views(made.groups[0].initial.floats)
    assert made.personal == {name for name in views if not name.startswith("net.0")} | {
        "net.1.num_batches_tracked"
    }


@pytest.mark.parametrize(
    ("algorithm", "model", "personal"),
    [
        (partial(DPSGD, Ring()), net, ["norms"]),
        (Ditto, net, ["norms"]),
        (Standalone, net, ["norms"]),
        (partial(QFFL, 1.0, 10.0), net, ["norms"]),
        (partial(CloudFedAvg, 3, 1), net, ["norms"]),
        (partial(PFedMoE, net), net, ["norms"]),
        (FedAvg, net, ["net.9"]),
        (FedAvg, partial(MLP, hidden=(4,)), ["norms"]),
        (FedAvg, net, ["net."]),
    ],
)
def test_what_makes_no_sense_is_refused(algorithm: Any, model: Any, personal: list[str]) -> None:
    with pytest.raises(UserError) as error:
        fleet(algorithm(), model, personal=personal)
    assert error.value.key == "model.personal"


def images(algorithm: Any) -> Fleet:
    groups = [ClientGroup(2, partial(Conv, hidden=(4, 4)), level=level) for level in ("a", "b")]
    return fleet_of(groups, algorithm, drawn_images(), personal=["norms"])


def test_a_client_whose_shape_or_units_change_keeps_nothing() -> None:
    with pytest.raises(UserError) as error:
        images(FedRolex())
    assert error.value.key == "model.personal"
    made = images(HeteroFL("dynamic"))
    with pytest.raises(UserError):
        run_round(made, 0)


def test_rows_are_saved_in_their_own_types() -> None:
    """A wider type would have the same values, and a checkpoint twice the size."""
    fed = fleet(Ditto())
    run_round(fed, 0)

    saved = fed.client_rows.saved()

    (floats,) = saved["floats"]
    assert floats["values"].dtype == torch.float32
    assert floats["clients"].tolist() == [0, 1, 2]
    for client, values in enumerate(floats["values"]):
        assert torch.equal(values, fed.row(client).floats)
    for block in saved["integers"]:
        assert block["values"].dtype == torch.int64
