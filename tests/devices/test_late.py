"""Updates that arrive in a later round, under each method that takes them.

What a client sends counts in the round in which it arrives, as a change from what the client was
sent, with weight (1 + tau)^-e. What it keeps for itself changes at the end of its session. What the
server keeps as a sum over clients changes with the merge that counts the update.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

import lightfed
from lightfed.algorithms.apfl import APFL
from lightfed.algorithms.depth.depthfl import DepthFL
from lightfed.algorithms.depth.networks import DepthNet
from lightfed.algorithms.ditto import Ditto
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbn import FedBN
from lightfed.algorithms.feddyn import FedDyn
from lightfed.algorithms.fednova import FedNova
from lightfed.algorithms.fedper import FedPer
from lightfed.algorithms.fedrep import FedRep
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent
from lightfed.algorithms.lora.feddpa import FedDPA
from lightfed.algorithms.lora.fedsalora import FedSALoRA
from lightfed.algorithms.lora.fedsb import FedSB
from lightfed.algorithms.lora.ffalora import FFALoRA
from lightfed.algorithms.lora.lorafair import LoRAFAIR
from lightfed.algorithms.lora.rankmean import RankMean
from lightfed.algorithms.lora.zeropadded import ZeroPadded
from lightfed.algorithms.moon import MOON
from lightfed.algorithms.pfedmoe.fedapen import FedAPEN
from lightfed.algorithms.pfedmoe.fedkd import FedKD
from lightfed.algorithms.pfedmoe.fedmrl import FedMRL
from lightfed.algorithms.pfedmoe.fml import FML
from lightfed.algorithms.pfedmoe.pfedmoe import PFedMoE
from lightfed.algorithms.qffl import QFFL
from lightfed.algorithms.scaffold import SCAFFOLD
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.devices.devices import Device, Devices
from lightfed.devices.policy import Policy
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import RoundPlan
from lightfed.local.penalties import LinearTerm
from lightfed.networks.mlp import MLP
from lightfed.runs import federation_state
from lightfed.runs.checkpoint import CLIENTS
from lightfed.utils.errors import UserError
from tests.algorithms.lora.low_rank import NAMES, Adapted
from tests.small import Line, data_of, fleet_of, random_data, run_round

# The server merges every second, and an update that is tau rounds late weighs 1 / (1 + tau).
EVERY_SECOND = Policy(deadline=1.0, late="keep", exponent=1.0)


def line(algorithm: Algorithm, samples: Sequence[int] = (1, 1), **settings: Any) -> Fleet:
    """Make two clients on lines of slope 2 and 4, which start at 0.

    A step goes half of the way to the slope. Client 0 is in time in every round, and client 1 takes
    two seconds: its update of round 0 arrives in round 1.
    """
    first, second = samples
    y = torch.tensor([2] * first + [4] * second)
    x = torch.tensor([[1.0, 0.0]]).repeat(len(y), 1)
    parts = [range(first), range(first, first + second)]
    model = settings.pop("model", Line)
    groups = [ClientGroup(1, model, name=str(k)) for k in range(2)]
    # Two messages, one down and one up.
    devices = Devices(groups={"0": Device(latency=0.5), "1": Device(latency=1.0)})
    settings = {"devices": devices, "policy": EVERY_SECOND} | settings
    fed = fleet_of(groups, algorithm, data_of(x, y, parts, batch_size=1), **settings)
    fed.plan = RoundPlan(lr=0.5)
    return fed


def weights(fed: Fleet, rounds: int = 2) -> list[float]:
    """Return the server's slope after each round."""
    slopes = []
    for t in range(rounds):
        run_round(fed, t)
        model: Any = fed.algorithm.model
        slopes.append(model.floats[0].item())
    assert fed.clock.arrived == {1: 1}
    return slopes


def close(value: float) -> Any:
    return pytest.approx(value, abs=2e-5)  # weights are whole multiples of 2^-16


