"""Rules whose sessions leave a factor as it is: RoLoRA in turn, FedSVD always A."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from typing_extensions import override

from lightfed.algorithms.lora.fedsvd import FedSVD
from lightfed.algorithms.lora.rolora import RoLoRA
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.utils.errors import UserError
from tests.algorithms.lora.low_rank import NAMES, Adapted
from tests.small import fleet_of, random_data, run_round

BASE = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
DECAYED = partial(SGD, lr=0.3, momentum=0.9, weight_decay=0.1)


class Net(nn.Module):
    """A layer with an adapter, and a head."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.body = Adapted(BASE, rank, 4 / rank)
        self.head = nn.Linear(5, 3)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def federation(rule: Any, *ranks: int, **settings: Any) -> Fleet:
    """A client of each rank, which trains for three epochs."""
    groups = [
        ClientGroup(1, partial(Net, rank), name=f"client{number}")
        for number, rank in enumerate(ranks)
    ]
    settings = {"optimizer": DECAYED, "epochs": 3} | settings
    return fleet_of(groups, rule, random_data([9, 12, 7][: len(ranks)], batch_size=4), **settings)


def parts(fed: Fleet, client: int) -> dict[str, Tensor]:
    """Copies of a client's tensors, by name."""
    state = fed.state(client)
    views = state.layout.floats.views(fed.row(client).floats)
    return {name: value.clone() for name, value in views.items()}


@pytest.mark.parametrize("optimizer", [DECAYED, partial(AdamW, lr=0.1, weight_decay=0.5)])
@pytest.mark.parametrize("side_by_side", ["off", 2])
def test_what_is_frozen_has_the_same_bits_after_a_session(
    optimizer: Any, side_by_side: Any
) -> None:
    """Under weight decay, and with momentum that earlier rounds have left."""
    rule = RoLoRA(adapters=NAMES)
    groups = [ClientGroup(2, Net)]
    fed = fleet_of(
        groups, rule, random_data([8, 8], batch_size=4), optimizer=optimizer, epochs=2,
        side_by_side=side_by_side, keep_optimizer=side_by_side == "off",
    )  # fmt: skip
    for t in range(4):
        A, D = (factor.clone() for factor in rule.server_factors()[0])
        run_round(fed, t)

        trained = parts(fed, 1)
        down_moved = not torch.equal(trained["net.body.down"], A)
        up_moved = not torch.equal(trained["net.body.up"], D / 2)  # s = 2
        head_moved = not torch.equal(trained["net.head.weight"], fed.state(1).initial.floats[:15])
        assert (down_moved, up_moved, head_moved) == (t % 2 == 1, t % 2 == 0, True)


@pytest.mark.parametrize("side_by_side", ["off", 2])
def test_fedsvd_trains_b_alone_though_a_is_sent(side_by_side: Any) -> None:
    rule = FedSVD(adapters=NAMES)
    groups = [ClientGroup(2, Net)]
    data = random_data([8, 8], batch_size=4)
    fed = fleet_of(groups, rule, data, optimizer=DECAYED, side_by_side=side_by_side)
    starts = []
    for t in range(3):
        A, D = (factor.clone() for factor in rule.server_factors()[0])
        run_round(fed, t)
        trained = parts(fed, 0)
        starts.append(A)
        assert torch.equal(trained["net.body.down"], A)
        assert not torch.equal(trained["net.body.up"], D / 2)
    assert not torch.equal(starts[0], starts[1])
    torch.testing.assert_close(starts[2] @ starts[2].T, torch.eye(2))  # orthonormal rows


def test_a_period_of_two_decomposes_in_every_second_round() -> None:
    rule = FedSVD(period=2, adapters=NAMES)
    fed = federation(rule, 2, 3)
    changes = []
    for t in range(4):
        before = rule.server_factors()[0][0].clone()
        run_round(fed, t)
        changes.append(not torch.equal(rule.server_factors()[0][0], before))
    assert changes == [False, True, False, True]


