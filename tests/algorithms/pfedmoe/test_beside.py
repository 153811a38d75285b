"""Private networks beside a shared one, vectors of classes: what is trained, what travels."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.pfedmoe import low_rank as svd
from lightfed.algorithms.pfedmoe.fedapen import FedAPEN
from lightfed.algorithms.pfedmoe.fedkd import FedKD
from lightfed.algorithms.pfedmoe.fml import FML
from lightfed.algorithms.pfedmoe.pfedmoe import PFedMoE
from lightfed.algorithms.prototypes.fd import FD
from lightfed.algorithms.prototypes.fedproto import FedProto
from lightfed.algorithms.prototypes.prototype import Inference
from lightfed.algorithms.standalone import Standalone
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import SessionContext
from lightfed.local.optimizer import Clipping
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.small import Line, data_of, fit, fleet_of, random_data, run_round

SIZES = [9, 6, 12, 8]
large, larger, small = (partial(MLP, hidden=hidden) for hidden in ((16, 6), (20, 6), (6,)))
wide = partial(MLP, hidden=(16, 6))


def fleet(algorithm: Algorithm, models: Any = (large, larger), **settings: Any) -> Fleet:
    data = random_data(SIZES, batch_size=3)
    each = len(SIZES) // len(models)
    groups = [ClientGroup(each, model) for model in models]
    return fleet_of(groups, algorithm, data, **{"optimizer": partial(SGD, lr=0.1)} | settings)


def tensors(fed: Fleet, client: int, prefix: str) -> dict[str, Tensor]:
    """A client's tensors below a prefix, by the rest of their names."""
    views = fed.state(client).layout.floats.views(fed.row(client).floats)
    return {n.removeprefix(prefix): v for n, v in views.items() if n.startswith(prefix)}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-6)


def test_fml_without_distillation_is_standalone_beside_fedavg() -> None:
    mutual = fleet(FML(small, alpha=1.0, beta=1.0))
    alone, shared = fleet(Standalone()), fleet(FedAvg(), models=(small,))
    assert isinstance(mutual.algorithm, FML)
    assert isinstance(shared.algorithm, FedAvg)
    views = shared.algorithm.model.layout.floats.views(shared.algorithm.model.floats)
    ours = mutual.algorithm.model
    for name, value in ours.layout.floats.views(ours.floats).items():
        views[name.replace("net.shared.", "net.")].copy_(value)
    for t in range(3):
        for fed in (mutual, alone, shared):
            run_round(fed, t)
    for client in range(len(SIZES)):
        assert_same(tensors(mutual, client, "net.private."), tensors(alone, client, "net."))
    common = {n.removeprefix("net."): v for n, v in views.items()}
    found = ours.layout.floats.views(ours.floats)
    assert_same({n.removeprefix("net.shared."): v for n, v in found.items()}, common)


METHODS: dict[str, Any] = {
    "fedapen": lambda: FedAPEN(small, share_lr=0.05),
    "fml": lambda: FML(small),
    "fedkd": lambda: FedKD(small, rounds=4),
    "pfedmoe": lambda: PFedMoE(small, gate_units=4),
}


# What every client has besides its own: 4 inputs, 6 units, 3 classes; of a mixture the extractor.
SHARED = {name: 5 * 6 + 7 * 3 * (name != "pfedmoe") for name in METHODS}


@pytest.mark.parametrize("name", METHODS)
def test_a_package_is_the_shared_network_and_nothing_private(name: str) -> None:
    algorithm, other = METHODS[name](), METHODS[name]()
    fed, again = fleet(algorithm), fleet(other)
    layout = algorithm.model.layout
    assert all(entry.name.startswith("net.shared.") for entry in layout.floats)
    assert layout.floats.numel == SHARED[name]
    run_round(fed, 0)
    sent = fed.ledger.totals[:, fed.ledger.UP]
    whole = 4 * SHARED[name]
    assert (sent <= whole).all()
    assert (sent == whole).all() or name == "fedkd"
    # What a client keeps for itself does not reach the server.
    run_round(again, 0)
    for client in range(len(SIZES)):
        views = again.state(client).layout.floats.views(again.row(client).floats)
        for tensor, view in views.items():
            if not tensor.startswith("net.shared."):
                view += 1.0
    again.merge(range(len(SIZES)), into=other.model)
    fed.merge(range(len(SIZES)), into=algorithm.model)
    assert torch.equal(other.model.floats, algorithm.model.floats)