def test_a_server_optimizer_steps_to_the_mean_with_late_updates() -> None:
    fed = line(FedAvg("uniform"), server_optimizer=partial(SGD, lr=1.0, momentum=0.5))
    # Client 0 goes from 1 to 1.5. Client 1 went from 0 to 2.
    mean_change = (0.5 + 0.5 * 2) / 1.5
    assert weights(fed) == [1.0, close(1 + 0.5 * 1 + mean_change)]


def test_fednova_normalizes_late_updates_by_their_own_steps() -> None:
    """Client 1 takes two steps, from 0 to 2 and 3, and has two samples: d_1 = -3 / 2."""
    fed = line(FedNova(), samples=(1, 2))
    # The weights 1 and 2 / (1 + 1) are alike.
    tau_eff = 0.5 * 1 + 0.5 * 2
    mean_update = 0.5 * -0.5 + 0.5 * -1.5
    assert weights(fed) == [1.0, close(1 - tau_eff * mean_update)]


def test_scaffold_counts_a_control_variate_when_its_update_arrives() -> None:
    algorithm = SCAFFOLD()
    fed = line(algorithm)

    # Client 0 goes from 0 to 1: c_0 = (0 - 1) / 0.5 = -2, of which c has half.
    run_round(fed, 0)
    assert algorithm.model.floats[0] == 1.0
    assert algorithm.c[0] == -1.0
    assert algorithm.controls[0][0] == -2.0
    assert 1 not in algorithm.controls

    # Its gradient 1 - 2 with the correction c - c_0 = 1 is 0: it stays, and c_0 becomes -1. The
    # late client went from 0 to 2: c_1 = -4. Both parts of c count in full.
    run_round(fed, 1)
    assert algorithm.model.floats[0].item() == close(1 + (0 + 0.5 * 2) / 1.5)
    assert algorithm.controls[0][0] == -1.0
    assert algorithm.controls[1][0] == -4.0
    assert algorithm.c[0] == (-1 - 4) / 2


def test_feddyn_counts_a_memory_when_its_update_arrives() -> None:
    algorithm = FedDyn(1.0)
    fed = line(algorithm)
    memories = algorithm.memory.memories

    # w_0 = 1 and h = 1 / 2.
    run_round(fed, 0)
    assert algorithm.model.floats[0] == 1.5
    assert memories[0][0] == 1.0
    assert 1 not in memories

    # The gradient of client 0 is 1.5 - 2 + g_0 = 0.5. The late one went from 0 to 2.
    run_round(fed, 1)
    mean = 1.5 + (-0.25 + 0.5 * 2) / 1.5
    h = (0.75 + 2.0) / 2
    assert memories[0][0] == 0.75
    assert memories[1][0] == 2.0
    assert algorithm.h[0] == h
    assert algorithm.model.floats[0].item() == close(mean + h)


def test_a_linear_term_remembers_when_its_update_arrives() -> None:
    term = LinearTerm(1.0)
    fed = line(FedAvg("uniform"), local_penalty=term)
    run_round(fed, 0)
    assert 1 not in term.memories
    run_round(fed, 1)
    assert term.memories[1][0] == 2.0


def test_ditto_goes_on_with_personal_models_while_global_ones_are_under_way() -> None:
    algorithm = Ditto(1.0)
    fed = line(algorithm)
    run_round(fed, 0)
    assert algorithm.model.floats[0] == 1.0
    assert [fed.row(k).floats[0].item() for k in (0, 1)] == [1.0, 2.0]

    # v_0 = 1 is on the anchor w = 1.
    run_round(fed, 1)
    assert algorithm.model.floats[0].item() == close(1 + (0.5 + 0.5 * 2) / 1.5)
    assert [fed.row(k).floats[0].item() for k in (0, 1)] == [1.5, 2.0]


