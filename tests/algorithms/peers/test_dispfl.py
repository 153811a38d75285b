"""DisPFL's oracle, and the identities that its paper implies."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightfed_kernels import popcount, unpack_mask
from torch import Tensor
from torch.optim import SGD, Adam

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.peers.dpsgd import DPSGD
from lightfed.algorithms.peers.my1 import My1
from lightfed.algorithms.peers.my2 import My2
from lightfed.algorithms.peers.sparsity import active_counts, erk_densities
from lightfed.algorithms.topology.topology import Adjacency, Full, Ring, TimeVarying
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.state.client_state import by_client
from lightfed.testing.case import CLIENTS, NormNet, images
from lightfed.utils.errors import UserError
from tests.algorithms.peers.dispfl_cases import Starts
from tests.small import data_of, fleet_of, random_data, run_round

SIZES = [9, 6, 12, 7, 5]
mlp = partial(MLP, hidden=(16,))


def fleet(algorithm: Algorithm, *, sizes: list[int] = SIZES, **settings: Any) -> Fleet:
    data = random_data(sizes, batch_size=4)
    optimizer = partial(SGD, lr=0.1, weight_decay=5e-4)
    return fleet_of(
        [ClientGroup(len(sizes), mlp)], algorithm, data, **({"optimizer": optimizer} | settings)
    )


def rows(fed: Fleet) -> Tensor:
    return torch.stack([fed.row(k).floats for k in range(fed.clients)])


class StartsOfDisPFL(Starts, DisPFL):
    pass


class StartsOfMy2(Starts, My2):
    pass


def test_density_one_on_a_full_graph_is_fedavg_with_uniform_weights() -> None:
    sparse, server = fleet(StartsOfDisPFL(Full(), density=1.0, rounds=3)), fleet(FedAvg("uniform"))
    for t in range(3):
        run_round(sparse, t)
        assert isinstance(server.algorithm, FedAvg)
        assert isinstance(sparse.algorithm, StartsOfDisPFL)
        received = server.algorithm.model.floats
        for start in sparse.algorithm.starts.values():
            torch.testing.assert_close(start, received, rtol=0, atol=1e-6)
        run_round(server, t)


STAR = Adjacency([[0, 1, 1, 1, 1], *([1, 0, 0, 0, 0] for _ in range(4))])


@pytest.mark.parametrize("topology", [Ring(), TimeVarying(2), STAR])
def test_a_static_mask_of_density_one_is_dpsgd(topology: Any) -> None:
    sparse = fleet(DisPFL(topology, density=1.0, static=True))
    dense = fleet(DPSGD(topology))
    for t in range(3):
        masked, plain = run_round(sparse, t), run_round(dense, t)
        assert torch.equal(rows(sparse), rows(dense))
        assert masked["bytes_up"] == plain["bytes_up"] > 0
        assert masked["flops"] == plain["flops"]


METHODS = [DisPFL, partial(DisPFL, regrow="gradient"), My1, My2]


@pytest.mark.parametrize("method", METHODS)
@given(
    density=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=3),
    rate=st.floats(0.0, 1.0),
    erk=st.booleans(),
)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_number_of_weights_of_a_client_never_changes(
    method: Any, density: list[float], rate: float, erk: bool
) -> None:
    how = "erk" if erk else "uniform"
    algorithm = method(TimeVarying(2), density=density, distribution=how, prune_rate=rate, rounds=3)
    fed = fleet(algorithm)
    layout = fed.groups[0].layout.floats
    shapes = [entry.shape for entry in layout]
    for t in range(3):
        before = {k: mask.clone() for k, mask in algorithm.masks.items()}
        run_round(fed, t)
        for client, mask in algorithm.masks.items():
            share = density[client % len(density)]
            each = erk_densities(shapes, share) if erk else [share] * len(shapes)
            bits = unpack_mask(mask)
            found = [int(bits[e.offset : e.offset + e.numel].sum()) for e in layout]
            assert found == active_counts(shapes, each)
            assert int(popcount(mask)) == sum(found) == int(popcount(before[client]))
            outside = fed.row(client).floats[~bits]
            assert torch.equal(outside, torch.zeros_like(outside))
        assert torch.isfinite(rows(fed)).all()


@pytest.mark.parametrize("side_by_side", ["auto", "off"])
@pytest.mark.parametrize("optimizer", [ASPG, partial(Adam, lr=0.1)])
def test_weights_outside_the_mask_are_zero_after_any_optimiser(
    side_by_side: Any, optimizer: Any
) -> None:
    algorithm = DisPFL(Ring(), density=0.4, rounds=4)
    groups = [ClientGroup(CLIENTS, mlp)]
    fed = fleet_of(groups, algorithm, images(), optimizer=optimizer, side_by_side=side_by_side)
    run_round(fed, 0)
    for client, row in enumerate(rows(fed)):
        mask = unpack_mask(algorithm.masks[client])
        assert not row[~mask].any()
        assert row[mask].any()


def test_masks_change_as_the_cosine_says_and_not_at_all_where_they_are_static() -> None:
    moving, still = fleet(DisPFL(Ring(), 0.3, rounds=4)), fleet(DisPFL(Ring(), 0.3, static=True))
    changed = []
    for t in range(5):
        for fed, differ in ((moving, changed), (still, [])):
            assert isinstance(fed.algorithm, DisPFL)
            before = dict(fed.algorithm.masks)
            run_round(fed, t)
            after = fed.algorithm.masks
            differ.append(sum(int(popcount(before[k] ^ after[k])) for k in after))
            if fed is still:
                assert differ[-1] == 0
    # alpha_t: nothing before the first search, then .5, .43, .25, .07 of the weights at most.
    assert changed[0] == 0
    assert changed[1] > changed[2] > changed[3] > changed[4] > 0


def test_the_cosine_ends_with_its_rounds_or_else_with_the_run() -> None:
    for rounds, of_run in ((4, 100), (4, None), (None, 4)):
        fed = fleet(DisPFL(Ring(), 0.3, "uniform", static=True, rounds=rounds))
        fed.rounds = of_run
        assert isinstance(fed.algorithm, DisPFL)
        half = [-(-n // 4) for n in active_counts([(16, 4), (16,), (3, 16), (3,)], [0.3] * 4)]
        drops = fed.algorithm.drops(fed, 2)
        assert drops == dict.fromkeys(fed.algorithm.masks, half)  # .5 / 2 (1 + cos(pi / 2)): 1/4
        assert not any(fed.algorithm.drops(fed, t)[0][0] for t in (4, 5))


def test_an_inactive_client_trains_from_its_own_model() -> None:
    algorithm = StartsOfDisPFL(Full(), 0.5, active=0.5, static=True)
    fed = fleet(algorithm)
    idle = 0
    for t in range(6):
        before, senders = rows(fed).clone(), algorithm.all_senders(fed, t)
        metrics = run_round(fed, t)
        assert metrics["participants"] == len(SIZES)
        for client in range(len(SIZES)):
            if senders[client]:
                continue
            idle += 1
            assert torch.equal(algorithm.starts[client], before[client])
            assert not any(client in heard for heard in senders.values())
            assert not torch.equal(fed.row(client).floats, before[client])
    assert 0 < idle < 6 * len(SIZES)


def test_statistics_are_averaged_over_those_that_are_heard_if_asked() -> None:
    def case(algorithm: Algorithm) -> Fleet:
        x = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        parts = [range(0, 10), range(10, 20)]
        data = data_of(x, torch.arange(20) % 10, parts, classes=10, batch_size=5)
        return fleet_of([ClientGroup(2, NormNet)], algorithm, data)

    with pytest.raises(UserError, match=r"buffers, such as net\.layers\.1\.running_mean"):
        case(DisPFL(Ring(), static=True))
    fed = case(StartsOfDisPFL(Ring(), 0.5, static=True, buffers="average"))
    assert isinstance(fed.algorithm, StartsOfDisPFL)
    run_round(fed, 0)
    ends = rows(fed).clone()
    run_round(fed, 1)
    layout = fed.groups[0].layout
    first = layout.floats.span(layout.parameters)
    assert ends[:, first:].count_nonzero() == 2 * 2 * 6  # mean and variance, of six channels
    for start in fed.algorithm.starts.values():
        torch.testing.assert_close(start[first:], ends[:, first:].mean(0))
    assert fed.row(0).integers.tolist()[0] == 4


def test_a_client_that_diverges_starts_again_under_its_mask(
    caplog: pytest.LogCaptureFixture,
) -> None:
    algorithm = DisPFL(Ring(), 0.5, static=True)
    fed = fleet(algorithm)
    initial = fed.groups[0].initial.floats
    fed.row(2).floats[unpack_mask(algorithm.masks[2])] = float("nan")
    with caplog.at_level(logging.WARNING):
        metrics = run_round(fed, 0)
    # Its neighbours in the ring hear it, but what they do not cover does not reach them.
    assert metrics["excluded"] == 3
    for client in (1, 2, 3):
        expected = initial * unpack_mask(algorithm.masks[client])
        assert torch.equal(fed.row(client).floats, expected)
    assert torch.isfinite(rows(fed)).all()


@pytest.mark.parametrize("method", [DisPFL, My1, My2])
def test_a_client_keeps_its_values_and_masks(method: Any) -> None:
    algorithm = method(Ring(), density=0.5, distribution="uniform", rounds=2)
    fed = fleet(algorithm)
    run_round(fed, 0)
    dense = 4 * fed.groups[0].layout.floats.numel
    for client, state in by_client(fed.states() or {}).items():
        kept = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        assert kept == fed.stored_bytes(client)
        # 0.5 of the values and a bit each; My-1 keeps two masks. Padding costs bits as well.
        assert kept / dense < (0.59 if method is My1 else 0.55)


def test_flops_and_bytes_of_sparse_clients() -> None:
    densities = [0.25, 1.0]
    fed = fleet(DisPFL(Full(), densities, "uniform", static=True), sizes=[8, 8])
    sums = run_round(fed, 0)
    shapes = {"w1": (16, 4), "b1": (16,), "w2": (3, 16), "b2": (3,)}
    active = [active_counts(list(shapes.values()), [d] * 4) for d in densities]
    flops = [2 * (counts[0] + counts[2]) for counts in active]
    assert sums["flops"] == sum(3 * 8 * f for f in flops)
    words = sum(-(-int(torch.tensor(s).prod()) // 32) for s in shapes.values())
    packages = [4 * sum(active[0]) + 4 * words, 4 * sum(active[1])]
    assert fed.ledger.totals[:, fed.ledger.UP].tolist() == packages
    assert fed.ledger.totals[:, fed.ledger.DOWN].tolist() == packages[::-1]


@pytest.mark.parametrize(
    ("settings", "work", "key", "found"),
    [
        ({"density": 0.0}, {}, "density", "0.0"),
        ({"density": [0.5, 1.5]}, {}, "density", "1.5"),
        ({"active": 0.0}, {}, "active", "0.0"),
        ({"density": []}, {}, "density", "an empty list"),
        ({"prune_rate": -0.1}, {}, "prune_rate", "-0.1"),
        ({"rounds": 0}, {}, "rounds", "0"),
        ({"rounds": None}, {}, "rounds", "does not say how long the run is"),
        ({}, {"fraction": 0.5}, "model.fraction", "but all train"),
        ({}, {"clients_per_round": 2}, "model.clients_per_round", "but all train"),
        ({"topology": TimeVarying(5)}, {}, "neighbours", "5"),
        ({"topology": Adjacency([[0, 1], [1, 0]])}, {}, "topology", "2"),
    ],
)
def test_what_cannot_be_is_refused(
    settings: dict[str, Any], work: dict[str, Any], key: str, found: str
) -> None:
    with pytest.raises(UserError) as error:
        fleet(DisPFL(**({"topology": Ring(), "rounds": 2} | settings)), **work)
    assert key in error.value.key
    assert found in error.value.found


def test_two_architectures_are_refused() -> None:
    groups = [ClientGroup(2, mlp), ClientGroup(3, partial(MLP, hidden=(8,)))]
    for algorithm in (DisPFL(Ring(), rounds=1), DPSGD(Ring())):
        with pytest.raises(UserError, match="different architectures"):
            fleet_of(groups, algorithm, random_data(SIZES))


def test_my2_starts_from_the_mean() -> None:
    algorithm = StartsOfMy2(Full(), density=0.4, distribution="uniform", rounds=4)
    fed = fleet(algorithm)
    run_round(fed, 0)
    before, drops = rows(fed).clone(), algorithm.drops(fed, 1)
    masks = [unpack_mask(algorithm.masks[client]) for client in range(len(SIZES))]
    mean = before.mean(0)
    run_round(fed, 1)
    for client, kept in enumerate(masks):
        # Kept are all but the smallest of every tensor.
        for entry, count in zip(fed.groups[0].layout.floats, drops[client], strict=True):
            part = slice(entry.offset, entry.offset + entry.numel)
            sizes = torch.where(kept[part], before[client, part].abs(), torch.inf)
            kept[part][sizes.argsort(stable=True)[:count]] = False
        now = unpack_mask(algorithm.masks[client])
        assert not (kept & ~now).any()
        start = algorithm.starts[client]
        torch.testing.assert_close(start, torch.where(now, mean, 0.0), rtol=0, atol=1e-7)
        assert (now & ~kept & (before[client] == 0)).any()


def test_dpsgd_is_among_the_participants() -> None:
    fed = fleet(DPSGD(Full()), fraction=0.4)
    before, chosen = rows(fed).clone(), fed.participants(1)
    assert len(chosen) == 2
    assert run_round(fed, 1)["participants"] == 2
    row = 4 * fed.groups[0].layout.floats.numel
    sent = fed.ledger.totals[:, fed.ledger.UP]
    for client in range(len(SIZES)):
        changed = not torch.equal(fed.row(client).floats, before[client])
        assert changed == (client in chosen)
        assert sent[client] == (row if client in chosen else 0)
