"""Clients with low-rank adapters on a frozen base, trained side by side."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.lora.adapter_rule import AdapterRule
from lightfed.algorithms.lora.feddpa import FedDPA
from lightfed.algorithms.lora.fedexlora import FedExLoRA
from lightfed.algorithms.lora.fedsb import FedSB
from lightfed.algorithms.lora.fedsvd import FedSVD
from lightfed.algorithms.lora.ffalora import FFALoRA
from lightfed.algorithms.lora.rankmean import RankMean
from lightfed.algorithms.lora.ravan import RAVAN
from lightfed.algorithms.lora.rolora import RoLoRA
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.packs.packing import AUTO_OF_TINY
from lightfed.utils.errors import UserError
from tests.small import fleet_of, random_data, run_round

RANKS = (3, 2, 1)
CLIENTS = 6  # of a group: the fewest that train side by side on a CPU
SIZES = [5, 9, 4, 16, 7, 12] * len(RANKS)


class LoRALinear(nn.Module):
    """A layer of a user's: W x + c + s B A x, where W and c are frozen. Down is A, up is B."""

    packs = True

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.zeros(rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.scaling = 4 / rank

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * (x @ self.down.T @ self.up.T)


def network(rank: int) -> nn.Module:
    """Return two layers with adapters of this rank, on the same base for all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(LoRALinear(4, 8, rank), nn.Tanh(), LoRALinear(8, 3, rank))


def federation(rule: Callable[..., AdapterRule], side_by_side: Any) -> Fleet:
    """Return clients of several ranks, with batches of unlike sizes."""
    groups = []
    for rank in RANKS:
        groups.append(ClientGroup(CLIENTS, partial(network, rank), name=f"r{rank}"))

    return fleet_of(
        groups,
        rule(adapters={"down": "up"}),
        random_data(SIZES, batch_size=4),
        optimizer=partial(SGD, lr=0.1),
        side_by_side=side_by_side,
        epochs=2,
    )


@pytest.mark.parametrize(
    "rule",
    [
        RankMean, FedExLoRA, FFALoRA, RoLoRA, FedSVD, FedDPA, FedSB, partial(RAVAN, head_rank=1),
    ],
)  # fmt: skip
def test_clients_of_unlike_ranks_train_in_packs_as_alone(rule: Callable[..., AdapterRule]) -> None:
    """FedExLoRA adds to the base after every round, and FFALoRA has one factor in the base.

    RoLoRA trains one factor at a time; FedSVD has a factor in the rows that no session trains.
    FedDPA, FedSB and RAVAN put modules of their own before the factors.
    """
    packed = federation(rule, "auto")
    alone = federation(rule, "off")
    assert list(packed.training.side_by_side.values()) == [AUTO_OF_TINY] * len(RANKS)

    for t in range(3):
        metrics = run_round(packed, t)
        expected = run_round(alone, t)
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)

    for client in range(len(SIZES)):
        row = packed.row(client).floats
        torch.testing.assert_close(row, alone.row(client).floats, rtol=1e-5, atol=1e-5)

    for group, expected_group in zip(packed.groups, alone.groups, strict=True):
        for name, tensor in group.live.frozen.items():
            expected_tensor = expected_group.live.frozen[name]
            torch.testing.assert_close(tensor, expected_tensor, rtol=1e-5, atol=1e-5)


def test_a_pack_leaves_the_base_as_it_is() -> None:
    packed = federation(RankMean, "auto")
    before = {name: tensor.clone() for name, tensor in packed.groups[0].live.frozen.items()}
    run_round(packed, 0)
    for name, tensor in packed.groups[0].live.frozen.items():
        assert torch.equal(tensor, before[name])


def test_a_base_that_is_to_be_trained_after_all_is_refused() -> None:
    """In a pack nobody would train it, and nobody would say so."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 3))

    sizes = [4] * CLIENTS
    made = fleet_of([ClientGroup(CLIENTS, build)], FedAvg(), random_data(sizes, batch_size=4))
    assert list(made.training.side_by_side.values()) == [AUTO_OF_TINY]
    run_round(made, 0)

    made.groups[0].module.net[0].weight.requires_grad_(True)
    with pytest.raises(UserError, match="was frozen when the run began"):
        run_round(made, 1)
