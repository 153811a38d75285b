"""FjORD against recorded runs of Flower's baseline, its bytes, and its refusals."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.width.fjord import FjORD
from lightfed.algorithms.width.ordered_dropout import OrderedDropout
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import SessionContext
from lightfed.networks.mlp import MLP
from lightfed.utils.counts import rounded_up
from lightfed.utils.errors import UserError
from tests.algorithms.recorded import Net, Recorded, close, settings_of
from tests.small import fleet_of, module_of, random_data, run_round


def narrow(dims: Sequence[int], rate: float = 1.0) -> Net:
    """Return the recorded perceptron with narrower hidden layers."""
    inputs, *hidden, classes = dims
    return Net([inputs, *(rounded_up(rate * width) for width in hidden), classes])


class Norms(nn.Module):
    """Two convolutions with BatchNorm and ReLU, the mean over pixels, and a linear layer."""

    def __init__(self, sizes: Sequence[int], rate: float = 1.0) -> None:
        super().__init__()
        inputs, first, second, classes = sizes
        first = rounded_up(rate * first)
        second = rounded_up(rate * second)
        self.conv1 = nn.Conv2d(inputs, first, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(second)
        self.fc = nn.Linear(second, classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = self.bn2(self.conv2(x)).relu()
        return self.fc(x.mean((2, 3)))


class Drawn(FjORD):
    """Has the recorded widths.

    Attributes:
        recorded: Round and client -> the width of each batch.
    """

    recorded: dict[tuple[int, int], list[float]]

    @override
    def draws(self, s: SessionContext) -> Iterator[float]:
        return iter(self.recorded[s.round, s.client - 1])


@pytest.mark.parametrize("name", ["mlp", "mlp_kd", "mlp_momentum_uncovered", "conv_bn"])
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    about = settings_of("fjord", name)
    network = about["model"]
    make: Callable[..., nn.Module] = partial(narrow, network.get("dims"))
    if network["kind"] == "conv":
        make = partial(Norms, [network["input"][0], *network["channels"], network["classes"]])

    algorithm = Drawn(about["p_s"], about["knowledge_distillation"])
    algorithm.recorded = {}
    for t, recorded in enumerate(about["rounds"]):
        for client, widths in recorded["p"].items():
            algorithm.recorded[t, int(client)] = widths

    # A first client of the full width makes the server's model; it never takes part.
    rates = [1.0, *about["client_max_p"]]
    groups = [ClientGroup(1, partial(OrderedDropout, make), rate=rate) for rate in rates]
    run = Recorded("fjord", name, algorithm, groups)

    def server() -> dict[str, Tensor]:
        return algorithm.model.layout.floats.views(algorithm.model.floats)

    def expected(prefix: str) -> dict[str, Tensor]:
        """Return the recorded tensors by our names."""
        tensors = {}
        for name, view in server().items():
            recorded_name = name.removeprefix("net.whole.")
            if recorded_name == name:  # statistics, which are recorded by the number of channels
                _, _, _, norm, kind = name.split(".")
                recorded_name = f"{norm}.bn.{len(view)}.{kind}"
            tensors[name] = run.tensors[f"{prefix}/{recorded_name}"].view(view.shape)
        return tensors

    for name, value in expected("init").items():
        server()[name].copy_(value)
    for t, _ in run.rounds(monkeypatch):
        for name, value in expected(f"r{t}/server").items():
            close(server()[name], value)


def fleet(*rates: float, algorithm: Any = None, model: Any = None, **settings: Any) -> Any:
    """Return two clients of each rate; by default FjORD of the widths 1/2 and 1."""
    if algorithm is None:
        algorithm = FjORD([0.5, 1.0])
    if model is None:
        model = partial(OrderedDropout, partial(MLP, hidden=(6,)))
    groups = [ClientGroup(2, model, rate=rate) for rate in rates]
    sizes = [6, 5, 7, 4][: 2 * len(rates)]
    return fleet_of(groups, algorithm, random_data(sizes), **settings)


def test_a_single_width_is_fedavg() -> None:
    def trained(algorithm: FjORD | FedAvg, model: Any = None) -> Tensor:
        fed = fleet(1.0, algorithm=algorithm, model=model, optimizer=partial(SGD, lr=0.1))
        w = algorithm.model.floats
        w.copy_(torch.linspace(-0.5, 0.5, len(w)))
        for t in range(2):
            run_round(fed, t)
        return w

    fjord = trained(FjORD([1.0], distil=False))
    fedavg = trained(FedAvg(), partial(MLP, hidden=(6,)))
    close(fjord, fedavg)


def test_draws_are_named_and_of_the_client_s_widths() -> None:
    fed = fleet(1.0, 0.5)
    again = fleet(1.0, 0.5)
    run_round(fed, 0)
    run_round(again, 0)
    assert torch.equal(fed.algorithm.model.floats, again.algorithm.model.floats)

    wide, small = (state.module.net for state in fed.groups)
    assert wide.widths == [0.5, 1.0]
    assert small.widths == [0.5]
    draws = fed.algorithm.draws(SessionContext(fed, 0, 3, fed.groups[0], fed.row(0)))
    assert {next(draws) for _ in range(20)} == {0.5, 1.0}


def test_a_client_sends_and_receives_its_block_and_is_tested_with_it() -> None:
    fed = fleet(1.0, 0.5)
    run_round(fed, 0)
    of_whole = 4 * (4 * 6 + 6 + 6 * 3 + 3)
    of_half = 4 * (4 * 3 + 3 + 3 * 3 + 3)
    down_and_up = fed.ledger.totals[:, :2].tolist()
    assert down_and_up == [
        [of_whole, of_whole],
        [of_whole, of_whole],
        [of_half, of_half],
        [of_half, of_half],
    ]

    x = torch.randn(5, 4)
    logits = module_of(fed, 2)(x).clone()
    whole: Any = module_of(fed, None)
    torch.testing.assert_close(logits, whole.net.at(0.5, x))


@pytest.mark.parametrize(
    ("rates", "model", "found"),
    [
        ((1.0, 0.3), None, "a rate of 0.3"),
        ((1.0,), MLP, "MLP, of one width"),
        ((1.0,), partial(OrderedDropout, partial(nn.Linear, 4, 3)), "without the argument rate"),
        ((0.5, 1.0), None, "no slice"),
    ],
)
def test_wrong_clients_are_refused(rates: tuple[float, ...], model: Any, found: str) -> None:
    with pytest.raises(UserError, match=rf"model\.clients.*{found}"):
        fleet(*rates, model=model)


@pytest.mark.parametrize("widths", [[], [0.0, 1.0], [2.0]])
def test_wrong_widths_are_refused(widths: list[float]) -> None:
    with pytest.raises(UserError, match=r"init_args\.widths"):
        FjORD(widths)
