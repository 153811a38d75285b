"""Sessions on a device that is not the CPU: nothing is left on the wrong side."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lightfed.algorithms.fedavg import FedAvg
from lightfed.lightning_fits.session_trainer import SessionHost
from lightfed.local.client_group import ClientGroup
from tests.packs.federations import CASES, CLIENTS, after, fleet
from tests.pretend import DEVICE, There, pretended_device
from tests.promises.parity.cases import CASES as PARITY
from tests.small import fleet_of, random_data, run_round

QUICK = {
    ("clipped", CLIENTS),
    ("vmap", CLIENTS),
    ("static bn", CLIENTS),
    ("my2", "off"),
    ("aspg", "off"),
    ("phases", "off"),
}
# Module.to shares a tied parameter on a card, but not between types of tensors.
SHARED = [
    pytest.param(name, side, marks=() if (name, side) in QUICK else pytest.mark.matrix)
    for name in CASES
    for side in ("off", CLIENTS)
    if name != "tied"
]


@cache
def on_the_device(
    name: str, side_by_side: Any, **more: Any
) -> tuple[Tensor, dict[str, float], list[str]]:
    """Rows and metrics after two rounds, and the reads that they took."""
    with pytest.MonkeyPatch.context() as patches, pretended_device(patches) as reads:
        made = fleet(name, side_by_side, device=DEVICE, **more)
        reads.clear()  # those of set-up
        rows, metrics = after(made)
        packed = next(iter(made.training.side_by_side.values()))
        assert packed == (CLIENTS if side_by_side == CLIENTS else "model.side_by_side: off")
    return (rows.here if isinstance(rows, There) else rows), metrics, reads


def in_sessions(reads: list[str]) -> list[str]:
    """Without those of a report or a tally, and of an algorithm at the end of a session."""
    within = [read for read in reads if "sessions < train" in read]
    after = ("_read", "_tallied", "session_end")
    return [read for read in within if not any(name in read for name in after)]


@pytest.mark.parametrize(("name", "side_by_side"), SHARED)
def test_every_case_has_the_numbers_of_a_cpu(name: str, side_by_side: Any) -> None:
    found, metrics, reads = on_the_device(name, side_by_side)
    assert in_sessions(reads) == []
    rows, expected = after(fleet(name, side_by_side))
    torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-6)
    assert metrics == pytest.approx(expected, rel=1e-5)


@dataclass(frozen=True)
class Traffic:
    """What goes between the host and the device in a round, after one that has set all up."""

    reads: list[str]
    copies: list[str]


def traffic(name: str, side_by_side: Any, **more: Any) -> Traffic:
    with pytest.MonkeyPatch.context() as patches, pretended_device(patches) as reads:
        made = fleet(name, side_by_side, device=DEVICE, **more)
        run_round(made, 0)
        reads.clear()
        There.copies.clear()
        run_round(made, 1)
        return Traffic([*reads], [*There.copies])


ROUNDS = ["mlp", "static bn", "fedprox", "scaffold", "vmap", "late"]


@pytest.mark.parametrize("side_by_side", ["off", 3, CLIENTS])
@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_reads_once_and_never_waits_for_a_copy(name: str, side_by_side: Any) -> None:
    seen = traffic(name, side_by_side)
    assert len(seen.reads) == 1, seen.reads
    assert [copy for copy in seen.copies if copy.startswith("waits")] == []
    in_sessions = [copy for copy in seen.copies if "sessions < train" in copy]
    assert [copy for copy in in_sessions if not copy.startswith("pinned")] == []


@pytest.mark.parametrize("name", ["mlp", "late"])
def test_what_a_pack_is_sent_does_not_depend_on_its_number_of_steps(name: str) -> None:
    def sent(epochs: int) -> int:
        return sum(
            "train < run_on_this_rank < _run" in copy
            for copy in traffic(name, CLIENTS, epochs=epochs).copies
        )

    assert sent(1) == sent(4) == 2  # which samples, and how many


@pytest.mark.parametrize(("name", "side_by_side"), [("my1", "off"), ("static bn", CLIENTS)])
def test_rows_of_the_host_train_on_the_device(name: str, side_by_side: Any) -> None:
    rows, metrics, _ = on_the_device(name, side_by_side)
    found, its, _ = on_the_device(name, side_by_side, host_rows=True)
    torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-6)
    assert its == pytest.approx(metrics, rel=1e-5)


@pytest.mark.parametrize("name", ["AfterTransfer", "GAN", "Anchors", "GradientNorms", "WarmsUp"])
def test_fits_have_the_numbers_of_a_cpu(name: str) -> None:
    """Modules and callbacks with hooks, of two clients each."""

    def rows(device: torch.device) -> Tensor:
        torch.manual_seed(0)
        case = PARITY[name]
        host = SessionHost(callbacks=[make() for make in case.callbacks])
        data = random_data([8, 7], features=6, classes=2, batch_size=4)
        model: Any = case.module
        made = fleet_of([ClientGroup(2, model)], FedAvg(), data, host=host, device=device)
        for t in range(2):
            run_round(made, t)
        return torch.stack([made.deployed(k).row(k).floats for k in range(2)])

    with pytest.MonkeyPatch.context() as patches, pretended_device(patches):
        there = rows(DEVICE)
    found = there.here if isinstance(there, There) else there
    torch.testing.assert_close(found, rows(torch.device("cpu")), rtol=1e-5, atol=1e-6)
