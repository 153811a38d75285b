"""Server models of tensors that groups have by names of their own, integer buffers among them."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.lgfedavg import new_common
from lightfed.algorithms.standalone import Standalone
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import UserError
from tests.small import fleet_of, random_data, run_round

SIZES = [5, 7, 4]
NAMES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class First(nn.Module):
    """A normalisation above a layer of its own."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.low = nn.Linear(4, num_classes)
        self.norm = nn.BatchNorm1d(num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.low(x))


class Second(nn.Module):
    """The same, called otherwise, above two layers; another normalisation lies between."""

    def __init__(self, num_classes: int = 3, width: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, num_classes))
        self.last = nn.BatchNorm1d(width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x))


class Renamed(Standalone):
    """The normalisation on top is the server's."""

    model: ServerModel
    common = ("norm", "last")

    @override
    def setup(self, fed: Fleet) -> None:
        self.model = new_common(fed, [[f"net.{own}.{n}" for n in NAMES] for own in self.common])

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        fed.send(self.model, clients)
        fed.train(clients, t)
        fed.merge(clients, into=self.model)


def fleet(algorithm: Renamed) -> Fleet:
    groups = [ClientGroup(1, First), ClientGroup(2, Second)]
    data = random_data(SIZES, batch_size=2)
    data.last_batch = "join"
    return fleet_of(groups, algorithm, data, optimizer=partial(SGD, lr=0.1))


def tensors(fed: Fleet, client: int) -> dict[str, Tensor]:
    """Return copies of all tensors of a client, by name."""
    layout = fed.state(client).layout
    row = fed.row(client)
    views = layout.floats.views(row.floats) | layout.integers.views(row.integers)
    return {name: view.clone() for name, view in views.items()}


def server(algorithm: Renamed) -> dict[str, Tensor]:
    """Return copies of all tensors of the server's model, by name."""
    model = algorithm.model
    views = model.layout.floats.views(model.floats) | model.layout.integers.views(model.integers)
    return {name: view.clone() for name, view in views.items()}


# What each client calls the part that the server has.
PREFIXES = ["net.norm.", "net.last.", "net.last."]


def test_tensors_of_other_names_are_merged_with_their_integers() -> None:
    algorithm = Renamed()
    fed = fleet(algorithm)
    assert list(server(algorithm)) == [f"net.norm.{name}" for name in NAMES]
    run_round(fed, 0)

    merged = server(algorithm)

    def of_clients(name: str) -> list[Tensor]:
        return [tensors(fed, client)[PREFIXES[client] + name] for client in range(3)]

    weights = torch.tensor(SIZES).double() / sum(SIZES)
    for name in NAMES[:-1]:
        mean = torch.tensordot(weights, torch.stack(of_clients(name)).double(), 1)
        assert torch.allclose(merged[f"net.norm.{name}"].double(), mean, atol=1e-7), name

    counts = [int(count) for count in of_clients("num_batches_tracked")]
    assert counts == [2, 3, 2]
    assert int(merged["net.norm.num_batches_tracked"]) == 3  # the largest


def test_what_is_sent_is_what_the_server_has_and_nothing_else_changes() -> None:
    algorithm = Renamed()
    fed = fleet(algorithm)
    run_round(fed, 0)
    before = [tensors(fed, client) for client in range(3)]
    model = server(algorithm)

    fed.send(algorithm.model, range(3))

    for client, prefix in enumerate(PREFIXES):
        for name, value in tensors(fed, client).items():
            if name.startswith(prefix):
                expected = model["net.norm." + name.removeprefix(prefix)]
            else:
                expected = before[client][name]
            assert torch.equal(value, expected), name
    assert fed.ledger.totals[:, fed.ledger.UP].tolist() == [4 * 12 + 8] * 3


def test_a_server_model_loads_into_a_row_without_a_message() -> None:
    algorithm = Renamed()
    fed = fleet(algorithm)
    run_round(fed, 0)
    model = server(algorithm)
    totals_before = fed.ledger.totals.copy()

    def equal_names(client: int) -> set[str]:
        row = tensors(fed, client)
        return {n for n in NAMES if torch.equal(row[f"net.last.{n}"], model[f"net.norm.{n}"])}

    fed.load(algorithm.model, 1)
    assert equal_names(1) == set(NAMES)

    fed.load(algorithm.model, 2, tensors=["net.norm.bias"])
    assert equal_names(2) == {"bias"}
    assert (fed.ledger.totals == totals_before).all()


def test_tensors_that_do_not_fit_are_refused() -> None:
    class Wrong(Renamed):
        common = ("norm", "layers.1")

    with pytest.raises(UserError, match=r"net\.norm\.weight is \[6\], which is no slice of \[3\]"):
        fleet(Wrong())