def test_an_update_arrives_before_the_work_that_follows_it() -> None:
    """A session of client 1 takes 1.5 s, and it has two in a round: it is free after 3 s."""
    probe = line(Ditto(1.0), model=Two)
    run_round(probe, 0)
    flops = float(probe.ledger.flops[1]) / 2

    devices = Devices(groups={"0": Device(latency=0.5), "1": Device(flops=flops / 1.5)})
    fed = line(Ditto(1.0), model=Two, devices=devices)
    run_round(fed, 0)
    run_round(fed, 1)
    assert fed.clock.now == 2.0
    assert fed.clock.arrived == {1: 1}
    fed.open_round()
    assert fed.participants(2) == [0]


def test_qffl_weighs_late_updates_by_the_loss_of_their_round() -> None:
    """F_k = (w - y_k)^2 / 2; q = 1, L = 2."""
    fed = line(QFFL(1.0, 2.0))
    F_0, F_1 = 2.0, 8.0  # at w = 0

    def h(F: float, moved: float) -> float:
        return 2 * moved**2 * 2 + 2 * F

    # d_k = 2 (w - w_k): client 0 goes to 1.
    first = 2 * F_0 * 1 / h(F_0, 1)

    F_0 = (first - 2) ** 2 / 2
    moved = (2 - first) / 2
    change = 2 * F_0 * moved + 0.5 * 2 * F_1 * 2
    second = first + change / (h(F_0, moved) + 0.5 * h(F_1, 2))
    assert weights(fed) == [close(first), close(second)]


class Two(L.LightningModule):
    """y = (body + head) x, from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 1, bias=False)
        self.body = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.body.weight)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, 2) -> (B,)."""
        return (self.body(x) + self.head(x))[:, 0]

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return ((self(x) - y) ** 2).sum() / 2


@pytest.mark.parametrize(
    "algorithm",
    [
        partial(FedPer, "head", "uniform"),
        partial(FedRep, "head", head_epochs=0),
        partial(LGFedAvg, 1),
        partial(FedAvg, "uniform"),
    ],
)
def test_a_late_client_keeps_its_own_part_at_once(algorithm: Callable[[], Algorithm]) -> None:
    """Both parts of client 1 go from 0 to 2; its body arrives a round later."""
    made = algorithm()
    personal = ["head"] if isinstance(made, FedAvg) and not isinstance(made, FedPer) else []
    fed = line(made, model=Two, personal=personal)
    run_round(fed, 0)

    def parts(rows: Any) -> list[float]:
        views = rows.live.layout.floats.views(rows.row(1).floats)
        return [views["body.weight"][0, 0].item(), views["head.weight"][0, 0].item()]

    # Whether it is tested with the server's body, or as its session has left it.
    assert parts(made.models(fed, "aggregated", [1])) == [1.0, 2.0]
    assert parts(made.models(fed, "trained", [1])) == [2.0, 2.0]

    # Client 0, with 1 + 1 = 2, is at its slope.
    run_round(fed, 1)
    body = 1 + 0.5 * 2 / 1.5
    assert parts(made.models(fed, "aggregated", [1])) == [close(body), 2.0]
    assert parts(made.models(fed, "trained", [1])) == [2.0, 2.0]


class Normed(nn.Module):
    """A body with statistics, and a head."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.extractor = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU())
        self.head = nn.Linear(5, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) -> (B, 3)."""
        return self.head(self.extractor(x))


def blocks(num_classes: int = 3, rate: float = 1.0) -> DepthNet:
    """Two blocks with a classifier each, or the first of them."""
    made = [nn.Linear(4, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 6))]
    heads = [nn.Linear(5, num_classes), nn.Linear(6, num_classes)]
    depth = round(2 * rate)
    return DepthNet(made[:depth], heads[:depth])


