"""FedBuff against recorded runs of FLSim, and without delays."""

from functools import partial
from itertools import islice, takewhile

import pytest
import torch
from torch import Tensor
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
    size = about["buffer_size"]
    averages = about["reduction"] == "WEIGHTED_AVERAGE"
    algorithm = FedBuff(size, at_once=True, weights="samples" if averages else "uniform")
    run = Recorded("fedbuff", name, algorithm)
    algorithm.exponent = about["staleness_weight"]["exponent"] or 0.0
    algorithm.beta = about["server"]["momentum"]
    algorithm.server_lr = about["server"]["lr"]
    if not averages:
        # FLSim sums where the paper divides by K, and gives a staleness of 1 a weight of 1.
        algorithm.server_lr *= size * 2**algorithm.exponent

    # Pairs of what happens, and to which client: some start, then one sends, and so on.
    events = list(about["events"])

    def idle(clock: VirtualClock) -> list[int]:
        """Return the clients that start before the next one sends."""
        starting = list(takewhile(lambda event: event[0] == "start", events))
        return sorted(client for _, client in starting)

    def advance(clock: VirtualClock, delays: Tensor) -> list[int]:
        """Forget the starts, and return the client that sends."""
        del events[: len(delays)]
        _, sender = events.pop(0)
        return [sender]

    monkeypatch.setattr(VirtualClock, "idle", property(idle))
    monkeypatch.setattr(VirtualClock, "advance", advance)
    uploads = iter(about["uploads"])
    for t, step in enumerate(about["server_steps"]):
        if step["flush"]:  # of a buffer that is not full, at the end
            continue
        run_round(run.fleet, t)
        close(algorithm.model.floats, run.row(f"r{t}/server"))

        *_, last = islice(uploads, size)
        close(algorithm.updates[last["client"]], run.row(f"upload{last['upload']}/delta"))


def trained(
    algorithm: FedAvg | FedBuff, clients: int = 3, devices: Devices | None = None
) -> Tensor:
    """Return the server's model after three rounds."""
    group = ClientGroup(clients, partial(MLP, hidden=(6,)))
    data = random_data([5, 9, 4, 7][:clients])
    fed = fleet_of([group], algorithm, data, optimizer=partial(SGD, lr=0.1), devices=devices)
    for t in range(3):
        run_round(fed, t)
    return algorithm.model.floats


def test_a_buffer_of_all_clients_without_delays_is_fedavg() -> None:
    alike = Devices(delay=Constant(1.0))
    uniform = trained(FedBuff(3), devices=alike)
    torch.testing.assert_close(uniform, trained(FedAvg("uniform")))
    by_samples = trained(FedBuff(3, weights="samples"), devices=alike)
    torch.testing.assert_close(by_samples, trained(FedAvg()))


@pytest.mark.parametrize("wrong", [{"beta": 1.0}, {"buffer": 4}])
def test_wrong_arguments_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=rf"init_args\.{next(iter(wrong))}"):
        trained(FedBuff(**wrong))  # type: ignore[arg-type]
