"""Penalties under methods that know nothing of them, a user's own one, and what is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.depth.depthfl import DepthFL
from lightfed.algorithms.depth.networks import DepthConv
from lightfed.algorithms.ditto import Ditto
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.cloudfedavg import CloudFedAvg
from lightfed.algorithms.feddyn import FedDyn
from lightfed.algorithms.fednova import FedNova
from lightfed.algorithms.fedprox import FedProx
from lightfed.algorithms.lora.feddpa import FedDPA
from lightfed.algorithms.lora.fedexlora import FedExLoRA
from lightfed.algorithms.lora.fedmomentum import FedMomentum
from lightfed.algorithms.lora.fedrotlora import FedRotLoRA
from lightfed.algorithms.lora.fedsvd import FedSVD
from lightfed.algorithms.lora.flexlora import FlexLoRA
from lightfed.algorithms.lora.flora import FLoRA
from lightfed.algorithms.lora.hetlora import HetLoRA
from lightfed.algorithms.lora.rankmean import RankMean
from lightfed.algorithms.lora.ravan import RAVAN
from lightfed.algorithms.moon import MOON, Contrast
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.peers.dpsgd import DPSGD
from lightfed.algorithms.peers.my1 import My1
from lightfed.algorithms.peers.my2 import My2
from lightfed.algorithms.pfedmoe.pfedmoe import PFedMoE
from lightfed.algorithms.scaffold import SCAFFOLD
from lightfed.algorithms.topology.topology import Ring
from lightfed.algorithms.width.fedrolex import FedRolex
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import LocalPenalty, SessionContext
from lightfed.local.local_work import RoundPlan
from lightfed.local.penalties import LinearTerm, Pull
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.algorithms.lora.low_rank import NAMES, Adapted
from tests.small import fleet_of, random_data, run_round

mlp = partial(MLP, hidden=(6,))


class Held(LocalPenalty):
    """A user's pull."""

    side_by_side = True

    def __init__(self, mu: float) -> None:
        self.mu = mu

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        gradient.add_(s.parameters - s.received, alpha=self.mu)


def adapted() -> nn.Module:
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))
    return nn.Sequential(Adapted(weight, 2, 0.5), nn.Linear(6, 3))


