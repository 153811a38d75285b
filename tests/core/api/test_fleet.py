"""Who takes part, how much a session is, and what a group is refused for."""

import math
from collections import Counter
from functools import partial
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.fleet import Fleet
from lightfed.distributed.collectives import Ranks
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import LocalWork, RoundPlan
from lightfed.networks.mlp import MLP
from lightfed.state.rows import Row
from lightfed.utils.errors import UserError
from tests.core.distributed.threads import on_ranks
from tests.small import CPU, Line, data_of, fleet_of, random_data, run_round

mlp = partial(MLP, hidden=(6,), dropout=0.2)


def fleet(clients: int, *, seed: int = 0, **work: Any) -> Fleet:
    return fleet_of(
        [ClientGroup(clients, mlp)], FedAvg(), random_data([3] * clients), seed=seed, **work
    )


@pytest.mark.parametrize(
    ("work", "count"),
    [
        ({}, 10), ({"fraction": 0.3}, 3), ({"fraction": 0.31}, 4), ({"fraction": 0.01}, 1),
        ({"clients_per_round": 7}, 7), ({"clients_per_round": 10}, 10),
    ],
)  # fmt: skip
def test_so_many_clients_take_part(work: dict[str, Any], count: int) -> None:
    fed = fleet(10, **work)
    for t in range(20):
        chosen = fed.participants(t)
        assert chosen == sorted(set(chosen))
        assert len(chosen) == count
        assert set(chosen) <= set(range(10))


@pytest.mark.parametrize(("fraction", "count"), [(0.55, 55), (0.07, 7), (0.071, 8), (1e-9, 1)])
def test_an_error_of_floats_adds_no_participant(fraction: float, count: int) -> None:
    assert len(fleet(100, fraction=fraction).participants(0)) == count


def test_participants_are_drawn_uniformly_for_every_round_by_the_seed() -> None:
    fed, again, other = (
        fleet(10, fraction=0.3),
        fleet(10, fraction=0.3),
        fleet(10, seed=1, fraction=0.3),
    )
    draws = [tuple(fed.participants(t)) for t in range(1000)]
    assert draws == [tuple(again.participants(t)) for t in range(1000)]
    assert draws != [tuple(other.participants(t)) for t in range(1000)]
    counts = Counter(k for chosen in draws for k in chosen)
    deviation = (1000 * 0.3 * 0.7) ** 0.5
    assert all(abs(counts[k] - 300) < 4 * deviation for k in range(10))
    assert len(set(draws)) > 100  # of 120 sets of three


@pytest.mark.parametrize(
    ("work", "per_epoch", "batches"),
    [
        (LocalWork(), 7, 7), (LocalWork(epochs=3), 7, 21), (LocalWork(steps=5), 7, 5),
        (LocalWork(epochs=3, limit=4), 7, 4), (LocalWork(epochs=2, limit=0.5), 7, 7),
        (LocalWork(steps=1, limit=0.1), 7, 1), (LocalWork(limit=0.29), 100, 29),
    ],
)  # fmt: skip
def test_a_session_has_so_many_batches(work: LocalWork, per_epoch: int, batches: int) -> None:
    assert work.batches(per_epoch) == batches


@pytest.mark.parametrize(
    ("work", "key"),
    [
        ({"clients_per_round": 0}, "model.clients_per_round"),
        ({"clients_per_round": 2, "fraction": 0.5}, "model.clients_per_round"),
    ],
)  # fmt: skip
def test_work_that_cannot_be_is_refused(work: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        LocalWork(**work).check(10)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("group", "key"),
    [
        (ClientGroup(1, mlp, rate=0.0), "rate"),
        (ClientGroup(1, nn.Linear(2, 2)), "model"),
        (ClientGroup(1, partial(nn.Linear, 4, 3), level="b"), "level"),
    ],
)
def test_groups_that_cannot_be_are_refused(group: ClientGroup, key: str) -> None:
    with pytest.raises(UserError) as caught:
        group.check(3)
    assert caught.value.key == f"model.clients.3.{key}"


