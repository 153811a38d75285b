"""`Fleet.collect`: values of all ranks' clients, which do not change with the clients."""

import pickle

import numpy as np
import torch

from lightfed.algorithms.fedavg import FedAvg
from lightfed.api.client_rows import copied, pickled
from lightfed.local.client_group import ClientGroup
from tests.small import Line, data_of, fleet_of


class Pair:
    """Something of an author's own with a tensor in it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_copies_share_no_memory_however_deep_they_lie() -> None:
    row = torch.arange(6.0)
    values = {
        1: [row[:2], {"deep": (row[2:4], "word", 3)}],
        0: Pair(row[4:]),
        2: np.ones(2),
    }

    copies = copied(values)
    row.zero_()
    values[2][:] = 0  # type: ignore[index]

    assert copies[1][0].tolist() == [0.0, 1.0]  # type: ignore[index]
    assert copies[1][1]["deep"][0].tolist() == [2.0, 3.0]  # type: ignore[index]
    assert copies[1][1]["deep"][1:] == ("word", 3)  # type: ignore[index]
    assert copies[0].tensor.tolist() == [4.0, 5.0]  # type: ignore[attr-defined]
    assert copies[2].tolist() == [1.0, 1.0]  # type: ignore[attr-defined]


def test_a_copy_is_what_other_ranks_get() -> None:
    row = torch.arange(6.0, requires_grad=True)
    values = {"view": row[1:3], "whole": row, "none": None}

    copy = copied(values)
    sent = pickle.loads(pickled(values))

    assert copy.keys() == sent.keys()
    for name in ("view", "whole"):
        assert torch.equal(copy[name], sent[name])
        assert copy[name].requires_grad == sent[name].requires_grad
        assert copy[name].untyped_storage().nbytes() == 4 * copy[name].numel()


def test_one_rank_collects_copies_in_the_order_of_the_clients() -> None:
    data = data_of(
        torch.ones(4, 2), torch.zeros(4, dtype=torch.int64), [range(2), range(2, 4)], batch_size=1
    )
    fleet = fleet_of([ClientGroup(2, Line)], FedAvg(), data)
    value = torch.ones(2)

    collected = fleet.collect({1: value, 0: 2 * value})
    value.zero_()

    assert list(collected) == [0, 1]
    assert collected[1].tolist() == [1.0, 1.0]