def test_a_servers_weight_decay_gives_a_waiting_factor_no_momentum() -> None:
    rule = RoLoRA(adapters=NAMES)
    server = partial(SGD, lr=1.0, momentum=0.9, weight_decay=0.1)
    fed = federation(rule, 2, server_optimizer=server)
    run_round(fed, 0)
    (state,) = fed.server_step.of(rule.model).state.values()
    momentum = rule.model.layout.floats.views(state["momentum_buffer"])
    assert not momentum["net.body.down"].any()
    assert momentum["net.body.up"].any()


def test_a_servers_momentum_moves_the_factor_of_the_round_alone() -> None:
    """The other factor and its momentum wait: two rounds later they go on as if none were between.

    With a gradient g in rounds 0 and 2 the second step is 0.9 g + g, and not 0.81 g + g.
    """
    rule = RoLoRA(adapters=NAMES)
    fed = federation(rule, 2, server_optimizer=partial(SGD, lr=1.0, momentum=0.9))
    factors = []
    for t in range(3):
        before = [factor.clone() for factor in rule.server_factors()[0]]
        run_round(fed, t)
        trained = parts(fed, 0)
        sent = (trained["net.body.down"], 2 * trained["net.body.up"])
        after = [factor.clone() for factor in rule.server_factors()[0]]
        factors.append((before, sent, after))
        frozen = t % 2
        assert torch.equal(before[frozen], after[frozen])

    (D0, D1, D2, D3) = factors[0][0][1], factors[0][1][1], factors[2][0][1], factors[2][1][1]
    first_gradient = D0 - D1
    second_gradient = D2 - D3
    expected = D2 - (0.9 * first_gradient + second_gradient)
    torch.testing.assert_close(factors[2][2][1], expected, rtol=1e-5, atol=1e-6)
    assert first_gradient.abs().max() > 0.01


def test_rolora_sends_a_factor_to_those_who_do_not_have_it() -> None:
    """In round 0 nobody needs one; a client that was away for long gets both."""
    rule = RoLoRA(adapters=NAMES)
    fed = federation(rule, 2, 2, 2)
    head, a, b = 4 * 18, 4 * 2 * 4, 4 * 2 * 5  # bytes
    expected = [
        ([0, 1], {0: head, 1: head}),
        ([0], {0: head + b}),
        ([0, 1], {0: head + a, 1: head + a + b}),
        ([0, 1, 2], {0: head + b, 1: head + b, 2: head + a + b}),
    ]
    for t, (clients, sizes) in enumerate(expected):
        fed.participants = lambda t, clients=clients: clients  # type: ignore[method-assign]
        before = fed.ledger.totals.copy()
        run_round(fed, t)
        down = (fed.ledger.totals - before)[:, fed.ledger.DOWN]
        up = (fed.ledger.totals - before)[:, fed.ledger.UP]
        assert {client: down[client] for client in clients} == sizes
        assert set(up[clients]) == {head + (b if t % 2 == 0 else a)}


def test_a_round_that_merges_nothing_changes_no_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the next one does not send it."""
    rule = RoLoRA(adapters=NAMES)
    fed = federation(rule, 2)
    with monkeypatch.context() as patch:
        patch.setattr(fed, "usable", lambda client: False)
        run_round(fed, 0)
    before = fed.ledger.totals.copy()
    run_round(fed, 1)
    assert (fed.ledger.totals - before)[0, fed.ledger.DOWN] == 4 * 18


def test_a_name_that_begins_with_a_trained_one_is_refused() -> None:
    """A session's part names parameters by prefixes, and would train the frozen factor, too."""

    class Named(nn.Module):
        scaling = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4), requires_grad=False)
            self.up_a = nn.Parameter(torch.ones(2, 4))
            self.up = nn.Parameter(torch.zeros(3, 2))

        @override
        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight + self.up @ self.up_a).T

    rule = RoLoRA(adapters={"up_a": "up"})
    fed = fleet_of([ClientGroup(1, Named)], rule, random_data([8]))
    with pytest.raises(UserError, match="begins with that of another") as error:
        run_round(fed, 0)
    assert error.value.key == "model.clients"