def build(model: Any, *, position: int = 0, seed: int = 0, **settings: Any) -> L.LightningModule:
    data = random_data([6])
    return ClientGroup(1, model, **settings).build(data, position=position, seed=seed)


def test_a_model_is_given_what_it_takes() -> None:
    net = build(mlp, rate=0.5).net
    assert isinstance(net, MLP)
    assert [m.weight.shape for m in net.layers if isinstance(m, nn.Linear)] == [(3, 4), (3, 3)]
    assert isinstance(build(partial(nn.Linear, 4, 3)).net, nn.Linear)  # takes none of it


def test_what_is_linked_from_the_data_may_not_be_written_otherwise() -> None:
    with pytest.raises(UserError, match=r"clients\.0\.model\.init_args\.num_classes: 7"):
        build(partial(MLP, num_classes=7))
    build(partial(MLP, num_classes=3, input_shape=[4]))


def test_a_models_own_complaint_names_its_group() -> None:
    with pytest.raises(UserError, match=r"model\.clients\.2\.model: .*unexpected keyword"):
        build(partial(MLP, widht=3), position=2)  # type: ignore[call-arg]


def test_initial_values_follow_the_seed_and_the_position_alone() -> None:
    torch.manual_seed(1)
    one = build(mlp).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = build(mlp).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    name = "net.layers.1.weight"
    assert torch.equal(one[name], again[name])
    assert not torch.equal(one[name], build(mlp, position=1).state_dict()[name])
    assert not torch.equal(one[name], build(mlp, seed=1).state_dict()[name])


@pytest.mark.parametrize("algorithm", [FedAvg, partial(FedAvg, buffers="local"), HeteroFL])
def test_rows_on_the_host_train_to_the_same_bits(algorithm: Any) -> None:
    servers = []
    for host in (False, True):
        data = random_data([5, 3, 9, 4, 6], batch_size=2)
        optimizer = partial(SGD, lr=0.1, momentum=0.9)
        settings: Any = {"optimizer": optimizer, "host_rows": host, "side_by_side": "off"}
        fed = fleet_of([ClientGroup(5, mlp)], algorithm(), data, **settings)
        for t in range(2):
            run_round(fed, t)
        assert isinstance(fed.algorithm, FedAvg | HeteroFL)
        servers.append(fed.algorithm.model.floats)
    assert torch.equal(*servers)


def served(clients: int) -> tuple[Fleet, FedAvg]:
    algorithm = FedAvg()
    data = random_data([3] * clients, features=3)
    fed = fleet_of([ClientGroup(clients, partial(nn.BatchNorm1d, 3))], algorithm, data)
    return fed, algorithm


def values_of(fed: Fleet, client: int) -> dict[str, float]:
    views = fed.groups[0].layout.floats.views(fed.row(client).floats)
    return {name.removeprefix("net."): float(view.mean()) for name, view in views.items()}


def test_what_is_sent_later_is_added_to_what_was_sent_before() -> None:
    """Everything of one model, then the parameters of another."""
    fed, algorithm = served(1)
    other = fed.new_model()
    algorithm.model.floats.fill_(1.0)
    other.floats.fill_(2.0)
    fed.open_round()
    fed.send(algorithm.model, [0])
    parameters = [e.name for e in other.layout.floats.entries[: other.layout.parameters]]
    fed.send(other, [0], tensors=parameters)
    assert values_of(fed, 0) == {
        "weight": 2.0, "bias": 2.0, "running_mean": 1.0, "running_var": 1.0,
    }  # fmt: skip


def test_a_client_has_what_the_model_was_when_it_was_sent() -> None:
    fed, algorithm = served(2)
    algorithm.model.floats.fill_(1.0)
    fed.open_round()
    fed.send(algorithm.model, [0, 1])
    fed.row(0).floats.fill_(5.0)
    fed.merge([0], into=algorithm.model)
    assert algorithm.model.floats[0] == 5.0
    assert values_of(fed, 1)["weight"] == 1.0


