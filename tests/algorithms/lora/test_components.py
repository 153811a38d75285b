"""Rules that decompose the mean product, or correct a factor towards it."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightfed.algorithms.lora.adapter_rule as rules
from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent
from lightfed.algorithms.lora.fedexlora import FedExLoRA
from lightfed.algorithms.lora.fedmomentum import FedMomentum
from lightfed.algorithms.lora.flexlora import FlexLoRA
from lightfed.algorithms.lora.flora import FLoRA
from lightfed.algorithms.lora.lorafair import LoRAFAIR
from lightfed.algorithms.lora.products import Product, components_of_energy
from lightfed.algorithms.lora.rankmean import RankMean
from lightfed.distributed.collectives import Ranks
from lightfed.local.client_group import ClientGroup
from lightfed.utils.errors import UserError
from tests.algorithms.lora.low_rank import NAMES, RULES, Adapted
from tests.algorithms.lora.test_frozen_factors import Net, federation
from tests.core.distributed.threads import on_ranks
from tests.small import fleet_of, random_data, run_round


def sent(scale: float = 1.0, *ranks: int, scales: Any = None, seed: int = 0) -> Sent:
    """What clients of some ranks send of a layer (6, 9), with small B."""
    draw = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    R = max(ranks)
    return Sent(
        round=0,
        layer=0,
        p=[1 / len(ranks)] * len(ranks),
        scales=scales or [1.0] * len(ranks),
        A=[drawn(rank, 9) for rank in ranks],
        D=[scale * drawn(6, rank) for rank in ranks],
        old_A=drawn(R, 9),
        old_D=drawn(6, R),
        start=drawn(R, 9).float().double(),
    )


def test_a_number_of_components_has_the_energy() -> None:
    S = torch.tensor([4.0, 2.0, 1.0, 0.0], dtype=torch.float64)  # squares 16, 4, 1: 21
    expected = {0.5: 1, 16 / 21 - 1e-9: 1, 0.8: 2, 20 / 21 - 1e-9: 2, 0.96: 3, 1.0: 3}
    assert {energy: components_of_energy(S, energy) for energy in expected} == expected
    assert components_of_energy(torch.zeros(3), 0.5) == 0


@pytest.mark.parametrize("energy", [0.3, 0.9, 0.9999])
def test_fedmomentum_applies_the_components_of_the_energy(energy: float) -> None:
    """Those of its rank in the adapters, in equal halves, and the others in the base."""
    given = sent(1.0, 2, 3, scales=[2.0, 0.5])
    merged = FedMomentum(energy=energy, adapters=NAMES).merge_layer(given)
    U, S, V_T = torch.linalg.svd(given.mean.dense, full_matrices=False)
    q = next(q for q in range(1, 7) if (S[:q] ** 2).sum() >= energy * (S**2).sum())
    kept = (U[:, :q] * S[:q]) @ V_T[:q]
    assert merged.A is not None
    assert merged.D is not None
    assert merged.base is not None
    assert merged.kept == q
    torch.testing.assert_close(merged.D @ merged.A + merged.base.dense, kept, rtol=0, atol=1e-6)
    n = min(q, 3)
    s = 1.25  # the mean scale
    torch.testing.assert_close(merged.A[:n].norm(dim=1) * s, merged.D[:, :n].norm(dim=0))
    assert merged.base.left.shape[1] == max(0, q - 3)
    error, size = merged.error(given.mean)
    assert error / size == pytest.approx(float((S[q:] ** 2).sum() / (S**2).sum()) ** 0.5, abs=1e-6)
    assert error / size <= (1 - energy) ** 0.5 + 1e-6


@pytest.mark.parametrize("name", ["fedmomentum", "fedsvd", "flexlora"])
def test_ranks_without_a_component_can_be_trained(name: str) -> None:
    """M = 0: the server keeps no component, and A starts again."""
    given = sent(0.0, 2, 3)
    merged = RULES[name](adapters=NAMES).merge_layer(given)
    assert merged.A is not None
    assert merged.D is not None
    assert torch.equal(merged.A, given.start)
    assert not merged.D.any()


def test_an_energy_cuts_what_flexlora_keeps_and_sends() -> None:
    """In the first round nothing is decomposed yet, and all ranks are sent."""
    rule = FlexLoRA(energy=0.5, adapters=NAMES)
    fed = federation(rule, 3, 3)
    head, rank = 4 * 18, 4 * (4 + 5)
    kept = 3
    for t in range(2):
        before = fed.ledger.totals.copy()
        run_round(fed, t)
        down = (fed.ledger.totals - before)[0, fed.ledger.DOWN]
        assert down == head + rank * kept
        kept = int(rule.kept[0])
        A, D = rule.server_factors()[0]
        assert 1 <= kept < 3
        assert D[:, :kept].any(0).all()
        assert not D[:, kept:].any()
        torch.testing.assert_close(A[kept:], rule.starts[0][kept:])


def test_an_energy_of_one_keeps_every_component() -> None:
    given = sent(1.0, 2, 3)
    whole = FlexLoRA(adapters=NAMES).merge_layer(given)
    assert whole.error(given.mean)[0] > 0  # 3 of 5 components
    same = FlexLoRA(energy=1.0, adapters=NAMES).merge_layer(given)
    for ours, theirs in ((same.A, whole.A), (same.D, whole.D)):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


def residual(X: Tensor, M: Tensor, A: Tensor, B: Tensor, weight: float) -> Tensor:
    """||M - (B + X) A||^2 + weight ||X||^2, by its definition."""
    return ((M - (B + X) @ A) ** 2).sum() + weight * (X**2).sum()


def test_the_closed_form_has_no_gradient() -> None:
    given = sent(1.0, 2, 3)
    A, B = given.averaged(given.p, by_rank=True)
    X = LoRAFAIR(regularization=0.3, adapters=NAMES).correction(given.mean, A, B)
    X.requires_grad_()
    (gradient,) = torch.autograd.grad(residual(X, given.mean.dense, A, B, 0.3), X)
    assert X.abs().max() > 0.01
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-9)


def test_the_angle_is_followed_down_its_gradient() -> None:
    """Against autograd on the dense product."""
    given = sent(1.0, 2, 3)
    A, B = given.averaged(given.p, by_rank=True)
    M = given.mean.dense
    X = torch.zeros_like(B, requires_grad=True)
    for _ in range(7):
        cosine = torch.cosine_similarity(M.flatten(), ((B + X) @ A).flatten(), dim=0)
        loss = 1 - cosine + 0.2 * (X**2).sum()
        (gradient,) = torch.autograd.grad(loss, X)
        X = (X - 0.5 * gradient).detach().requires_grad_()
    rule = LoRAFAIR("cosine", 0.2, steps=7, step_size=0.5, adapters=NAMES)
    torch.testing.assert_close(rule.correction(given.mean, A, B), X.detach())


@pytest.mark.parametrize("regularization", [1e-6, 0.01, 1.0, 100.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_closed_form_is_never_worse_than_the_mean(regularization: float, seed: int) -> None:
    given = sent(1.0, 1, 2, 4, scales=[4.0, 2.0, 1.0], seed=seed)
    fair = LoRAFAIR(regularization=regularization, adapters=NAMES).merge_layer(given)
    plain = RankMean(adapters=NAMES).merge_layer(given)
    assert fair.error(given.mean)[0] <= plain.error(given.mean)[0] * (1 + 1e-6)


def test_the_angle_lets_a_small_update_grow_and_the_norm_does_not() -> None:
    """Why the closed form is the default."""
    given = sent(1e-3, 3, 3)
    sizes = {}
    for similarity in ("l2", "cosine"):
        merged = LoRAFAIR(similarity, adapters=NAMES).merge_layer(given)
        sizes[similarity] = merged.applied.norm() / given.mean.norm()
    assert sizes["l2"] < 1.01
    assert sizes["cosine"] > 5


def test_nothing_is_corrected_where_there_is_no_update() -> None:
    for similarity in ("l2", "cosine"):
        merged = LoRAFAIR(similarity, adapters=NAMES).merge_layer(sent(0.0, 2, 3))
        assert merged.D is not None
        assert not merged.D.any()


@pytest.mark.parametrize(
    ("rule", "key"),
    [
        (partial(FlexLoRA, energy=0.0), "energy"),
        (partial(FlexLoRA, energy=1.5), "energy"),
        (partial(FedMomentum, energy=1.0), "energy"),
        (partial(FedMomentum, energy=0.0), "energy"),
        (partial(LoRAFAIR, similarity="angle"), "similarity"),
        (partial(LoRAFAIR, regularization=0.0), "regularization"),
        (partial(LoRAFAIR, regularization=-1.0), "regularization"),
        (partial(LoRAFAIR, step_size=0.0), "step_size"),
        (partial(LoRAFAIR, steps=0), "steps"),
        (partial(RULES["fedsvd"], period=0), "period"),
        (partial(RULES["fedrot"], strength=1.2), "strength"),
    ],
)
def test_an_argument_out_of_bounds_is_refused_in_one_line(rule: Any, key: str) -> None:
    with pytest.raises(UserError) as error:
        rule()
    assert error.value.key == f"model.algorithm.init_args.{key}"
    assert "\n" not in error.value.line


@pytest.mark.parametrize("rule", [FLoRA, FedExLoRA, FedMomentum])
def test_a_base_in_another_type_is_refused_by_rules_that_add_to_it(
    rule: type[AdapterRule],
) -> None:
    class Half(Net):
        def __init__(self) -> None:
            super().__init__()
            weight = self.body.weight.to(torch.bfloat16)
            self.body.weight = nn.Parameter(weight, requires_grad=False)

    groups = [ClientGroup(1, Half)]
    with pytest.raises(UserError, match="bfloat16"):
        fleet_of(groups, rule(adapters=NAMES), random_data([8]))


class Deep(nn.Module):
    """Six layers with adapters."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        weights = [torch.randn(4, 4, generator=draw) for _ in range(6)]
        self.layers = nn.Sequential(*[Adapted(weight, 2, 1.0) for weight in weights])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("rule", [FLoRA, FedExLoRA, FedMomentum])
