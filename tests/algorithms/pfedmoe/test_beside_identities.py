"""What pFedMoE and its baselines are where a part of them is switched off."""

from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.pfedmoe import mutual
from lightfed.algorithms.pfedmoe.fedkd import FedKD
from lightfed.algorithms.pfedmoe.mixture import FixedGate, MixtureClient
from lightfed.algorithms.pfedmoe.personal_shared import PersonalShared
from lightfed.algorithms.pfedmoe.pfedmoe import PFedMoE
from lightfed.algorithms.prototypes.fedproto import FedProto
from lightfed.algorithms.standalone import Standalone
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.models.build import DataSpec, blank
from lightfed.models.split import split
from lightfed.networks.mlp import MLP
from tests.core.models.client_cases import drawn
from tests.small import fleet_of, module_of, random_data, run_round

SIZES = [9, 6, 12, 8]
FEATURES, CLASSES = 6, 3
large, larger, small = (partial(MLP, hidden=hidden) for hidden in ((16, 6), (20, 6), (6,)))


class Experts(nn.Module):
    """An extractor of its own below a head that all have, and that never learns."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.extractor = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, FEATURES))
        self.head = drawn(nn.Linear(FEATURES, CLASSES), seed=5).requires_grad_(False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.extractor(x))


class FixedMoE(PFedMoE):
    """A gate that gives all weight to one of the experts."""

    def __init__(self, shared: Any, general: float) -> None:
        super().__init__(shared)
        self.general = general

    @override
    def composite(self, private: nn.Module, shared: nn.Module, data: DataSpec) -> nn.Module:
        mixture = super().composite(private, shared, data)
        assert isinstance(mixture, MixtureClient)
        mixture.gate = FixedGate(self.general)
        return mixture


def fleet(algorithm: Algorithm, *models: Any, **settings: Any) -> Fleet:
    each = len(SIZES) // len(models)
    groups = [ClientGroup(each, model) for model in models]
    data = random_data(SIZES, batch_size=3)
    return fleet_of(groups, algorithm, data, optimizer=partial(SGD, lr=0.1), **settings)


def tensors(fed: Fleet, client: int, prefix: str) -> list[Tensor]:
    views = fed.state(client).layout.floats.views(fed.row(client).floats)
    return [view for name, view in views.items() if name.startswith(prefix)]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert one
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_a_gate_fixed_to_the_private_expert_is_standalone() -> None:
    mixed, alone = fleet(FixedMoE(small, 0.0), large, larger), fleet(Standalone(), large, larger)
    start = [tensors(mixed, k, "net.head.")[0].clone() for k in range(len(SIZES))]
    for t in range(2):
        run_round(mixed, t)
        run_round(alone, t)
    for client in range(len(SIZES)):
        found = tensors(mixed, client, "net.extractor.") + tensors(mixed, client, "net.head.")
        assert_same(found, tensors(alone, client, "net."))
        assert not torch.equal(tensors(mixed, client, "net.head.")[0], start[client])


@pytest.mark.parametrize("work", [{}, {"clients_per_round": 2}])
def test_a_gate_fixed_to_the_shared_expert_below_one_frozen_head_is_fedavg(work: Any) -> None:
    """By samples, on the small extractor."""
    little = partial(Experts, 4)
    mixed = fleet(FixedMoE(little, 1.0), partial(Experts, 9), partial(Experts, 7), **work)
    plain = fleet(FedAvg(), little, **work)
    assert isinstance(mixed.algorithm, PFedMoE)
    assert isinstance(plain.algorithm, FedAvg)
    ours, theirs = mixed.algorithm.model, plain.algorithm.model
    views = theirs.layout.floats.views(theirs.floats)
    for name, value in ours.layout.floats.views(ours.floats).items():
        views[name.replace("net.shared.", "net.extractor.")].copy_(value)
    start = ours.floats.clone()
    for t in range(2):
        run_round(mixed, t)
        run_round(plain, t)
    found = list(ours.layout.floats.views(ours.floats).values())
    assert_same(found, [v for name, v in views.items() if ".extractor." in name])
    assert not torch.allclose(ours.floats, start, atol=1e-3)


class Mixed(Standalone):
    """Clients of pFedMoE, alone."""

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        PFedMoE(small).prepare_module(module, data)


def test_without_exchange_it_is_standalone_on_the_mixture() -> None:
    moe = fleet(PFedMoE(small, federate=False), large, larger, clients_per_round=3)
    alone = fleet(Mixed(), large, larger, clients_per_round=3)
    for t in range(2):
        assert run_round(moe, t) == run_round(alone, t)
    assert not moe.ledger.totals[:, [moe.ledger.UP, moe.ledger.DOWN]].any()
    for client in range(len(SIZES)):
        assert torch.equal(moe.row(client).floats, alone.row(client).floats)


def test_a_gate_of_one_half_is_fixed_and_has_nothing_to_learn() -> None:
    halved = fleet(PFedMoE(small, gate="half"), large, larger)
    fixed = fleet(FixedMoE(small, 0.5), large, larger)
    for t in range(2):
        run_round(halved, t)
        run_round(fixed, t)
    assert not tensors(halved, 0, "net.gate.")
    for client in range(len(SIZES)):
        assert torch.equal(halved.row(client).floats, fixed.row(client).floats)


class Uncompressed(PersonalShared):
    """FedKD's clients, whose student travels as it is."""

    @override
    def composite(self, private: nn.Module, shared: nn.Module, data: DataSpec) -> nn.Module:
        batch = blank(data, samples=2)
        return mutual.FedKD(split(private, batch), split(shared, batch))


@pytest.mark.parametrize(("energy", "bound"), [(1.0, 0.0), (1 - 1e-12, 1e-5), (0.6, None)])
@pytest.mark.parametrize("compress", ["update", "parameters"])
def test_fedkd_with_all_its_energy_is_not_compressed(
    energy: float, bound: float | None, compress: Any
) -> None:
    algorithm = FedKD(large, (energy, energy), rounds=2, compress=compress)
    squeezed = fleet(algorithm, large, larger)
    plain = fleet(Uncompressed(large, "uniform"), large, larger)
    for t in range(2):
        run_round(squeezed, t)
        run_round(plain, t)
    assert isinstance(plain.algorithm, PersonalShared)
    gaps = [float((algorithm.model.floats - plain.algorithm.model.floats).abs().max())]
    for k in range(len(SIZES)):
        ours, theirs = (
            fed.state(k).layout.floats.views(fed.row(k).floats) for fed in (squeezed, plain)
        )
        own = [name for name in ours if "shared" not in name]  # the student is kept as received
        gaps += [float((ours[name] - theirs[name]).abs().max()) for name in own]
    assert max(gaps) > 1e-3 if bound is None else max(gaps) <= bound


def predictions(fed: Fleet, x: Tensor) -> list[Tensor]:
    found = []
    for client in range(len(SIZES)):
        module = module_of(fed, client)
        assert isinstance(module, L.LightningModule)
        with torch.no_grad():
            found.append(module.eval()(x))
    return found


@pytest.mark.parametrize(("inference", "same"), [("head", True), ("prototypes", False)])
def test_fedproto_without_prototypes_in_its_loss_and_head_inference_is_standalone(
    inference: Any, same: bool
) -> None:
    proto = fleet(FedProto(0.0, inference), large, larger)
    alone = fleet(Standalone(), large, larger)
    for t in range(2):
        run_round(proto, t)
        run_round(alone, t)
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(predictions(proto, x), predictions(alone, x), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5) == same