def rows(
    algorithm: Any, penalty: Any = None, model: Any = mlp, levels: str = "", **settings: Any
) -> list[Tensor]:
    """What clients hold after some rounds."""
    sizes = [12, 9, 15, 8]
    groups = [ClientGroup(4, model)]
    if levels:
        groups = [ClientGroup(4 // len(levels), model, level=level) for level in levels]  # type: ignore[arg-type]
    settings = {"epochs": 2} | settings
    fed = fleet_of(
        groups, algorithm, random_data(sizes, batch_size=4), local_penalty=penalty,
        optimizer=partial(SGD, lr=0.1, momentum=0.5), clients_per_round=3, **settings,
    )  # fmt: skip
    fed.plan = RoundPlan(lr=0.1)
    for t in range(2):
        run_round(fed, t)
    return [fed.deployed(k).row(k).floats.clone() for k in range(4)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


METHODS: dict[str, tuple[Any, Any, str, Any]] = {
    "fedavg": (FedAvg, mlp, "", 2),
    "heterofl": (HeteroFL, mlp, "ab", 2),
    "scaffold": (SCAFFOLD, mlp, "", "off"),
    "fednova": (FedNova, mlp, "", 2),
    "feddyn": (partial(FedDyn, 0.1), mlp, "", "off"),
    "rankmean": (partial(RankMean, adapters=NAMES), adapted, "", "off"),
    "pfedmoe": (partial(PFedMoE, mlp), mlp, "", "off"),
    "dpsgd": (partial(DPSGD, Ring()), mlp, "", 2),
}


@pytest.mark.parametrize(("make", "model", "levels", "side_by_side"), METHODS.values(), ids=METHODS)
def test_a_pull_begins_at_the_start_of_a_session(
    make: Any, model: Any, levels: str, side_by_side: Any
) -> None:
    """So it does nothing to a session of one step, and something to a longer one."""
    for steps, alike in ((1, True), (3, False)):
        work = {"epochs": 1, "steps": steps, "side_by_side": side_by_side}
        plain, pulled, own = (
            rows(make(), penalty, model, levels, **work) for penalty in (None, Pull(0.5), Held(0.5))
        )
        assert same(plain, pulled) == alike
        if make is not FedNova:  # it knows the lengths that a pull gives
            torch.testing.assert_close(own, pulled)


@pytest.mark.parametrize(
    ("preset", "method", "penalty"),
    [
        (partial(FedProx, 0.5), FedAvg, partial(Pull, 0.5)),
        (FedAvg, FedAvg, partial(Pull, 0.0)),
        (partial(FedNova, 0.5), FedNova, partial(Pull, 0.5)),
        (partial(MOON, 5.0, pool=2), FedAvg, partial(Contrast, 5.0, pool=2)),
    ],
)
def test_a_preset_is_a_method_with_a_penalty(preset: Any, method: Any, penalty: Any) -> None:
    found = rows(preset())
    assert same(found, rows(method(), penalty()))
    if preset is not FedAvg:
        assert not same(found, rows(method()))


def test_a_linear_term_goes_with_any_server() -> None:
    """Clients are those of FedDyn: its server adds the memories, which FedAvg does not."""
    found = rows(FedAvg("uniform"), LinearTerm(0.5))
    assert not same(found, rows(FedDyn(0.5)))
    assert not same(found, rows(FedAvg("uniform"), Pull(0.5)))


def test_a_contrast_goes_with_slices_whose_logits_are_not_masked() -> None:
    plain, contrasted = (
        rows(HeteroFL(mask=False), penalty, levels="ab") for penalty in (None, Contrast(5.0))
    )
    assert not same(plain, contrasted)


@pytest.mark.parametrize(
    ("algorithm", "penalty"),
    [
        (Ditto, partial(Pull, 0.5)),
        (partial(FedProx, 0.5), partial(Pull, 0.5)),
        (partial(CloudFedAvg, 4, 1, mu=0.1), partial(Pull, 0.5)),
        (HeteroFL, Contrast),
        (MOON, Contrast),
        (partial(PFedMoE, mlp), Contrast),
        (partial(HeteroFL, "dynamic", mask=False), Contrast),
    ],
)
def test_what_makes_no_sense_is_refused(algorithm: Any, penalty: Any) -> None:
    with pytest.raises(UserError) as error:
        rows(algorithm(), penalty())
    assert error.value.key in ("model.local_penalty", "model.algorithm")


MOVING: dict[str, tuple[Any, Any]] = {
    "ditto": (Ditto, mlp),
    "dispfl": (lambda: DisPFL(Ring(), rounds=3), mlp),
    "my1": (lambda: My1(Ring(), rounds=3), mlp),
    "my2": (lambda: My2(Ring(), rounds=3), mlp),
    "feddpa": (partial(FedDPA, adapters=NAMES), adapted),
    "fedexlora": (partial(FedExLoRA, adapters=NAMES), adapted),
    "fedmomentum": (partial(FedMomentum, adapters=NAMES), adapted),
    "fedrotlora": (partial(FedRotLoRA, adapters=NAMES), adapted),
    "fedsvd": (partial(FedSVD, adapters=NAMES), adapted),
    "flexlora": (partial(FlexLoRA, adapters=NAMES), adapted),
    "flora": (partial(FLoRA, adapters=NAMES), adapted),
    "hetlora": (partial(HetLoRA, gamma=0.5, adapters=NAMES), adapted),
    "ravan": (partial(RAVAN, adapters=NAMES), adapted),
    "fedrolex": (partial(FedRolex, mask=False), mlp),
}


@pytest.mark.parametrize("penalty", [LinearTerm, Contrast])
@pytest.mark.parametrize("name", MOVING)
def test_memories_of_parameters_that_change_places_are_refused(name: str, penalty: Any) -> None:
    algorithm, model = MOVING[name]
    with pytest.raises(UserError, match=r"LinearTerm|Contrast") as error:
        rows(algorithm(), penalty(), model)
    assert error.value.key == "model.local_penalty"


@pytest.mark.parametrize("algorithm", [FedDyn, DepthFL])
def test_a_second_memory_of_the_same_kind_is_refused(algorithm: Any) -> None:
    with pytest.raises(UserError, match="LinearTerm") as error:
        rows(algorithm(), LinearTerm(), partial(DepthConv, channels=(4, 4), pools=1))
    assert error.value.key == "model.local_penalty"


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [(Pull, {"mu": -1.0}), (LinearTerm, {"alpha": 0.0}), (Contrast, {"temperature": 0.0})],
)
def test_wrong_arguments_are_refused(kind: Any, wrong: dict[str, float]) -> None:
    with pytest.raises(UserError) as error:
        kind(**wrong)
    assert error.value.key == f"model.local_penalty.init_args.{next(iter(wrong))}"


def test_a_client_keeps_what_a_penalty_needs() -> None:
    def made(penalty: Any) -> Fleet:
        return fleet_of([ClientGroup(2, mlp)], FedAvg(), random_data([4, 4]), local_penalty=penalty)

    assert made(Contrast()).stateful
    assert not made(Pull(0.1)).stateful
