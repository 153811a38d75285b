"""FedBCD's momentum from session to session: of a device, of all in turn, or of none."""

from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedbcd.fedbcd import DECAY, FedBCD
from lightfed.algorithms.fedbcd.fedbcdi import FedBCDI
from lightfed.algorithms.fedbcd.hierarchy import Phase
from lightfed.api.fleet import Fleet
from lightfed.lab.previews.dry_run import PlannedRanks
from lightfed.local.client_group import ClientGroup
from lightfed.state.client_state import by_client
from lightfed.utils.errors import UserError
from tests.algorithms.fedbcd.fedbcd_cases import (
    DEVICES,
    RUNS,
    SERVERS,
    events,
    federation,
    network,
    recorded_phase,
)
from tests.algorithms.fedbcd.fedbcd_clouds import SIZES, fleet, mlp
from tests.algorithms.fedbcd.test_golden_fedbcd import RecordedBCD
from tests.algorithms.peers.dispfl_cases import row_of
from tests.small import CPU, data_of, fleet_of, random_data, run_round

KEPT = 0.9  # of a buffer in a step
SHARED = "sync_m09_sharedbuf"


class Slope(L.LightningModule):
    """A loss whose gradient is 1 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.w.sum()


class Scheduled(FedBCD):
    """One server, all of whose devices train: round t has K = 1 + t mod 5 for all."""

    @override
    def phase(self, fed: Fleet, server: int, t: int) -> Phase:
        devices = [*range(fed.clients)]
        units, delays = dict.fromkeys(devices, 1 + t % 5), dict.fromkeys(devices, 1.0)
        return Phase(devices, devices, units, delays)


def moved(momentum: Any, *, rounds: int, devices: int = 1) -> list[Tensor]:
    """Where the devices are after every round."""
    data = data_of(
        torch.zeros(devices, 2), torch.zeros(devices, dtype=torch.long),
        [[k] for k in range(devices)],
    )  # fmt: skip
    algorithm = Scheduled(1, devices, gamma=0.0, momentum=momentum)
    fed = fleet_of(
        [ClientGroup(devices, Slope)],
        algorithm,
        data,
        optimizer=partial(SGD, lr=1.0, momentum=KEPT),
    )
    found = [torch.zeros(devices)]
    for t in range(rounds):
        run_round(fed, t)
        found.append(torch.stack([fed.row(k).floats[0] for k in range(devices)]))
    return found


def way(first: int, steps: int) -> float:
    """From step `first` of a buffer on, n = 1, 2, ...: sum over n of (1 - .9^n) / (1 - .9)."""
    return sum((1 - KEPT**n) / (1 - KEPT) for n in range(first, first + steps))


def test_at_constant_gradient_kept_momentum_moves_a_model_4_7_times_as_far() -> None:
    """K in 1 .. 5 in turn: a full buffer goes 10 a step, 150; new ones go way(1, K) each, 31.7."""
    gone = {}
    for momentum in ("device", "session"):
        found = [float(x) for x in moved(momentum, rounds=60)]
        taken = 0
        for t, (before, after) in enumerate(pairwise(found)):
            steps = 1 + t % 5
            first = 1 + taken if momentum == "device" else 1
            assert before - after == pytest.approx(way(first, steps), rel=1e-4)
            taken += steps
        gone[momentum] = found[-6] - found[-1]
    ratio = 15 / (1 - KEPT) / sum(way(1, steps) for steps in range(1, 6))
    assert ratio == pytest.approx(4.73, abs=0.005)
    assert gone["device"] / gone["session"] == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize("momentum", ["shared", "device"])
def test_the_steps_of_the_released_loop(momentum: Any) -> None:
    """One optimiser of torch for all devices, as in the notebooks, or one for each."""
    algorithm = RecordedBCD(SERVERS, 2, server_lr=1.0, momentum=momentum, compatibility=True)
    fed, vectors = federation(algorithm, SHARED, vectors_of="sync_m0")
    layout = fed.groups[0].layout
    nets = [network() for _ in range(1 if momentum == "shared" else DEVICES)]
    settings = {name: RUNS[SHARED][key] for name, key in (("lr", "lr"), ("weight_decay", "wd"))}
    optimizers = [SGD(net.parameters(), momentum=KEPT, **settings) for net in nets]
    names = list(network().state_dict())
    start = [vectors[f"init/{name}"] for name in names]
    z, x = [v.clone() for v in start], [[v.clone() for v in start] for _ in range(DEVICES)]
    for t in range(RUNS[SHARED]["rounds"]):
        stated = events(SHARED, t)
        for server in range(SERVERS):
            phase = recorded_phase(stated, server, offline=False)
            for device in phase.active:
                place = device % len(nets)
                net, optimizer = nets[place], optimizers[place]
                net.load_state_dict(dict(zip(names, x[device], strict=True)))
                for k in range(phase.units[device]):
                    batch = [vectors[f"data/{device}/{n}"].split(8)[k] for n in "xy"]
                    loss = nn.functional.cross_entropy(net(batch[0]), batch[1].long())
                    pairs = zip(net.parameters(), z, strict=True)
                    penalty = sum(((p - c) ** 2).sum() for p, c in pairs)
                    optimizer.zero_grad()
                    (loss + penalty).backward()
                    optimizer.step()
                x[device] = [p.detach().clone() for p in net.parameters()]
        mean = [torch.stack(parts).mean(0) for parts in zip(*x, strict=True)]
        z = [a - DECAY**t * (a - b) for a, b in zip(z, mean, strict=True)]
        algorithm.stated = events(SHARED, t)
        run_round(fed, t)
        for device in range(DEVICES):
            expected = row_of(
                {f"x/{n}": v for n, v in zip(names, x[device], strict=True)}, "x", layout
            )
            torch.testing.assert_close(fed.row(device).floats, expected, rtol=0, atol=1e-6)


def test_a_device_hands_on_what_fedbcd_i_trains_with() -> None:
    sgd = partial(SGD, lr=0.05, momentum=KEPT)
    feds = [fleet(FedBCDI(3, 1, 2, momentum=m), optimizer=sgd) for m in ("device", "session")]
    for t in range(2):
        for fed in feds:
            run_round(fed, t)
    kept, restarted = (fed.algorithm for fed in feds)
    assert isinstance(kept, FedBCDI)
    assert isinstance(restarted, FedBCDI)
    trained = {k for t in range(2) for n in range(3) for k in kept.phase(feds[0], n, t).available}
    assert set(feds[0].optimizers or ()) == trained
    assert feds[1].optimizers is None


def test_a_shared_buffer_lies_with_the_device_that_had_it_last() -> None:
    algorithm = FedBCD(1, 6, momentum="shared")
    fed = fleet(algorithm, optimizer=partial(SGD, lr=0.05, momentum=KEPT))
    run_round(fed, 0)
    assert list(fed.optimizers) == [5]
    row = 4 * fed.groups[0].layout.floats.numel
    stored = [fed.stored_bytes(k) for k in range(6)]
    assert stored == [row] * 5 + [row + 4 * len(fed.optimizers[5])]
    states = fed.states()
    assert states is not None
    assert [k for k, state in by_client(states).items() if "optimizer" in state] == [5]


@pytest.mark.usefixtures("unchecked_data")
def test_a_shared_buffer_that_is_no_number_is_dropped() -> None:
    """Device 1 has a feature that is no number; 2, which is next, begins without momentum."""
    x = torch.zeros(3, 4)
    x[1] = float("nan")
    data = data_of(x, torch.zeros(3, dtype=torch.long), [[0], [1], [2]], classes=3)
    algorithm = FedBCD(1, 3, momentum="shared")
    sgd = partial(SGD, lr=0.05, momentum=KEPT)
    fed = fleet_of([ClientGroup(3, mlp)], algorithm, data, optimizer=sgd)
    metrics = run_round(fed, 0)
    assert metrics["excluded"] == 1.0
    assert list(fed.optimizers) == [2]
    assert fed.optimizers[2].isfinite().all()


def test_a_shared_buffer_needs_one_rank() -> None:
    def ranks(count: int, momentum: Any) -> None:
        data = random_data(SIZES)
        data.prepare(clients=6, seed=0, device=CPU)
        algorithm, ranks = FedBCD(3, 1, momentum=momentum), PlannedRanks(count)
        Fleet([ClientGroup(6, mlp)], algorithm, data, ranks=ranks)

    ranks(1, "shared")
    ranks(2, "device")
    with pytest.raises(UserError) as refused:
        ranks(2, "shared")
    assert refused.value.key == "model.algorithm.init_args.momentum"
    assert "trainer.devices: 1" in refused.value.fix