shared = partial(MLP, hidden=(5,))
MEANS: Mapping[str, Callable[[], Algorithm]] = {
    "APFL": partial(APFL, adaptive=True),
    "FedAPEN": partial(FedAPEN, shared, hold_out=0.2, passes=1),
    "FedAPEN aggregated": partial(FedAPEN, shared, hold_out=0.2, passes=1, learn="aggregated"),
    "FedAvg": FedAvg,
    "FedAvg local": partial(FedAvg, buffers="local"),
    "FedBN": FedBN,
    "FedKD": partial(FedKD, shared, rounds=5),
    "FedKD parameters": partial(FedKD, shared, rounds=5, compress="parameters"),
    "FedMRL": partial(FedMRL, shared),
    "FedPer": partial(FedPer, "net.head"),
    "FedRep": partial(FedRep, "net.head", head_epochs=1),
    "FML": partial(FML, shared),
    "LGFedAvg": partial(LGFedAvg, 1),
    "MOON": MOON,
    "PFedMoE": partial(PFedMoE, shared, gate_units=4),
}


def server_tensors(model: Any) -> dict[str, Tensor]:
    return {name: view.clone() for name, view in model.layout.floats.views(model.floats).items()}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_that_of_a_bare_loop(name: str) -> None:
    """Five rounds of four clients, of which one or two are late in each."""
    algorithm: Any = MEANS[name]()
    groups = [ClientGroup(1, Normed, name=str(k)) for k in range(4)]
    latency = (0.5, 1.0, 1.7, 0.4)
    devices = Devices(groups={str(k): Device(latency=s) for k, s in enumerate(latency)})
    fed = fleet_of(
        groups, algorithm, random_data([6, 9, 12, 8], batch_size=6, last_batch="join"),
        devices=devices,
        policy=Policy(deadline=1.0, late="keep", exponent=1.0), optimizer=partial(SGD, lr=0.1),
    )  # fmt: skip
    fed.plan = RoundPlan(lr=0.1)
    merge = fed.merge
    sent: dict[int, dict[str, Tensor]] = {}
    begun: dict[int, int] = {}
    most_late = 0

    def by_hand(clients: Sequence[int], *, into: Any, **settings: Any) -> list[int]:
        nonlocal most_late
        before = server_tensors(into)
        rows = {}
        for k in clients:
            views = fed.state(k).layout.floats.views(fed.row(k).floats)
            rows[k] = {tensor: views[tensor].clone() for tensor in before}
        merged = merge(clients, into=into, **settings)

        names = set(settings.get("tensors") or before) - fed.personal
        statistics = {entry.name for entry in into.layout.floats.entries[into.layout.parameters :]}
        for tensor, after in server_tensors(into).items():
            if tensor not in names:
                assert torch.equal(after, before[tensor])
                continue
            value_sum = torch.zeros_like(after, dtype=torch.float64)
            weight_sum = 0.0
            for k in merged:
                weight = fed.data.num_samples(k) if settings["weights"] == "samples" else 1
                if k in begun:
                    weight = weight / (1 + t - begun[k])
                    most_late = max(most_late, t - begun[k])
                    value = sent[k][tensor]
                    value = value if tensor in statistics else before[tensor] + value
                else:
                    value = rows[k][tensor]
                value_sum += weight * value
                weight_sum += weight
            expected = (value_sum / weight_sum).float()
            torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)

        for k in merged:
            begun.pop(k, None)
        for k in set(clients) - set(merged):
            begun[k] = t
            sent[k] = {
                tensor: value if tensor in statistics else value - before[tensor]
                for tensor, value in rows[k].items()
            }
        return merged

    fed.merge = by_hand  # type: ignore[method-assign]
    for t in range(5):
        run_round(fed, t)
    assert most_late >= 2


def test_a_contrast_is_with_the_model_of_the_last_session() -> None:
    algorithm = MOON()
    fed = fleet_of(
        [ClientGroup(1, Normed, name=str(k)) for k in range(2)], algorithm, random_data([6, 9]),
        devices=Devices(groups={"1": Device(latency=1.0)}), policy=EVERY_SECOND,
    )  # fmt: skip
    run_round(fed, 0)
    assert fed.clock.under_way == [1]
    previous: Any = algorithm.local_penalty
    assert torch.equal(previous.previous[1][-1], fed.row(1).floats)