@pytest.mark.parametrize("name", METHODS)
def test_participants_start_from_the_shared_network_and_keep_their_own(name: str) -> None:
    algorithm = METHODS[name]()
    fed = fleet(algorithm, clients_per_round=2)
    for t in range(3):
        before = [fed.row(k).floats.clone() for k in range(len(SIZES))]
        clients = fed.participants(t)
        run_round(fed, t)
        for client in range(len(SIZES)):
            moved = not torch.equal(fed.row(client).floats, before[client])
            assert moved == (client in clients)


NETWORKS = {
    "fedapen": {"private", "shared"},
    "fml": {"private", "shared"},
    "fedkd": {"private", "shared", "projection"},
    "pfedmoe": {"extractor head", "shared", "gate"},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_networks_that_have_a_gradient_norm_of_their_own(name: str) -> None:
    module = fleet(METHODS[name]()).state(0).module
    parameters = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    clipping = Clipping(1.0, "network").of(module, SGD([p for _, p in parameters], lr=0.1))
    found: dict[int, list[str]] = {}
    for (path, _), network in zip(parameters, clipping.networks, strict=True):
        found.setdefault(network, []).append(path.split(".")[1])
    assert {" ".join(dict.fromkeys(parts)) for parts in found.values()} == NETWORKS[name]


class SpiedFedKD(FedKD):
    """Keeps what the sessions of a round have trained."""

    @override
    def session_end(self, s: SessionContext) -> None:
        views = s.group.layout.floats.views(s.row.floats)
        self.trained[s.client] = {n: v.clone() for n, v in views.items() if "shared" in n}
        super().session_end(s)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        self.trained: dict[int, dict[str, Tensor]] = {}
        super().round(fed, t)


@pytest.mark.parametrize(("compress", "participants"), [("update", 2), ("parameters", 4)])
def test_fedkds_updates_or_parameters_travel_as_singular_values(
    compress: Any, participants: int
) -> None:
    rounds, start, end = 4, 0.6, 0.9
    algorithm = SpiedFedKD(wide, (start, end), rounds=rounds, compress=compress)
    fed = fleet(algorithm, clients_per_round=participants)
    views = algorithm.model.layout.floats.views(algorithm.model.floats)
    held: dict[int, dict[str, Tensor]] = {}
    whole = sum(4 * value.numel() for value in views.values())
    for t in range(rounds):
        energy = start + (t + 1) / rounds * (end - start)
        theta = {n: v.clone() for n, v in views.items()}
        up = down = 0
        clients = fed.participants(t)
        for k in clients:
            if compress == "update" and k not in held:
                held[k], size = theta, whole
            else:
                base = held.get(k) or {n: torch.zeros_like(v) for n, v in theta.items()}
                sent = svd.compress({n: theta[n] - base[n] for n in theta}, energy)
                size = sum(package.bytes for package in sent.values())
                found = {n: base[n] + package.tensor() for n, package in sent.items()}
                held |= {k: found} if compress == "update" else {}
            down += size
        metrics = run_round(fed, t)
        arrived = []
        for k, trained in algorithm.trained.items():
            base = held.get(k) or {n: torch.zeros_like(v) for n, v in theta.items()}
            sent = svd.compress({n: trained[n] - base[n] for n in theta}, energy)
            up += sum(package.bytes for package in sent.values())
            arrived.append({n: base[n] + package.tensor() for n, package in sent.items()})
        assert (metrics["bytes_down"], metrics["bytes_up"]) == (down, up)
        assert sorted(algorithm.trained) == clients
        for name, value in views.items():
            mean = torch.stack([one[name] for one in arrived]).mean(0)
            torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-6)
        kept = held if compress == "update" else dict(zip(clients, arrived, strict=True))
        for k in clients:
            for name, value in tensors(fed, k, "").items():
                if name in theta:
                    torch.testing.assert_close(value, kept[k][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [SGD, Adam])
def test_the_gate_has_a_learning_rate_of_its_own(optimizer: Any) -> None:
    frozen, free = (
        fleet(PFedMoE(small, gate_units=4, gate_lr=rate), optimizer=partial(optimizer, lr=0.1))
        for rate in (0.0, None)
    )
    gates = [{n: v.clone() for n, v in tensors(f, 0, "net.gate.").items()} for f in (frozen, free)]
    names = [n for n in gates[0] if n.endswith(("weight", "bias"))]
    for fed in (frozen, free):
        run_round(fed, 0)
    for name in names:
        assert torch.equal(tensors(frozen, 0, "net.gate.")[name], gates[0][name])
    assert any(not torch.equal(tensors(free, 0, "net.gate.")[n], gates[1][n]) for n in names)
    for part in ("extractor.", "head.", "shared."):
        assert any(v.any() for v in tensors(frozen, 0, f"net.{part}").values())


def test_an_optimiser_of_one_rate_for_all_is_refused_for_it() -> None:
    with pytest.raises(UserError, match="ASPG with a scheduler, hooks, groups"):
        fleet(PFedMoE(small, gate_lr=0.5), optimizer=ASPG)


@pytest.mark.parametrize("algorithm", [FD(), FedProto(), FedProto(inference="head")])
def test_classes_are_exchanged_as_means(algorithm: Any) -> None:
    """Logits have the same size in all networks, features of FedProto must have."""
    other = partial(MLP, hidden=(16, 7)) if isinstance(algorithm, FD) else larger
    fed = fleet(algorithm, models=(large, other))
    metrics = run_round(fed, 0)
    assert algorithm.seen.all()
    size = algorithm.values.shape[1]
    assert metrics["bytes_down"] == 0
    assert metrics["bytes_up"] == len(SIZES) * 3 * (4 * size + 8)
    before = algorithm.values.clone()
    assert run_round(fed, 1)["bytes_down"] == metrics["bytes_up"]
    assert not torch.equal(algorithm.values, before)


HELD = [0, 0, 1, 2]  # client -> the one class that it holds


def by_class(algorithm: FD | FedProto, **settings: Any) -> Fleet:
    """Clients of one class each."""
    y = torch.tensor(HELD).repeat_interleave(4)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    data = data_of(x, y, [range(4 * k, 4 * k + 4) for k in range(4)], classes=4)
    optimizer = partial(SGD, lr=0.1)
    return fleet_of([ClientGroup(4, large)], algorithm, data, optimizer=optimizer, **settings)


@pytest.mark.parametrize("make", [FD, FedProto])
@pytest.mark.parametrize("absent", ["keep", "forget"])
def test_the_vector_of_a_class_without_a_participant_is_kept_or_forgotten(
    make: Any, absent: Any
) -> None:
    algorithm = make(absent=absent)
    fed = by_class(algorithm, clients_per_round=2)
    known: dict[int, Tensor] = {}
    idle = 0
    for t in range(6):
        clients = fed.participants(t)
        down = len(clients) * len(known)
        metrics = run_round(fed, t)
        held = {HELD[k] for k in clients}
        assert metrics["bytes_down"] == down * (4 * algorithm.values.shape[1] + 8)
        for label in held:
            both = [algorithm.uploaded_values[k][label] for k in clients if HELD[k] == label]
            known[label] = torch.stack(both).double().mean(0).float()
        if absent == "forget":
            known = {label: known[label] for label in held}
        idle += len(set(known) - held)
        assert {c for c in range(4) if algorithm.seen[c]} == set(known)
        for label, vector in known.items():
            torch.testing.assert_close(algorithm.values[label], vector, rtol=0, atol=1e-6)
    assert (idle > 0) == (absent == "keep")


def test_an_evaluation_of_fedproto_reports_both_rules(tmp_path: Path) -> None:
    rules: tuple[Inference, Inference] = ("head", "prototypes")
    found = {}
    for rule, other in (rules, rules[::-1]):
        algorithm, optimizer = FedProto(inference=rule), partial(SGD, lr=0.1)
        federation = Federation(algorithm, [ClientGroup(4, large)], optimizer=optimizer)
        trainer = fit(federation, random_data(SIZES, batch_size=3), tmp_path / rule, rounds=2)
        metrics = trainer.callback_metrics
        found[rule] = float(metrics["personal/accuracy"])
        found[f"{rule}, other"] = float(metrics[f"personal/accuracy_{other}"])
    assert found["head"] == found["prototypes, other"]
    assert found["prototypes"] == found["head, other"]
    assert found["head"] != found["prototypes"]


def test_a_module_of_its_own_is_refused() -> None:
    for algorithm in (FML(small), FedProto()):
        with pytest.raises(UserError, match=r"model\.clients: .*Line"):
            fleet(algorithm, models=(Line,))


def test_both_networks_cost() -> None:
    def flops(algorithm: Algorithm, model: Any = large) -> float:
        return run_round(fleet(algorithm, models=(model,)), 0)["flops"]

    assert flops(FML(small)) == flops(Standalone()) + flops(Standalone(), small)
