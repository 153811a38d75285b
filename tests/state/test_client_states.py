"""The state of many clients as matrices, written and read by different numbers of ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightfed.algorithms.dispfl import DisPFL
from lightfed.algorithms.standalone import Standalone
from lightfed.api.fleet import Fleet
from lightfed.distributed.collectives import Ranks
from lightfed.local.client_group import ClientGroup
from lightfed.models import MLP
from lightfed.runs import checkpoint
from lightfed.state.client_state import by_client
from lightfed.topology.topology import Ring
from tests.promises.stopping.checkpoints import together
from tests.small import CPU, random_data

SIZES = [5, 9, 4, 16, 7, 7, 12]
METHODS: dict[str, Any] = {
    "dense": Standalone,
    "masked": partial(DisPFL, Ring(), [0.5, 1.0, 0.3], static=True),
}


def fleet(ranks: Ranks, name: str = "dense") -> Fleet:
    """Clients of two widths, or of one with masks."""
    data = random_data(SIZES)
    data.prepare(clients=len(SIZES), seed=0, device=CPU)
    widths = (5,) if name == "masked" else (5, 6)
    counts = (7,) if name == "masked" else (3, 4)
    groups = [
        ClientGroup(count, partial(MLP, hidden=(width,)))
        for count, width in zip(counts, widths, strict=True)
    ]
    made = Fleet(groups, METHODS[name](), data, ranks=ranks)
    if name != "masked":
        made.keep("own")
    return made


def fill(fed: Fleet) -> None:
    """Give every client of this rank values of its own."""
    for client in fed.mine(range(fed.clients)):
        row = fed.row(client).floats
        row.add_(client * (row != 0))
        if "own" in fed.kept and client != 3:
            fed.kept["own"][client] = torch.full((1 + client % 2,), float(client))


def everything(fed: Fleet) -> dict[int, list[Tensor]]:
    states = by_client(fed.states() or {})
    return {k: [v.clone() for v in state.values()] for k, state in states.items()}


def test_what_is_kept_does_not_train_on() -> None:
    """As MOON keeps a client's last model: the row is trained further in the next round."""
    fed = fleet(Ranks(CPU))
    row = fed.row(1).floats
    fed.kept["own"][1] = row[:4]
    before = row[:4].clone()
    row.add_(1.0)
    assert torch.equal(fed.kept["own"][1], before)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("world", [1, 3])
def test_two_ranks_write_what_others_read(name: str, world: int, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"

    def write(ranks: Ranks) -> dict[int, list[Tensor]]:
        fed = fleet(ranks, name)
        fill(fed)
        checkpoint.save({checkpoint.CLIENTS: fed.states()}, path, ranks)
        return everything(fed)

    def read(ranks: Ranks) -> dict[int, list[Tensor]]:
        fed = fleet(ranks, name)
        if "own" in fed.kept:
            fed.kept["own"].update({k: torch.ones(4) for k in fed.mine(range(7))})
        fed.load_states(checkpoint.load(path, ranks)[checkpoint.CLIENTS])
        return everything(fed)

    written = {k: v for part in together(2, write) for k, v in part.items()}  # type: ignore[union-attr]
    found = {k: v for part in together(world, read) for k, v in part.items()}  # type: ignore[union-attr]
    assert sorted(written) == sorted(found) == list(range(len(SIZES)))
    for client, tensors in written.items():
        assert len(tensors) == len(found[client])
        assert all(map(torch.equal, tensors, found[client]))
