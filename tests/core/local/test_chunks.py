"""A session of round t works on chunk t mod chunks of its client's samples, and on nothing else."""

import pytest
import torch
from torch import Tensor

from lightfed.algorithms.standalone import Standalone
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.local.rank_sessions import RunClient
from lightfed.local.session import PendingReport
from tests.small import Line, data_of, fleet_of, run_round

CHUNKS = 3


def samples() -> tuple[Tensor, Tensor]:
    """Eleven of them, whose least squares differ from chunk to chunk."""
    rng = torch.Generator().manual_seed(0)
    return torch.randn(11, 2, generator=rng) / 2, torch.arange(11) % 2


def chunked(*, batch_size: int = 4, **work: int) -> Fleet:
    """Two clients of 7 and 4 samples: chunks of 3, 2, 2 and 2, 1, 1."""
    data = data_of(*samples(), [range(7), range(7, 11)], classes=2, batch_size=batch_size)
    data.chunks = CHUNKS
    return fleet_of([ClientGroup(2, Line)], Standalone(), data, **work)


def chunk(fleet: Fleet, client: int, t: int) -> tuple[Tensor, Tensor]:
    order = torch.Generator().manual_seed(0)
    ((x, y),) = fleet.data.batches(
        fleet.data.train_plan(client, order=order, augment=None, limit=None, t=t)
    )
    return x, y


def test_two_steps_a_round_are_on_the_chunk_of_the_round() -> None:
    """w <- w - lr sum (w x - y) x, over the chunk, for both local epochs."""
    fleet = chunked(epochs=2)
    expected = torch.zeros(2, 2)
    for t in range(4):
        run_round(fleet, t)
        for client in range(2):
            x, y = chunk(fleet, client, t)
            for _ in range(2):
                expected[client] -= 0.5 * (x @ expected[client] - y) @ x
            torch.testing.assert_close(fleet.row(client).floats[:2], expected[client])


def batches(fleet: Fleet, t: int) -> list[list[int]]:
    """Of each client the sizes of the batches that its session of round t has seen."""
    found: list[list[int]] = []

    def waves(mine: list[int], _: int, run: RunClient) -> list[PendingReport]:
        reports = [run(client) for client in mine]
        found.extend(report.sizes for report in reports)
        return reports

    run_round(fleet, t, waves)
    return found


LONG, SHORT = [[2, 1, 2, 1], [2, 2]], [[2, 2], [1, 1]]


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ({"epochs": 2}, [LONG, SHORT, SHORT, LONG]),
        ({"steps": 5}, [[[2, 1, 2, 1, 2], [2] * 5], [[2] * 5, [1] * 5]]),
    ],
)
def test_epochs_are_as_long_as_the_chunk_and_steps_go_round_it(
    work: dict[str, int], expected: list[list[list[int]]]
) -> None:
    fleet = chunked(batch_size=2, **work)
    assert [batches(fleet, t) for t in range(len(expected))] == expected
