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
    return Net([dims[0], *(rounded_up(rate * width) for width in dims[1:-1]), dims[-1]])


class Norms(nn.Module):
    """Two convolutions with BatchNorm and ReLU, the mean over pixels, and a linear layer."""

    def __init__(self, sizes: Sequence[int], rate: float = 1.0) -> None:
        super().__init__()
        inputs, a, b, classes = sizes
        a, b = rounded_up(rate * a), rounded_up(rate * b)
        self.conv1, self.bn1 = nn.Conv2d(inputs, a, 3, padding=1, bias=False), nn.BatchNorm2d(a)
        self.conv2, self.bn2 = nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b)
        self.fc = nn.Linear(b, classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        return self.fc(self.bn2(self.conv2(x)).relu().mean((2, 3)))


class Drawn(FjORD):
    """Has the recorded widths."""

    recorded: dict[tuple[int, int], list[float]]

    @override
    def draws(self, s: SessionContext) -> Iterator[float]:
        return iter(self.recorded[s.round, s.client - 1])


@pytest.mark.parametrize("name", ["mlp", "mlp_kd", "mlp_momentum_uncovered", "conv_bn"])
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    about = settings_of("fjord", name)
    net, widths = about["model"], about["p_s"]
    make: Callable[..., nn.Module] = partial(narrow, net.get("dims"))
    if net["kind"] == "conv":
        make = partial(Norms, [net["input"][0], *net["channels"], net["classes"]])
    algorithm = Drawn(widths, about["knowledge_distillation"])
    algorithm.recorded = {
        (t, int(client)): drawn
        for t, recorded in enumerate(about["rounds"])
        for client, drawn in recorded["p"].items()
    }
    rates = [1.0, *about["client_max_p"]]  # the first never takes part
    groups = [ClientGroup(1, partial(OrderedDropout, make), rate=rate) for rate in rates]
    run = Recorded("fjord", name, algorithm, groups)

    def expected(prefix: str) -> dict[str, Tensor]:
        """The recorded tensors by our names; statistics are recorded by the number of channels."""
        found = {}
        for own, view in layout.views(algorithm.model.floats).items():
            name = own.removeprefix("net.whole.")
            if name == own:
                _, _, _, norm, kind = own.split(".")
                name = f"{norm}.bn.{len(view)}.{kind}"
            found[own] = run.tensors[f"{prefix}/{name}"].view(view.shape)
        return found

    layout = algorithm.model.layout.floats
    for own, value in expected("init").items():
        layout.views(algorithm.model.floats)[own].copy_(value)
    for t, _ in run.rounds(monkeypatch):
        views = layout.views(algorithm.model.floats)
        for own, value in expected(f"r{t}/server").items():
            close(views[own], value)


def fleet(*rates: float, algorithm: Any = None, model: Any = None, **more: Any) -> Any:
    model = model or partial(OrderedDropout, partial(MLP, hidden=(6,)))
    groups = [ClientGroup(2, model, rate=rate) for rate in rates]
    data = random_data([6, 5, 7, 4][: 2 * len(rates)])
    return fleet_of(groups, algorithm or FjORD([0.5, 1.0]), data, **more)


def test_a_single_width_is_fedavg() -> None:
    models = []
    for algorithm, model in ((FjORD([1.0], False), None), (FedAvg(), partial(MLP, hidden=(6,)))):
        fed = fleet(1.0, algorithm=algorithm, model=model, optimizer=partial(SGD, lr=0.1))
        w = fed.algorithm.model.floats
        w.copy_(torch.linspace(-0.5, 0.5, len(w)))
        for t in range(2):
            run_round(fed, t)
        models.append(w)
    close(*models)


def test_draws_are_named_and_of_the_client_s_widths() -> None:
    fed, again = fleet(1.0, 0.5), fleet(1.0, 0.5)
    for one in (fed, again):
        run_round(one, 0)
    assert torch.equal(fed.algorithm.model.floats, again.algorithm.model.floats)
    wide, small = (state.module.net for state in fed.groups)
    assert (wide.widths, small.widths) == ([0.5, 1.0], [0.5])
    s = SessionContext(fed, 0, 3, fed.groups[0], fed.row(0))
    drawn = fed.algorithm.draws(s)
    assert {next(drawn) for _ in range(20)} == {0.5, 1.0}


def test_a_client_sends_and_receives_its_block_and_is_tested_with_it() -> None:
    fed = fleet(1.0, 0.5)
    run_round(fed, 0)
    sizes = [4 * (4 * width + width + width * 3 + 3) for width in (6, 3)]
    assert fed.ledger.totals[:, :2].tolist() == [[float(sizes[k // 2])] * 2 for k in range(4)]
    x = torch.randn(5, 4)
    narrow_one, whole = module_of(fed, 2), module_of(fed, None)
    own = narrow_one(x).clone()
    torch.testing.assert_close(own, whole.net.at(0.5, x))  # type: ignore[union-attr, operator]


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
