"""FedBuff against recorded runs of FLSim, and without delays."""

from functools import partial

import pytest
import torch
from torch.optim import SGD

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbuff import FedBuff
from lightfed.devices.delays import Constant
from lightfed.devices.devices import Devices
from lightfed.devices.event_clock import VirtualClock
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.algorithms.recorded import Recorded, close, settings_of
from tests.small import fleet_of, random_data, run_round


@pytest.mark.parametrize("name", ["mlp_poly_sum", "mlp_poly_average", "mlp_constant_momentum"])
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    about = settings_of("fedbuff", name)
    size, averages = about["buffer_size"], about["reduction"] == "WEIGHTED_AVERAGE"
    algorithm = FedBuff(size, at_once=True, weights="samples" if averages else "uniform")
    run = Recorded("fedbuff", name, algorithm)
    algorithm.exponent = about["staleness_weight"]["exponent"] or 0.0
    algorithm.beta = about["server"]["momentum"]
    algorithm.server_lr = about["server"]["lr"]
    if not averages:  # FLSim sums where the paper divides by K; a staleness of 1 has a weight of 1
        algorithm.server_lr *= size * 2**algorithm.exponent
    events = list(about["events"])

    def starting(clock: VirtualClock) -> list[int]:
        """The clients that start before the next one sends."""
        first = next(i for i, (kind, _) in enumerate(events) if kind != "start")
        return sorted(client for _, client in events[:first])

    def advance(clock: VirtualClock, delays: torch.Tensor) -> list[int]:
        del events[: len(delays)]
        return [events.pop(0)[1]]

    monkeypatch.setattr(VirtualClock, "idle", property(starting))
    monkeypatch.setattr(VirtualClock, "advance", advance)
    sent = iter(about["uploads"])
    for t, step in enumerate(about["server_steps"]):
        if step["flush"]:  # of a buffer that is not full, at the end
            continue
        run_round(run.fleet, t)
        close(algorithm.model.floats, run.row(f"r{t}/server"))
        last = [next(sent) for _ in range(size)][-1]
        close(algorithm.updates[last["client"]], run.row(f"upload{last['upload']}/delta"))


def fleet(
    algorithm: FedAvg | FedBuff, clients: int = 3, devices: Devices | None = None
) -> torch.Tensor:
    """The server's model after three rounds."""
    group = ClientGroup(clients, partial(MLP, hidden=(6,)))
    data = random_data([5, 9, 4, 7][:clients])
    fed = fleet_of([group], algorithm, data, optimizer=partial(SGD, lr=0.1), devices=devices)
    for t in range(3):
        run_round(fed, t)
    return algorithm.model.floats


def test_a_buffer_of_all_clients_without_delays_is_fedavg() -> None:
    same = Devices(delay=Constant(1.0))
    torch.testing.assert_close(fleet(FedBuff(3), devices=same), fleet(FedAvg("uniform")))
    weighted = FedBuff(3, weights="samples")
    torch.testing.assert_close(fleet(weighted, devices=same), fleet(FedAvg()))


@pytest.mark.parametrize("wrong", [{"beta": 1.0}, {"buffer": 4}])
def test_wrong_arguments_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=rf"init_args\.{next(iter(wrong))}"):
        fleet(FedBuff(**wrong))  # type: ignore[arg-type]
