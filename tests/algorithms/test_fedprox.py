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
    data = data_of(torch.tensor([[1.0, 2.0]]), torch.tensor([1]), [[0]])
    fleet = fleet_of(
        [ClientGroup(1, Line)], FedProx(mu=2.0), data, optimizer=partial(SGD, lr=0.25), epochs=2
    )
    w = torch.zeros(2)
    x = torch.tensor([1.0, 2.0])
    for t in range(3):
        run_round(fleet, t)
        received = w.clone()
        for _ in range(2):
            w = w - 0.25 * ((w @ x - 1) * x + 2.0 * (w - received))
    assert isinstance(fleet.algorithm, FedProx)
    assert fleet.algorithm.model.floats[:2].tolist() == w.tolist()


@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.1, momentum=0.9), partial(Adam, lr=0.01)])
def test_mu_zero_is_fedavg(optimizer: Any) -> None:
    rows = []
    for algorithm in (FedAvg(), FedProx(mu=0.0), FedProx(mu=0.5)):
        group = ClientGroup(4, partial(MLP, hidden=(6,), dropout=0.3))
        data = random_data([5, 9, 4, 7], batch_size=3)
        fleet = fleet_of([group], algorithm, data, optimizer=optimizer, fraction=0.6, clip=1.0)
        for t in range(3):
            run_round(fleet, t)
        rows.append(algorithm.model.floats)
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


def test_a_frozen_parameter_has_no_anchor() -> None:
    class Half(Line):
        def __init__(self) -> None:
            super().__init__((1.0, 1.0))
            self.frozen = nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
            self.written = ["frozen"]  # in the row, as a step may write it

    data = data_of(torch.tensor([[1.0, 2.0]]), torch.tensor([1]), [[0]])
    fleet = fleet_of([ClientGroup(1, Half)], FedProx(mu=1.0), data, epochs=2)
    run_round(fleet, 0)
    assert isinstance(fleet.algorithm, FedProx)
    views = fleet.algorithm.model.layout.floats.views(fleet.algorithm.model.floats)
    assert views["frozen"].tolist() == [7.0] * 3
    assert views["w"].tolist() != [1.0, 1.0]


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
    x, y = golden["x"], golden["y"]
    algorithm = FedProx(mu=settings["mu"])
    data = data_of(x, y, [range(len(y))], classes=4, batch_size=settings["batch"])
    optimizer = partial(SGD, lr=settings["lr"])
    fleet = fleet_of([ClientGroup(1, Golden)], algorithm, data, optimizer=optimizer)
    fleet.send(algorithm.model, [0])
    state = fleet.groups[0]
    row = fleet.row(0)
    names = [e.name.removeprefix("net.") for e in state.layout.floats]
    received = state.layout.floats.views(algorithm.model.floats).values()
    start = state.layout.floats.views(row.floats).values()
    for position, (name, w_t, w) in enumerate(zip(names, received, start, strict=True)):
        w_t.copy_(golden[f"fedprox/global/{position}"])
        w.copy_(golden[f"fedprox/before/{name}"])
    fleet.bind(0)
    s = SessionContext(fleet, 0, 0, state, row, received=algorithm.model.floats)
    assert algorithm.local_penalty is not None
    batches = list(zip(x.split(settings["batch"]), y.split(settings["batch"]), strict=True))
    work = Work(
        0,
        batches * settings["epochs"],
        len(batches),
        lr=None,
        seed=0,
        hook=None,
        proximal=algorithm.local_penalty.proximal(s),
    )
    assert state.session is not None
    state.session.train(row, work)
    for name, w in zip(names, start, strict=True):
        # Official code in float32 whose sums are in another order; four steps of rate .1.
        assert torch.allclose(w, golden[f"fedprox/after/{name}"], rtol=0.0, atol=1e-6), name
        assert (w - golden[f"fedprox/before/{name}"]).abs().max() > 1e-3
