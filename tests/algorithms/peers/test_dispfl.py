"""DisPFL's oracle, and the identities that its paper implies."""

import logging
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightfed_kernels import Layout, popcount, unpack_mask
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
    dispfl = StartsOfDisPFL(Full(), density=1.0, rounds=3)
    fedavg = FedAvg("uniform")
    peers = fleet(dispfl)
    with_server = fleet(fedavg)
    for t in range(3):
        run_round(peers, t)
        sent = fedavg.model.floats  # what clients of this round start from
        for start in dispfl.starts.values():
            torch.testing.assert_close(start, sent, rtol=0, atol=1e-6)
        run_round(with_server, t)


STAR = Adjacency(
    [
        [0, 1, 1, 1, 1],
        [1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
    ]
)


@pytest.mark.parametrize("topology", [Ring(), TimeVarying(2), STAR])
def test_a_static_mask_of_density_one_is_dpsgd(topology: Any) -> None:
    sparse = fleet(DisPFL(topology, density=1.0, static=True))
    dense = fleet(DPSGD(topology))
    for t in range(3):
        of_sparse = run_round(sparse, t)
        of_dense = run_round(dense, t)
        assert torch.equal(rows(sparse), rows(dense))
        assert of_sparse["bytes_up"] == of_dense["bytes_up"] > 0
        assert of_sparse["flops"] == of_dense["flops"]


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
    distribution = "erk" if erk else "uniform"
    algorithm = method(
        TimeVarying(2), density=density, distribution=distribution, prune_rate=rate, rounds=3
    )
    fed = fleet(algorithm)
    layout = fed.groups[0].layout.floats
    shapes = [entry.shape for entry in layout]
    for t in range(3):
        run_round(fed, t)
        for client, words in algorithm.masks.items():
            share = density[client % len(density)]
            densities = erk_densities(shapes, share) if erk else [share] * len(shapes)
            mask = unpack_mask(words)
            assert weights_per_tensor(mask, layout) == active_counts(shapes, densities)
            assert not fed.row(client).floats[~mask].any()
        assert torch.isfinite(rows(fed)).all()


def weights_per_tensor(mask: Tensor, layout: Layout) -> list[int]:
    """Return how many elements of every tensor a mask (P,) covers."""
    counts = []
    for entry in layout:
        counts.append(int(mask[entry.offset : entry.offset + entry.numel].sum()))
    assert sum(counts) == int(mask.sum())
    return counts


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


def changes_of_masks(algorithm: DisPFL, rounds: int) -> list[int]:
    """Return how many elements of all masks change in each round."""
    fed = fleet(algorithm)
    changes = []
    for t in range(rounds):
        before = dict(algorithm.masks)
        run_round(fed, t)
        after = algorithm.masks
        changes.append(sum(int(popcount(before[k] ^ after[k])) for k in after))
    return changes


def test_masks_change_as_the_cosine_says_and_not_at_all_where_they_are_static() -> None:
    assert changes_of_masks(DisPFL(Ring(), 0.3, static=True), 3) == [0, 0, 0]

    # alpha_t: nothing before the first search, then .5, .43, .25, .07 of the weights at most.
    changes = changes_of_masks(DisPFL(Ring(), 0.3, rounds=4), 5)
    assert changes[0] == 0
    assert changes[1] > changes[2] > changes[3] > changes[4] > 0


@pytest.mark.parametrize(("rounds", "of_run"), [(4, 100), (4, None), (None, 4)])
def test_the_cosine_ends_with_its_rounds_or_else_with_the_run(
    rounds: int | None, of_run: int | None
) -> None:
    algorithm = DisPFL(Ring(), 0.3, "uniform", static=True, rounds=rounds)
    fed = fleet(algorithm)
    fed.rounds = of_run

    # In the middle of 4 rounds: .5 / 2 (1 + cos(pi / 2)), a quarter of the weights, rounded up.
    weights = active_counts([(16, 4), (16,), (3, 16), (3,)], [0.3] * 4)
    quarters = [-(-count // 4) for count in weights]
    assert algorithm.drops(fed, 2) == dict.fromkeys(algorithm.masks, quarters)

    for t in (4, 5):
        for counts in algorithm.drops(fed, t).values():
            assert counts == [0, 0, 0, 0]


def test_an_inactive_client_trains_from_its_own_model() -> None:
    algorithm = StartsOfDisPFL(Full(), 0.5, active=0.5, static=True)
    fed = fleet(algorithm)
    times_inactive = 0
    for t in range(6):
        before = rows(fed).clone()
        senders = algorithm.all_senders(fed, t)
        metrics = run_round(fed, t)
        assert metrics["participants"] == len(SIZES)

        for client in range(len(SIZES)):
            if senders[client]:
                continue
            times_inactive += 1
            assert torch.equal(algorithm.starts[client], before[client])
            assert not torch.equal(fed.row(client).floats, before[client])
            assert not any(client in heard for heard in senders.values())
    assert 0 < times_inactive < 6 * len(SIZES)


def with_statistics(algorithm: Algorithm) -> Fleet:
    """Return two clients whose network has BatchNorm statistics."""
    x = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    parts = [range(0, 10), range(10, 20)]
    data = data_of(x, torch.arange(20) % 10, parts, classes=10, batch_size=5)
    return fleet_of([ClientGroup(2, NormNet)], algorithm, data)


def test_statistics_are_refused_unless_their_average_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"buffers, such as net\.layers\.1\.running_mean"):
        with_statistics(DisPFL(Ring(), static=True))


def test_statistics_are_averaged_over_those_that_are_heard_if_asked() -> None:
    algorithm = StartsOfDisPFL(Ring(), 0.5, static=True, buffers="average")
    fed = with_statistics(algorithm)
    run_round(fed, 0)
    layout = fed.groups[0].layout
    first_buffer = layout.floats.span(layout.parameters)
    statistics = rows(fed)[:, first_buffer:].clone()
    assert statistics.count_nonzero() == 2 * 2 * 6  # mean and variance, of six channels

    run_round(fed, 1)
    for start in algorithm.starts.values():
        torch.testing.assert_close(start[first_buffer:], statistics.mean(0))
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
    # Its neighbors in the ring hear it, but what they do not cover does not reach them.
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
    algorithm = DisPFL(Full(), [0.25, 1.0], "uniform", static=True)
    fed = fleet(algorithm, sizes=[8, 8])
    metrics = run_round(fed, 0)

    shapes = [(16, 4), (16,), (3, 16), (3,)]  # weight and bias of two layers
    sparse = active_counts(shapes, [0.25] * 4)
    dense = active_counts(shapes, [1.0] * 4)
    # Three passes of 8 samples; a weight of a layer is a multiplication and an addition.
    assert metrics["flops"] == 3 * 8 * 2 * (sparse[0] + sparse[2] + dense[0] + dense[2])

    # Four bytes a value, and the words of 32 bits of the sparse client's mask.
    words = sum(-(-prod(shape) // 32) for shape in shapes)
    package_of_sparse = 4 * sum(sparse) + 4 * words
    package_of_dense = 4 * sum(dense)
    up = fed.ledger.totals[:, fed.ledger.UP].tolist()
    down = fed.ledger.totals[:, fed.ledger.DOWN].tolist()
    assert up == [package_of_sparse, package_of_dense]
    assert down == [package_of_dense, package_of_sparse]


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
    before = rows(fed).clone()
    mean = before.mean(0)
    drops = algorithm.drops(fed, 1)
    masks = {client: unpack_mask(words) for client, words in algorithm.masks.items()}

    run_round(fed, 1)
    for client, old_mask in masks.items():
        # All but the smallest weights of every tensor are kept.
        kept = old_mask.clone()
        for entry, count in zip(fed.groups[0].layout.floats, drops[client], strict=True):
            columns = slice(entry.offset, entry.offset + entry.numel)
            sizes = torch.where(kept[columns], before[client, columns].abs(), torch.inf)
            smallest = sizes.argsort(stable=True)[:count]
            kept[columns][smallest] = False

        new_mask = unpack_mask(algorithm.masks[client])
        assert not (kept & ~new_mask).any()
        has_grown = new_mask & ~old_mask
        assert has_grown.any()
        start = algorithm.starts[client]
        torch.testing.assert_close(start, torch.where(new_mask, mean, 0.0), rtol=0, atol=1e-7)


def test_dpsgd_is_among_the_participants() -> None:
    fed = fleet(DPSGD(Full()), fraction=0.4)
    before = rows(fed).clone()
    chosen = fed.participants(1)
    assert len(chosen) == 2
    assert run_round(fed, 1)["participants"] == 2

    row_bytes = 4 * fed.groups[0].layout.floats.numel
    sent = fed.ledger.totals[:, fed.ledger.UP]
    for client in range(len(SIZES)):
        has_changed = not torch.equal(fed.row(client).floats, before[client])
        assert has_changed == (client in chosen)
        assert sent[client] == (row_bytes if client in chosen else 0)
