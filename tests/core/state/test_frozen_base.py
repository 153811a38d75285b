"""Frozen parameters: one copy on a rank, in no row, sent by nobody."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.state.frozen_base import FrozenBase
from lightfed.state.rows import LiveModule, ModelLayout
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import UserError
from tests.small import fit, fleet_of, random_data, run_round

FEATURES = 4
WIDE = 64
CLASSES = 3

# The samples of the clients.
SIZES = [10, 7, 12]


class Net(nn.Module):
    """A frozen body, drawn by `seed`, and two trained layers with `middle` units between."""

    def __init__(self, num_classes: int = CLASSES, seed: int = 0, middle: int = 5) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.Linear(FEATURES, WIDE).requires_grad_(False)
        self.middle = nn.Linear(WIDE, middle)
        self.head = nn.Linear(middle, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.body(x).relu()))


def live_of(module: nn.Module) -> LiveModule:
    return LiveModule(module, ModelLayout.of(module))


def fleet_of_groups(algorithm: Any, groups: list[ClientGroup]) -> Fleet:
    clients = sum(group.count for group in groups)
    data = random_data(SIZES[:clients], batch_size=4)
    return fleet_of(groups, algorithm(), data, optimizer=partial(SGD, lr=0.1))


def fleet(algorithm: Any = FedAvg, model: Any = Net) -> Fleet:
    """Return a fleet of three clients with the same model."""
    return fleet_of_groups(algorithm, [ClientGroup(3, model)])


def test_groups_share_equal_tensors_of_one_name_only() -> None:
    base = FrozenBase()
    narrow = Net(middle=5)
    wide = Net(middle=7)
    other = Net(seed=1)
    for net in (narrow, wide, other):
        base.add_group(live_of(net))

    assert narrow.body.weight.data_ptr() == wide.body.weight.data_ptr()
    assert narrow.body.weight.data_ptr() != other.body.weight.data_ptr()
    assert base.bytes == 2 * 4 * (FEATURES * WIDE + WIDE)  # of two bodies, not of three
    assert "body.weight" in base.unlike(["a", "b", "c"])


def test_training_does_not_change_the_base() -> None:
    fed = fleet()
    body = fed.groups[0].module.get_submodule("net.body")
    body_before = body.weight.clone()
    server_before = fed.algorithm.model.floats.clone()

    run_round(fed, 0)

    assert torch.equal(body.weight, body_before)
    assert not torch.equal(fed.algorithm.model.floats, server_before)


def test_rows_bytes_and_flops_are_of_what_is_trained() -> None:
    fed = fleet()
    run_round(fed, 0)

    trained = WIDE * 5 + 5 + 5 * CLASSES + CLASSES
    assert fed.groups[0].layout.parameter_numel == trained
    totals = fed.ledger.totals
    assert totals[:, fed.ledger.UP].tolist() == [4 * trained] * 3
    assert totals[:, fed.ledger.DOWN].tolist() == [4 * trained] * 3

    forward_of_body = 2 * FEATURES * WIDE
    forward_of_rest = 2 * (WIDE * 5 + 5 * CLASSES)
    gradients_of_weights = forward_of_rest
    gradient_between_the_trained_layers = 2 * 5 * CLASSES
    step = (
        forward_of_body
        + forward_of_rest
        + gradients_of_weights
        + gradient_between_the_trained_layers
    )
    assert totals[:, fed.ledger.FLOPS].tolist() == pytest.approx([step * n for n in SIZES])


class Adding(FedAvg):
    """A method that changes the base."""

    base: ServerModel

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.base = fed.base.server_model([state.name for state in fed.groups], None)


def test_a_method_changes_the_base_of_all_clients_at_once() -> None:
    groups = [ClientGroup(1, Net), ClientGroup(1, partial(Net, middle=5))]
    fed = fleet_of_groups(Adding, groups)
    base = fed.algorithm.base

    base.layout.floats.views(base.floats)["net.body.bias"].add_(1.0)

    first, second = (state.module.net.body.bias for state in fed.groups)
    assert torch.equal(first, second)
    assert (first - Net().body.bias).tolist() == pytest.approx([1.0] * WIDE)
    assert "base.floats" in fed.algorithm.state_dict()


def test_a_base_that_differs_between_groups_cannot_be_changed() -> None:
    groups = [ClientGroup(1, Net), ClientGroup(1, partial(Net, seed=1))]
    with pytest.raises(UserError, match=r"model\.clients: .*body"):
        fleet_of_groups(Adding, groups)


def test_a_method_that_changes_the_base_needs_one() -> None:
    with pytest.raises(UserError, match=r"model\.clients: no frozen"):
        fleet(Adding, partial(nn.Linear, FEATURES, CLASSES))


def test_a_frozen_parameter_may_not_be_trained_later() -> None:
    fed = fleet(Standalone)
    net = fed.groups[0].module.net
    run_round(fed, 0)

    net.body.weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"model\.clients: net\.body\.weight"):
        run_round(fed, 1)

    # The other way round is no harm: the parameter stays in the row.
    net.body.weight.requires_grad_(False)
    net.head.bias.requires_grad_(False)
    run_round(fed, 2)


def federation(seed: int = 0, **settings: Any) -> Federation:
    groups = [ClientGroup(3, partial(Net, seed=seed))]
    return Federation(FedAvg(), groups, optimizer=partial(SGD, lr=0.1), **settings)


def data() -> FederatedDataModule:
    return random_data(SIZES, batch_size=4)


def test_a_run_resumes_on_its_own_base_only(tmp_path: Path) -> None:
    fit(federation(), data(), tmp_path, rounds=1)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    fit(federation(), data(), tmp_path / "same", rounds=2, ckpt_path=last)
    with pytest.raises(UserError, match=r"ckpt_path: .*net\.body\.weight"):
        fit(federation(seed=1), data(), tmp_path / "other", rounds=2, ckpt_path=last)


def test_exports_are_the_trained_tensors_and_the_base_once(tmp_path: Path) -> None:
    fit(federation(export=("server", "clients")), data(), tmp_path, rounds=1)
    folder = tmp_path / "run" / "models"
    base = load_file(folder / "base.safetensors")
    assert base.keys() == {"body.weight", "body.bias"}
    for name in ("server", "client0", "client2"):
        trained = load_file(folder / f"{name}.safetensors")
        assert not trained.keys() & base.keys()
        Net(seed=5).load_state_dict(base | trained)  # complete