class LowRank(nn.Module):
    """An adapter of rank 4, or less, and a head."""

    def __init__(self, num_classes: int = 3, rate: float = 1.0) -> None:
        super().__init__()
        weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
        self.layer = Adapted(weight, int(4 * rate), 2.0)
        self.head = nn.Linear(5, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) -> (B, 3)."""
        return self.head(torch.tanh(self.layer(x)))


@pytest.mark.parametrize(
    "rule", [RankMean, ZeroPadded, FFALoRA, FedSALoRA, FedSB, LoRAFAIR, FedDPA]
)
def test_late_adapters_are_changes_of_what_was_sent(rule: type[AdapterRule]) -> None:
    """A_k and s_k B_k of a late client are the server's of today plus what its session added."""
    algorithm = rule(adapters=NAMES)
    groups = [ClientGroup(1, LowRank, rate=1 - k / 4, name=str(k)) for k in range(3)]
    latency = (0.5, 1.0, 1.7)
    devices = Devices(groups={str(k): Device(latency=s) for k, s in enumerate(latency)})
    fed = fleet_of(
        groups, algorithm, random_data([6, 9, 12]), devices=devices,
        policy=Policy(deadline=1.0, late="keep", exponent=1.0), optimizer=partial(SGD, lr=0.1),
    )  # fmt: skip
    merge, merge_layer = algorithm.merge, algorithm.merge_layer
    messages: list[Sent] = []
    under_way: dict[int, tuple[int, Tensor, Tensor]] = {}
    late = 0

    def factors(k: int) -> tuple[Tensor, Tensor]:
        """Return A_k (r, in) and s_k B_k (out, r), or a core with rows of 0 below it."""
        [(A, B)] = algorithm.factors(fed, k, fed.row(k).floats)
        D = 2 * B
        if rule is FedSB:
            D = torch.cat([D, torch.zeros(4 - len(D), len(A))])
        return A.clone(), D

    def cut(k: int) -> tuple[Tensor, Tensor]:
        """Return the part of the server's factors that client k has."""
        [(A, D)] = algorithm.server_factors()
        own_A, own_D = factors(k)
        D = D[:, : len(own_A)].clone()
        if rule is FedSB:
            D[len(own_A) :] = 0
        # Of FedSALoRA's D the server has nothing.
        return A[: len(own_A)].clone(), 0 * own_D if rule is FedSALoRA else D

    def by_hand(fed: Fleet, clients: Sequence[int], t: int) -> None:
        nonlocal late
        expected = []
        shares = []
        for k in clients:
            weight = fed.data.num_samples(k)
            A, D = factors(k)
            if k in under_way:
                begun, change_A, change_D = under_way.pop(k)
                now_A, now_D = cut(k)
                A, D = now_A + change_A, now_D + change_D
                weight = weight / (1 + t - begun)
                late += 1
            expected.append((A, D))
            shares.append(weight)
        for k in fed.clock.late:
            (A, D), (sent_A, sent_D) = factors(k), cut(k)
            under_way[k] = (t, A - sent_A, D - sent_D)

        messages.clear()
        merge(fed, clients, t)
        [sent] = messages
        for (A, D), sent_A, sent_D in zip(expected, sent.A, sent.D, strict=True):
            torch.testing.assert_close(sent_A.float(), A, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(sent_D.float(), D, rtol=1e-5, atol=1e-6)
        assert sent.p == pytest.approx([share / sum(shares) for share in shares])

    def taped(sent: Sent) -> Merged:
        messages.append(sent)
        return merge_layer(sent)

    algorithm.merge = by_hand  # type: ignore[method-assign]
    algorithm.merge_layer = taped  # type: ignore[method-assign]
    for t in range(5):
        run_round(fed, t)
    assert late >= 2


def test_the_memory_of_depthfl_is_the_mean_of_its_clients() -> None:
    """Client 1 is shallow, and late in every round."""
    algorithm = DepthFL(0.1)
    groups = [ClientGroup(1, blocks, rate=rate, name=str(rate)) for rate in (1.0, 0.5)]
    fed = fleet_of(
        groups, algorithm, random_data([6, 9]), optimizer=partial(SGD, lr=0.1),
        devices=Devices(groups={"0.5": Device(latency=1.0), "1.0": Device(latency=0.5)}),
        policy=EVERY_SECOND,
    )  # fmt: skip
    merge = fed.merge
    means: list[Tensor] = []

    def kept(*given: Any, **settings: Any) -> list[int]:
        merged = merge(*given, **settings)
        means.append(algorithm.model.floats.clone())
        return merged

    fed.merge = kept  # type: ignore[method-assign]
    for t in range(4):
        run_round(fed, t)
        assert (1 in algorithm.corrections) == (t > 0)

        h = torch.zeros_like(algorithm.model.floats)
        views = algorithm.model.layout.floats.views(h)
        for k, correction in algorithm.corrections.items():
            for name, g in fed.state(k).layout.floats.views(correction).items():
                views[name] += g / 2
        torch.testing.assert_close(algorithm.h, h)

        # Of tensors that only client 0 has, and of all where it is in time: w = a - h / alpha.
        torch.testing.assert_close(algorithm.model.floats, means[-1] - h / 0.1)


def test_every_method_says_whether_it_takes_late_updates() -> None:
    for name in lightfed._HOMES:
        kind = getattr(lightfed, name)
        is_method = inspect.isclass(kind) and issubclass(kind, Algorithm)
        if is_method and not inspect.isabstract(kind) and not kind.no_policy:
            takes = vars(kind).get("takes_late", False)
            assert takes != bool(kind.no_late), name


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (partial(FedRep, "net.head", private=False), "the server averages heads"),
        (partial(PFedMoE, shared, federate=False), "clients send nothing"),
    ],
)
def test_a_setting_may_leave_no_place_for_late_updates(
    algorithm: Callable[[], Algorithm], why: str
) -> None:
    with pytest.raises(UserError, match=f"model.policy.late: keep, but {why}"):
        fleet_of(
            [ClientGroup(2, Normed)], algorithm(), random_data([6, 9]), devices=Devices(),
            policy=EVERY_SECOND,
        )  # fmt: skip


