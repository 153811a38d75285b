"""FedAPEN: what is trained, what is held out, when the share is learned, what travels."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightfed.algorithms.pfedmoe import mutual
from lightfed.algorithms.pfedmoe.fedapen import FedAPEN
from lightfed.algorithms.pfedmoe.fml import FML
from lightfed.api.fleet import Fleet
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.models.client_module import ClientModule
from lightfed.networks.mlp import MLP
from lightfed.state.costs import Ledger
from tests.core.models.client_cases import descend
from tests.small import fit, fleet_of, random_data, run_round

SIZES = [9, 6, 12]
large, larger, small = (partial(MLP, hidden=hidden) for hidden in ((7,), (8, 5), (3,)))


def fleet(algorithm: FedAPEN | FML, **settings: Any) -> Fleet:
    """Clients that take whole epochs as one batch, so that their order does not matter."""
    groups = [ClientGroup(1, large), ClientGroup(2, larger)]
    return fleet_of(
        groups, algorithm, random_data(SIZES), optimizer=partial(SGD, lr=0.1), **settings
    )


def clients_of(fed: Fleet) -> list[mutual.FedAPEN]:
    """Copies of the clients' networks, with the values of their rows."""
    found = []
    for client in range(len(SIZES)):
        module = fed.bind(client)
        assert isinstance(module, ClientModule)
        assert isinstance(module.net, mutual.FedAPEN)
        found.append(deepcopy(module.net))
    return found


def kept(fed: Fleet, client: int) -> tuple[Tensor, Tensor]:
    """All that a client trains on, as one batch."""
    rng = torch.Generator().manual_seed(0)
    ((x, y),) = fed.data.batches(
        fed.data.train_plan(client, order=rng, augment=None, limit=None, t=0)
    )
    return x, y


@pytest.mark.parametrize("side_by_side", ["off", 2])
def test_a_client_that_starts_over_forgets_its_share(side_by_side: Any) -> None:
    fed = fleet(FedAPEN(small, hold_out=0.3, passes=0), side_by_side=side_by_side)
    for client in range(3):
        views = fed.state(client).layout.floats.views(fed.row(client).floats)
        views["net.share"].fill_(0.9)
        if client == 1:
            next(v for name, v in views.items() if "private" in name).fill_(torch.nan)
    run_round(fed, 0)
    shares = [float(client.share) for client in clients_of(fed)]
    assert shares == pytest.approx([0.9, 0.5, 0.9])


@pytest.mark.parametrize("learn", ["received", "aggregated"])
def test_rounds_learn_train_and_aggregate_in_this_order(learn: Any) -> None:
    """Or train, aggregate and learn, with what has been aggregated."""
    algorithm = FedAPEN(small, hold_out=0.3, share_lr=0.05, passes=3, learn=learn)
    fed = fleet(algorithm)
    mirror = clients_of(fed)
    server = {n: value.clone() for n, value in mirror[0].shared.state_dict().items()}

    def receive_and_learn() -> None:
        for k, client in enumerate(mirror):
            before = float(client.share)
            client.shared.load_state_dict(server)
            client.learn_share(list(fed.data.held_out_batches(k)), lr=0.05, passes=3)
            assert float(client.share) != before

    for client in mirror:
        client.shared.load_state_dict(server)
    for t in range(3):
        if learn == "received":
            receive_and_learn()
        for k, client in enumerate(mirror):
            x, y = kept(fed, k)
            assert len(y) == SIZES[k] - round(0.3 * SIZES[k])
            descend(client, x, y, batch=len(y), lr=0.1, epochs=1)
        for name in server:
            server[name] = torch.stack([c.shared.state_dict()[name] for c in mirror]).mean(0)
        if learn == "aggregated":
            receive_and_learn()
        run_round(fed, t)
        for mine, theirs in zip(clients_of(fed), mirror, strict=True):
            for name, value in theirs.state_dict().items():
                torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_learning_with_what_is_aggregated_takes_every_version_that_is_received() -> None:
    algorithm = FedAPEN(small, learn="aggregated")
    fed = fleet(algorithm, clients_per_round=2)
    size = 4 * algorithm.model.layout.floats.numel
    present: set[int] = set()
    received = [0] * len(SIZES)
    for t in range(5):
        clients = fed.participants(t)
        for client in clients:
            received[client] += (client not in present) + 1
        present = set(clients)
        assert run_round(fed, t)["bytes_up"] == 2 * size
        assert fed.ledger.totals[:, Ledger.DOWN].tolist() == [n * size for n in received]
        # What a participant is tested with is what the server has now.
        for client in clients:
            views = fed.state(client).layout.floats.views(fed.row(client).floats)
            for name, value in algorithm.model.layout.floats.views(algorithm.model.floats).items():
                assert torch.equal(views[name], value)
    assert 2 * 5 < sum(received) < 2 * 2 * 5  # some had the present one, some had not


def test_learning_costs_a_forward_pass_of_the_hold_out() -> None:
    flops = [run_round(fleet(FedAPEN(small, passes=n)), 0)["flops"] for n in (0, 1, 7)]
    fed = fleet(FedAPEN(small))
    forward = [fed.state(k).flops for k in range(3)]
    assert [round(0.05 * n) for n in SIZES] == [0, 0, 1]  # and one at least
    assert flops[1] - flops[0] == flops[2] - flops[0] == sum(forward)


def test_the_share_is_in_clients_csv(tmp_path: Path) -> None:
    federation = Federation(
        FedAPEN(small, share_lr=0.02), [ClientGroup(3, large)], optimizer=partial(SGD, lr=0.1),
        store="host",
    )  # fmt: skip
    trainer = fit(federation, random_data(SIZES), tmp_path, rounds=2)
    lines = (tmp_path / "run/clients.csv").read_text().splitlines()
    column = lines[0].split(",").index("private_share")
    logged = [float(line.split(",")[column]) for line in lines[-3:]]
    shares = [float(client.share) for client in clients_of(federation.fleet)]
    assert logged == pytest.approx(shares)
    assert len({0.5, *shares}) == 4
    assert "personal/private_share" in trainer.callback_metrics
