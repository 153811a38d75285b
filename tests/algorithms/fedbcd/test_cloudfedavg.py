"""FedAvg and FedProx in the hierarchy: the identities with FedAvg and FedProx themselves."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.fedbcd.cloudfedavg import CloudFedAvg
from lightfed.algorithms.fedbcd.hierarchy import Phase
from lightfed.algorithms.fedprox import FedProx
from lightfed.api.fleet import Fleet
from lightfed.devices.delays import Constant
from lightfed.devices.devices import Devices
from lightfed.devices.timing import clock_of
from lightfed.local.client_group import ClientGroup
from tests.algorithms.fedbcd.fedbcd_clouds import SIZES, Counted, Normed, fleet
from tests.small import Line, data_of, fleet_of, run_round

KEY = "model.algorithm.init_args"


@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize("servers", [1, 3])
def test_all_active_for_an_epoch_is_fedavg_or_fedprox(servers: int, mu: float) -> None:
    each = len(SIZES) // servers
    clouds = CloudFedAvg(servers, each, mu=mu, steps=(2, 2), unit="epoch")
    plain = FedProx(mu, "uniform") if mu else FedAvg("uniform")
    sgd = {"optimizer": partial(SGD, lr=0.1, momentum=0.9)}
    ours, theirs = fleet(clouds, **sgd), fleet(plain, epochs=2, **sgd)
    for t in range(3):
        found, expected = run_round(ours, t), run_round(theirs, t)
        assert found["bytes_up"] == expected["bytes_up"]
        assert found["bytes_down"] == expected["bytes_down"]
        assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-6)
    torch.testing.assert_close(clouds.model.floats, plain.model.floats, rtol=0, atol=1e-6)
    assert clouds.model.floats.std() > 0.05


class Scripted(CloudFedAvg):
    script: dict[tuple[int, int], tuple[dict[int, int], float]]

    @override
    def phase(self, fed: Fleet, server: int, t: int) -> Phase:
        units, busy = self.script[t, server]
        return Phase(sorted(units), sorted(units), units, dict.fromkeys(units, busy))


def test_two_rounds_by_hand() -> None:
    """Line at x = (1, 0), y = 2, lr 1/2: any client goes half of the way to 2 in a step."""
    data = data_of(
        torch.tensor([[1.0, 0.0]]).repeat(4, 1), torch.full((4,), 2), [[0], [1], [2], [3]]
    )
    algorithm = Scripted(2, 1)
    algorithm.script = {
        (0, 0): ({1: 1}, 3.0), (0, 1): ({2: 2}, 4.0), (1, 0): ({0: 3}, 2.5), (1, 1): ({3: 1}, 1.0),
    }  # fmt: skip
    fed = fleet_of([ClientGroup(4, Line)], algorithm, data)
    found = []
    for t in range(2):
        metrics = run_round(fed, t)
        found.append((algorithm.model.floats[0].item(), metrics["virtual_time"]))
        assert metrics["participants"] == 2.0
        assert metrics["bytes_up"] == metrics["bytes_down"] == 2 * 8.0
        assert metrics["server_bytes"] == 4 * 8.0  # two means up, and the model down twice
    w = (1.0 + 1.5) / 2
    assert found == [(w, 4.0), ((2 - (2 - w) / 8 + 2 - (2 - w) / 2) / 2, 6.5)]


def test_a_session_starts_without_momentum() -> None:
    """Of ASPG: a device that trains again is at the global model, and not ahead of it."""
    data = data_of(torch.tensor([[1.0, 0.0]]), torch.tensor([4]), [[0]])
    algorithm = CloudFedAvg(1, 1, mu=1.0, steps=(1, 1))
    fed = fleet_of(
        [ClientGroup(1, Line)], algorithm, data,
        optimizer=partial(ASPG, lr=0.5, momentum=0.9, box=(-3.0, 3.0)),
    )  # fmt: skip
    found = []
    for t in range(3):
        run_round(fed, t)
        found.append(algorithm.model.floats[0].item())
    assert found == [2.0, 3.0, 3.0]  # 2 + (4 - 2) / 2, and what is beyond the box


def test_the_clock_adds_up_the_slowest_servers() -> None:
    algorithm = CloudFedAvg(3, 2, steps=(1, 4))
    devices = Devices(delay=Constant(2.0), step_delay=Constant(0.25))
    fed = fleet(algorithm, model=Normed, devices=devices)
    now = 0.0
    for t in range(4):
        most = max(k for n in range(3) for k in algorithm.phase(fed, n, t).units.values())
        now += 2.0 + 0.25 * most
        assert run_round(fed, t)["virtual_time"] == now
    assert clock_of(fed).now == now


@pytest.mark.parametrize(
    ("unit", "limit", "steps"), [("step", None, 3), ("epoch", None, 9), ("epoch", 4, 4)]
)
def test_k_counts_steps_or_epochs_within_the_limit(unit: Any, limit: Any, steps: int) -> None:
    x, y = torch.zeros(10, 2), torch.zeros(10, dtype=torch.long)
    data = data_of(x, y, [range(5), range(5, 10)], batch_size=2)
    algorithm = CloudFedAvg(1, 2, steps=(3, 3), unit=unit)
    fed = fleet_of([ClientGroup(2, Counted)], algorithm, data, limit=limit)
    Counted.steps = 0
    run_round(fed, 0)
    assert Counted.steps == 2 * steps
