"""DisPFL, My-1 and My-2 against whole runs of the released code and its fork (golden/dispfl)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightfed_kernels import pack_mask, select_by_magnitude, unpack_mask
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR
from typing_extensions import override

from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.peers.my1 import My1
from lightfed.algorithms.peers.my2 import My2
from lightfed.algorithms.peers.sparsity import active_counts, erk_densities
from lightfed.algorithms.topology.topology import Ring
from lightfed.api.fleet import Fleet
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import SessionContext
from lightfed.local.local_work import RoundPlan
from lightfed.local.session import Work
from tests.algorithms.peers.dispfl_cases import (
    CLIENTS,
    Net,
    Recorded,
    Starts,
    data_in_order,
    federation,
    plant,
    row_of,
    vectors,
)
from tests.small import GOLDEN, data_of, fit, fleet_of, run_round

ABOUT = json.loads((GOLDEN / "dispfl/loops.json").read_text())
LOOPS = ["loop_dispfl_grad", "loop_dispfl_random", "loop_full", "loop_my1", "loop_my2"]


class ByGradient(Starts, DisPFL):
    pass


class LowestIndex(Starts, DisPFL):
    """Where the released code draws, the recorded run took the lowest index."""

    @override
    def growth(self, fed: Fleet, client: int, t: int) -> Tensor | int:
        return torch.zeros(self.segments.size)


class RecordedMy1(Starts, My1):
    pass


class RecordedMy2(Starts, My2):
    @override
    def others(self, fed: Fleet, free: Tensor, counts: Tensor, client: int, t: int) -> Tensor:
        none = torch.zeros(self.segments.size)
        return select_by_magnitude(none, free, counts, self.segments, largest=True)


CLASSES: dict[str, Any] = {
    "loop_dispfl_grad": partial(ByGradient, regrow="gradient"),
    "loop_full": partial(ByGradient, regrow="gradient"),
    "loop_dispfl_random": LowestIndex,
    "loop_my1": RecordedMy1,
    "loop_my2": RecordedMy2,
}


@pytest.mark.parametrize("name", LOOPS)
def test_golden_training_loop(name: str) -> None:
    about = ABOUT[name]
    golden = vectors(name)
    algorithm = CLASSES[name](Recorded(about["neighbour_choice"]), rounds=about["rounds"])
    fleet = federation(algorithm, golden, about)
    layout = fleet.groups[0].layout
    for t in range(about["rounds"]):
        fleet.plan = RoundPlan(lr=about["lr"] * about["lr_decay"] ** t)
        run_round(fleet, t)

        for client in range(CLIENTS):
            prefix = f"r{t}/{client}"
            mask = row_of(golden, f"{prefix}/train_mask", layout) != 0
            assert torch.equal(unpack_mask(algorithm.masks[client]), mask), prefix
            start = row_of(golden, f"{prefix}/start", layout)
            torch.testing.assert_close(algorithm.starts[client], start, rtol=0, atol=1e-6)
            end = row_of(golden, f"{prefix}/end", layout)
            torch.testing.assert_close(fleet.row(client).floats, end, rtol=0, atol=1e-6)

        for client, words in masks_after(algorithm, fleet, t).items():
            next_mask = row_of(golden, f"r{t}/{client}/next_mask", layout) != 0
            assert torch.equal(unpack_mask(words), next_mask), (t, client)


@dataclass(frozen=True)
class Session:
    """What a session started and ended with, and its mask."""

    client: int
    mask: Tensor
    start: Tensor
    end: Tensor


class Whole(ByGradient):
    """Starts with the recorded values, and keeps what every session starts and ends with."""

    sessions: list[Session]

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        plant(self, fed, vectors("loop_dispfl_grad"))
        self.sessions = []

    @override
    def session_end(self, s: SessionContext) -> None:
        super().session_end(s)
        mask = unpack_mask(self.masks[s.client])
        start = self.starts[s.client]
        self.sessions.append(Session(s.client, mask, start, s.row.floats.clone()))


def test_golden_training_loop_through_fit(tmp_path: Path) -> None:
    """The whole program: the schedule of the learning rate, clipping and the log are the run's."""
    about = ABOUT["loop_dispfl_grad"]
    golden = vectors("loop_dispfl_grad")
    algorithm = Whole(Recorded(about["neighbour_choice"]), regrow="gradient")
    federation = Federation(
        algorithm,
        [ClientGroup(CLIENTS, Net)],
        optimizer=partial(SGD, lr=about["lr"], weight_decay=about["wd"]),
        lr_schedule=partial(ExponentialLR, gamma=about["lr_decay"]),
        local_epochs=about["epochs"],
    )
    rounds: int = about["rounds"]
    data = data_in_order(golden, about)
    fit(federation, data, tmp_path, rounds=rounds, gradient_clip_val=float(about["clip"]))

    layout = federation.fleet.groups[0].layout
    sessions = iter(algorithm.sessions)
    for t in range(rounds):
        for client in range(CLIENTS):
            session = next(sessions)
            assert session.client == client
            prefix = f"r{t}/{client}"
            mask = row_of(golden, f"{prefix}/train_mask", layout) != 0
            assert torch.equal(session.mask, mask), prefix
            start = row_of(golden, f"{prefix}/start", layout)
            torch.testing.assert_close(session.start, start, rtol=0, atol=1e-6)
            end = row_of(golden, f"{prefix}/end", layout)
            torch.testing.assert_close(session.end, end, rtol=0, atol=1e-6)
    assert next(sessions, None) is None