def test_one_dense_update_is_held_at_a_time(
    rule: type[AdapterRule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is changed layer by layer, and an update is gone before the next one is made."""
    held: list[weakref.ref[Tensor]] = []
    most = [0]
    inner = rules._OnHost

    def watched(**parts: Any) -> Any:
        base = parts["base"]
        assert base is not None
        gc.collect()
        most[0] = max(most[0], sum(each() is not None for each in held))
        held.append(weakref.ref(base))
        return inner(**parts)

    fed = fleet_of([ClientGroup(2, Deep)], rule(adapters=NAMES), random_data([8, 8], classes=4))
    monkeypatch.setattr(rules, "_OnHost", watched)
    run_round(fed, 0)
    assert len(held) == 6
    assert most[0] == 0


class Failing(FlexLoRA):
    """LAPACK finds no decomposition."""

    def merge_layer(self, sent: Sent) -> Merged:
        raise torch.linalg.LinAlgError("linalg.svd: did not\nconverge")


@pytest.mark.parametrize("world", [1, 2])
def test_a_decomposition_that_fails_on_one_rank_ends_all_with_one_line(world: int) -> None:
    fleets = [federation(Failing(adapters=NAMES), 2, 3) for _ in range(world)]

    def work(ranks: Ranks) -> str:
        fed = fleets[ranks.rank]
        fed.open_round()
        fed.open_clients([0, 1])
        fed.ranks, fed.places.ranks = ranks, ranks
        fed.places.owner = {0: 0, 1: world - 1}
        with pytest.raises(UserError) as error:
            fed.algorithm.merge(fed, [0, 1], 4)
        return error.value.line

    alone = Ranks(torch.device("cpu"))
    lines = [work(alone)] if world == 1 else on_ranks(world, work)
    assert len(set(lines)) == 1
    assert "net.body in round 4" in lines[0]
    assert "did not converge" in lines[0]
    assert "\n" not in lines[0]


def test_singular_values_of_what_cannot_be_decomposed_raise() -> None:
    """What torch raises for it is what a rule turns into a line."""
    ones = torch.ones(3, 2, dtype=torch.float64)
    broken = Product(ones * float("nan"), ones.T)
    with pytest.raises(torch.linalg.LinAlgError):
        broken.svd()
