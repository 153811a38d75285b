"""The proximal term: by hand, at mu = 0, and as PFLlib applies it (golden/baselines)."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Adam
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedprox import FedProx
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import SessionContext
from lightfed.local.session import Work
from lightfed.networks.mlp import MLP
from tests.small import GOLDEN, Line, data_of, fleet_of, random_data, run_round


def test_a_step_beyond_the_first_round_is_held_to_what_was_received() -> None:
    rate = 0.25
    mu = 2.0
    x = torch.tensor([1.0, 2.0])
    data = data_of(x[None], torch.tensor([1]), [[0]])
    algorithm = FedProx(mu=mu)
    fleet = fleet_of(
        [ClientGroup(1, Line)], algorithm, data, optimizer=partial(SGD, lr=rate), epochs=2
    )

    w = torch.zeros(2)
    for t in range(3):
        run_round(fleet, t)
        received = w.clone()
        for _ in range(2):
            gradient = (w @ x - 1) * x
            w = w - rate * (gradient + mu * (w - received))
    assert algorithm.model.floats[:2].tolist() == w.tolist()


@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.1, momentum=0.9), partial(Adam, lr=0.01)])
def test_mu_zero_is_fedavg(optimizer: Any) -> None:
    def trained(algorithm: FedAvg) -> Tensor:
        group = ClientGroup(4, partial(MLP, hidden=(6,), dropout=0.3))
        data = random_data([5, 9, 4, 7], batch_size=3)
        fleet = fleet_of([group], algorithm, data, optimizer=optimizer, fraction=0.6, clip=1.0)
        for t in range(3):
            run_round(fleet, t)
        return algorithm.model.floats

    fedavg = trained(FedAvg())
    assert torch.equal(trained(FedProx(mu=0.0)), fedavg)
    assert not torch.equal(trained(FedProx(mu=0.5)), fedavg)


def test_a_frozen_parameter_has_no_anchor() -> None:
    class Half(Line):
        def __init__(self) -> None:
            super().__init__((1.0, 1.0))
            self.frozen = nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
            self.written = ["frozen"]  # in the row, as a step may write it

    data = data_of(torch.tensor([[1.0, 2.0]]), torch.tensor([1]), [[0]])
    algorithm = FedProx(mu=1.0)
    fleet = fleet_of([ClientGroup(1, Half)], algorithm, data, epochs=2)
    run_round(fleet, 0)

    tensors = algorithm.model.layout.floats.views(algorithm.model.floats)
    assert tensors["frozen"].tolist() == [7.0, 7.0, 7.0]
    assert tensors["w"].tolist() != [1.0, 1.0]


class Golden(nn.Module):
    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5))
        self.head = nn.Linear(5, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


def test_the_proximal_step_is_that_of_pfllib() -> None:
    settings = json.loads((GOLDEN / "baselines/htfllib.json").read_text())["fedprox"]
    golden = load_file(GOLDEN / "baselines/htfllib.safetensors")
    x = golden["x"]
    y = golden["y"]
    batch_size = settings["batch"]
    algorithm = FedProx(mu=settings["mu"])
    fleet = fleet_of(
        [ClientGroup(1, Golden)],
        algorithm,
        data_of(x, y, [range(len(y))], classes=4, batch_size=batch_size),
        optimizer=partial(SGD, lr=settings["lr"]),
    )
    fleet.send(algorithm.model, [0])

    # The server's model, and the client's in the middle of a session.
    state = fleet.groups[0]
    row = fleet.row(0)
    received = state.layout.floats.views(algorithm.model.floats)
    before = state.layout.floats.views(row.floats)
    for position, name in enumerate(received):
        received[name].copy_(golden[f"fedprox/global/{position}"])
        before[name].copy_(golden[f"fedprox/before/{name.removeprefix('net.')}"])

    # One session from there, pulled to the server's model.
    fleet.bind(0)
    context = SessionContext(fleet, 0, 0, state, row, received=algorithm.model.floats)
    assert algorithm.local_penalty is not None
    batches = list(zip(x.split(batch_size), y.split(batch_size), strict=True))
    work = Work(
        0,
        batches * settings["epochs"],
        len(batches),
        lr=None,
        seed=0,
        hook=None,
        proximal=algorithm.local_penalty.proximal(context),
    )
    assert state.session is not None
    state.session.train(row, work)

    after = state.layout.floats.views(row.floats)
    for name, w in after.items():
        recorded = name.removeprefix("net.")
        # Official code in float32 whose sums are in another order; four steps of rate .1.
        assert torch.allclose(w, golden[f"fedprox/after/{recorded}"], rtol=0.0, atol=1e-6), name
        assert (w - golden[f"fedprox/before/{recorded}"]).abs().max() > 1e-3