def masks_after(algorithm: DisPFL, fleet: Fleet, t: int) -> Mapping[int, Tensor]:
    """Return the masks of the next round, where they follow from this one."""
    if isinstance(algorithm, My2):
        return algorithm.masks
    if isinstance(algorithm, My1):
        return algorithm.next
    return algorithm.next_masks(fleet, t + 1)


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_golden_masked_sgd(momentum: float) -> None:
    golden = vectors("masked_sgd")
    about = json.loads((GOLDEN / "dispfl/meta.json").read_text())[f"masked_sgd_mom{momentum}"]
    x = golden["x"]
    y = golden["y"]
    batches = list(zip(x.split(about["batch"]), y.split(about["batch"]), strict=True))
    fleet = fleet_of(
        [ClientGroup(2, Net)],
        DisPFL(Ring(), static=True),
        data_of(x, y, [range(10), range(10, 20)], classes=5),
        optimizer=partial(SGD, lr=1.0, momentum=momentum, weight_decay=about["wd"]),
        clip=about["clip"],
    )
    state = fleet.groups[0]
    mask = row_of(golden, "mask", state.layout)
    row = fleet.row(0)
    row.floats.copy_(row_of(golden, "init", state.layout) * mask)

    work = Work(
        0,
        batches * about["epochs"],
        len(batches),
        lr=about["lr"],
        seed=0,
        hook=None,
        mask=pack_mask(mask != 0),
    )
    assert state.session is not None
    state.session.train(row, work)
    after = row_of(golden, f"after_mom{momentum}", state.layout)
    # Six long steps, to weights of 8: measured 6e-7. What that makes of the gradient: 8e-6.
    torch.testing.assert_close(row.floats, after, rtol=0, atol=3e-6)

    gradient = state.session.gradient(row, batches[0])
    screened = row_of(golden, f"screen_grad_mom{momentum}", state.layout)
    torch.testing.assert_close(gradient.abs(), screened.abs(), rtol=0, atol=4e-5)


ERK = json.loads((GOLDEN / "dispfl/erk.json").read_text())


@pytest.mark.parametrize("model", ERK)
def test_golden_erk_densities(model: str) -> None:
    shapes = [tuple(shape) for shape in ERK[model]["params"].values()]
    recorded_densities = [key for key in ERK[model] if key not in ("params", "total")]
    assert len(recorded_densities) >= 5
    for overall in recorded_densities:
        expected = ERK[model][overall]
        densities = erk_densities(shapes, float(overall))
        assert densities == pytest.approx(list(expected["density"].values()), rel=1e-12)
        assert active_counts(shapes, densities) == list(expected["active"].values())