@pytest.mark.parametrize(
    "algorithm",
    [FedNova, SCAFFOLD, partial(FedDyn, 1.0), partial(Ditto, 1.0), partial(QFFL, 1.0, 2.0)],
)
def test_a_stop_loses_no_update_that_is_under_way(algorithm: Callable[[], Algorithm]) -> None:
    whole, resumed = line(algorithm()), line(algorithm())
    run_round(whole, 0)
    assert whole.clock.under_way == [1]

    checkpoint = deepcopy(federation_state.save(whole))
    checkpoint[CLIENTS] = [checkpoint[CLIENTS]]
    resumed.algorithm.load_state_dict(deepcopy(whole.algorithm.state_dict()))
    federation_state.load(resumed, checkpoint)
    resumed.plan = whole.plan

    rows = []
    for fed in (whole, resumed):
        rows.append([run_round(fed, t) for t in (1, 2)])
        assert fed.clock.under_way == [1]
    assert rows[0] == rows[1]
    state = resumed.algorithm.state_dict()
    for name, value in whole.algorithm.state_dict().items():
        assert torch.equal(state[name], value)


class Twice(FedAvg):
    """Merges in two steps."""

    takes_late = True

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        fed.send(self.model, clients)
        fed.train(clients, t)
        fed.merge(clients[:1], into=self.model)
        fed.merge(clients[1:], into=self.model)


def test_a_late_update_belongs_to_one_merge() -> None:
    with pytest.raises(UserError, match="late: keep, and Twice merges more than once in a round"):
        run_round(line(Twice()), 0)