def test_a_client_that_did_not_train_does_not_trouble_the_next_round() -> None:
    """Sent to in one round, which is then given up; the next round has other participants."""
    fed, algorithm = served(3)
    fed.open_round()
    fed.send(algorithm.model, [0, 1])
    fed.close_round()
    fed.open_round()
    fed.send(algorithm.model, [2])
    fed.train([2], 1)
    fed.merge([2], into=algorithm.model)
    assert torch.equal(algorithm.model.floats, fed.row(2).floats)


@pytest.mark.parametrize("number", [np.float32, torch.tensor])
def test_weights_of_any_type_are_whole_in_a_sum(number: Any) -> None:
    """Else the sum would depend on the placement of clients."""
    fed, algorithm = served(2)
    fed.send(algorithm.model, [0, 1])
    means = []
    for given in (number, lambda weight: float(number(weight))):
        fed.row(0).floats.fill_(1 / 3)
        fed.row(1).floats.fill_(-7.1)
        fed.merge([0, 1], into=algorithm.model, weights={0: given(0.1), 1: given(0.3)})
        means.append(algorithm.model.floats.clone())
    assert torch.equal(*means)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_cannot_be_is_refused(weight: float) -> None:
    fed, algorithm = served(2)
    fed.send(algorithm.model, [0, 1])
    refused = partial(pytest.raises, UserError, match=f"a weight of {weight} for client 1")
    with refused():
        fed.merge([0, 1], into=algorithm.model, weights={0: 1.0, 1: weight})
    with refused():
        values = {k: torch.ones(1) for k in range(2)}
        fed.average(values, [0, 1], into=torch.zeros(1), weights={0: 1.0, 1: weight})


@pytest.mark.parametrize("weights", ["uniform", "samples", {0: 0.5, 1: 0.25, 2: 1.0, 3: 0.0}])
def test_a_mean_of_tensors_is_weighted_and_has_the_same_bits_on_any_ranks(weights: Any) -> None:
    sizes = [3, 1, 5, 2]
    values = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    factors = {"uniform": [1, 1, 1, 1], "samples": sizes}.get(str(weights), [2, 1, 4, 0])
    total = torch.zeros(500, dtype=torch.float64)
    for factor, value in zip(factors, values, strict=True):
        total += factor * value.double()
    expected = (total / sum(factors)).float()

    for world in (1, 2, 3):
        data = [random_data(sizes) for _ in range(world)]
        fleets = [fleet_of([ClientGroup(4, mlp)], Standalone(), own) for own in data]

        def mean(ranks: Ranks, world: int = world, fleets: list[Fleet] = fleets) -> Tensor:
            fed = fleets[ranks.rank]
            fed.ranks, fed.places.ranks = ranks, ranks
            fed.places.owner = {client: client % world for client in range(4)}
            own_values = {client: values[client] for client in fed.mine(range(4))}
            found = torch.full((500,), 7.0)
            assert fed.average(own_values, range(4), into=found, weights=weights) == [0, 1, 2, 3]
            return found

        for found in [mean(Ranks(CPU))] if world == 1 else on_ranks(world, mean):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_collected_does_not_train_on(world: int) -> None:
    data = [random_data([4, 4]) for _ in range(world)]
    fleets = [fleet_of([ClientGroup(2, mlp)], Standalone(), own) for own in data]

    def work(ranks: Ranks) -> dict[int, dict[str, Any]]:
        fed = fleets[ranks.rank]
        fed.ranks, fed.places.owner = ranks, {0: 0, 1: world - 1}
        rows = {k: fed.row(k).floats for k in fed.mine(range(2))}
        found = fed.collect({k: {"row": row, "host": row.numpy()} for k, row in rows.items()})
        for row in rows.values():
            row.zero_()
        return found

    for found in [work(Ranks(CPU))] if world == 1 else on_ranks(world, work):
        for client in range(2):
            row = found[client]["row"]
            assert row.any(), "it is not what it was"
            assert torch.equal(row, torch.from_numpy(found[client]["host"]))
            assert row.untyped_storage().nbytes() == row.nbytes


