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

FEATURES, WIDE, CLASSES = 4, 64, 3


class Net(nn.Module):
    """A frozen body, drawn by `seed`, and a trained head with some rows more or fewer between."""

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


def fleet(algorithm: Any = FedAvg, *models: Any, **settings: Any) -> Fleet:
    data = random_data([10, 7, 12][: 3 if len(models) < 2 else len(models)], batch_size=4)
    counts = [3] if len(models) < 2 else [1] * len(models)
    groups = [ClientGroup(n, m) for n, m in zip(counts, models or [Net], strict=True)]
    return fleet_of(groups, algorithm(), data, optimizer=partial(SGD, lr=0.1), **settings)


def test_groups_share_equal_tensors_of_one_name_only() -> None:
    base, nets = FrozenBase(), [Net(middle=5), Net(middle=7), Net(seed=1)]
    for net in nets:
        base.add_group(live_of(net))
    assert nets[0].body.weight.data_ptr() == nets[1].body.weight.data_ptr()
    assert nets[0].body.weight.data_ptr() != nets[2].body.weight.data_ptr()
    assert base.bytes == 2 * 4 * (FEATURES * WIDE + WIDE)
    assert "body.weight" in base.unlike(["a", "b", "c"])


def test_the_base_stays_and_rows_bytes_and_flops_are_of_what_is_trained() -> None:
    fed = fleet()
    body = fed.groups[0].module.get_submodule("net.body")
    before = body.weight.clone(), fed.algorithm.model.floats.clone()
    run_round(fed, 0)
    assert torch.equal(body.weight, before[0])
    assert not torch.equal(fed.algorithm.model.floats, before[1])
    trained = WIDE * 5 + 5 + 5 * CLASSES + CLASSES
    assert fed.groups[0].layout.parameter_numel == trained
    assert fed.ledger.totals[:, :2].tolist() == [[4 * trained] * 2] * 3
    base, rest = 2 * FEATURES * WIDE, 2 * (WIDE * 5 + 5 * CLASSES)
    # Forward; the gradients of the weights; that of what the first trained layer gives to the next.
    step = base + rest + rest + 2 * 5 * CLASSES
    assert fed.ledger.totals[:, 2].tolist() == pytest.approx([step * n for n in (10, 7, 12)])


def test_a_method_changes_the_base_of_all_clients_at_once() -> None:
    class Adding(FedAvg):
        base: ServerModel

        @override
        def setup(self, fed: Fleet) -> None:
            super().setup(fed)
            self.base = fed.base.server_model([state.name for state in fed.groups], None)

    fed = fleet(Adding, Net, partial(Net, middle=5))
    base = fed.algorithm.base
    base.layout.floats.views(base.floats)["net.body.bias"].add_(1.0)
    assert torch.equal(fed.groups[0].module.net.body.bias, fed.groups[1].module.net.body.bias)
    assert (fed.groups[0].module.net.body.bias - Net().body.bias).tolist() == pytest.approx(
        [1.0] * WIDE
    )
    assert "base.floats" in fed.algorithm.state_dict()
    with pytest.raises(UserError, match=r"model\.clients: .*body"):
        fleet(Adding, Net, partial(Net, seed=1))
    with pytest.raises(UserError, match=r"model\.clients: no frozen"):
        fleet(Adding, partial(nn.Linear, FEATURES, CLASSES))


def test_a_frozen_parameter_may_not_be_trained_later() -> None:
    fed = fleet(Standalone)
    run_round(fed, 0)
    fed.groups[0].module.net.body.weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"model\.clients: net\.body\.weight"):
        run_round(fed, 1)
    fed.groups[0].module.net.body.weight.requires_grad_(False)
    fed.groups[0].module.net.head.bias.requires_grad_(False)
    run_round(fed, 2)


def federation(seed: int = 0, **settings: Any) -> Federation:
    groups = [ClientGroup(3, partial(Net, seed=seed))]
    return Federation(FedAvg(), groups, optimizer=partial(SGD, lr=0.1), **settings)


def data() -> FederatedDataModule:
    return random_data([10, 7, 12], batch_size=4)


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
        own = load_file(folder / f"{name}.safetensors")
        assert not own.keys() & base.keys()
        Net(seed=5).load_state_dict(base | own)