@pytest.mark.parametrize("world", [1, 3])
def test_jobs_run_once_and_their_errors_reach_all_ranks(world: int) -> None:
    ran: list[int] = []

    def job(number: int) -> int:
        ran.append(number)
        if number == 7:
            raise ArithmeticError("7")
        return number**2

    def work(ranks: Ranks) -> list[int]:
        fed = Fleet.__new__(Fleet)
        fed.ranks = ranks
        results = fed.once(partial(job, number) for number in range(20))
        found = [next(results) for _ in range(7)]
        with pytest.raises(ArithmeticError):
            next(results)
        return found

    each = [work(Ranks(CPU))] if world == 1 else on_ranks(world, work)
    assert each == [[number**2 for number in range(7)]] * world
    assert sorted(ran) == list(range(8 if world == 1 else 9))  # as many at a time as ranks


def test_a_row_on_the_host_is_evaluated_in_a_copy() -> None:
    """On a GPU the module could not compute with the row itself."""
    fed = fleet_of([ClientGroup(2, mlp)], Standalone(), random_data([5, 3]), host_rows=True)
    row = fed.row(1).floats
    row.copy_(torch.arange(len(row)))
    with torch.inference_mode():
        first = next(fed.bind(1).parameters())
    assert torch.equal(first.flatten(), row[: first.numel()])
    assert first.data_ptr() != row.data_ptr()
    assert not first.is_inference()
    assert next(fed.bind(0).parameters()).data_ptr() == first.data_ptr()  # one for all


def test_a_module_with_an_optimiser_of_its_own_keeps_its_rate() -> None:
    class Own(Line):
        def configure_optimizers(self) -> SGD:
            return SGD(self.parameters(), lr=0.5)

    trained = []
    for model in (Own, Line):
        data = data_of(torch.eye(2), torch.zeros(2).long(), [[0, 1]])
        fed = fleet_of([ClientGroup(1, partial(model, (8.0, 4.0)))], Standalone(), data)
        fed.plan = RoundPlan(lr=0.25)  # of the round
        run_round(fed, 0)
        trained.append(fed.row(0).floats[:2].tolist())
    assert trained == [[4.0, 2.0], [6.0, 3.0]]


@pytest.mark.parametrize(
    ("rows_together", "calls"), [(100, 1), (3, 2), (1, 4)], ids=["together", "in_parts", "alone"]
)
def test_a_part_of_the_model_goes_to_rows_that_lie_apart_in_few_calls(
    monkeypatch: pytest.MonkeyPatch, rows_together: int, calls: int
) -> None:
    algorithm = LGFedAvg(global_layers=1)
    fed = fleet_of([ClientGroup(9, mlp)], algorithm, random_data([3] * 9))
    layout = fed.groups[0].layout
    monkeypatch.setattr(
        "lightfed.api.fleet._SENT_TOGETHER", rows_together * fed.groups[0].store.row_bytes
    )
    taken: list[Row] = []
    take = fed.coverages.take

    def counted(*arguments: Any) -> None:
        taken.append(arguments[-1])
        take(*arguments)

    monkeypatch.setattr(fed.coverages, "take", counted)
    before = {client: fed.row(client).clone() for client in range(9)}
    algorithm.model.floats.fill_(7.0)
    shared = {entry.name for entry in algorithm.model.layout.floats}

    fed.send(algorithm.model, [0, 3, 4, 8])

    assert len(taken) == calls
    for client in range(9):
        tensors = layout.floats.views(fed.row(client).floats)
        own = layout.floats.views(before[client].floats)
        for name, values in tensors.items():
            is_sent = client in (0, 3, 4, 8) and name in shared
            expected = torch.full_like(values, 7.0) if is_sent else own[name]
            assert torch.equal(values, expected)
