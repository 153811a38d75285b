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
    layout, row = fed.state(client).layout, fed.row(client)
    views = layout.floats.views(row.floats) | layout.integers.views(row.integers)
    return {name: view.clone() for name, view in views.items()}


def server(algorithm: Renamed) -> dict[str, Tensor]:
    model = algorithm.model
    views = model.layout.floats.views(model.floats) | model.layout.integers.views(model.integers)
    return {name: view.clone() for name, view in views.items()}


OWN = ["net.norm.", "net.last.", "net.last."]


def test_tensors_of_other_names_are_merged_with_their_integers() -> None:
    algorithm = Renamed()
    fed = fleet(algorithm)
    assert list(server(algorithm)) == [f"net.norm.{name}" for name in NAMES]
    run_round(fed, 0)
    rows, after = [tensors(fed, k) for k in range(3)], server(algorithm)
    for name in NAMES[:-1]:
        stacked = torch.stack(
            [row[own + name].double() for own, row in zip(OWN, rows, strict=True)]
        )
        mean = torch.tensordot(torch.tensor(SIZES).double() / sum(SIZES), stacked, 1)
        assert torch.allclose(after[f"net.norm.{name}"].double(), mean, atol=1e-7), name
    counts = [int(row[own + "num_batches_tracked"]) for own, row in zip(OWN, rows, strict=True)]
    assert counts == [2, 3, 2]
    assert int(after["net.norm.num_batches_tracked"]) == 3


def test_what_is_sent_is_what_the_server_has_and_nothing_else_changes() -> None:
    algorithm = Renamed()
    fed = fleet(algorithm)
    run_round(fed, 0)
    before, model = [tensors(fed, k) for k in range(3)], server(algorithm)
    fed.send(algorithm.model, range(3))
    for client, own in enumerate(OWN):
        for name, value in tensors(fed, client).items():
            shared = name.startswith(own)
            expected = (
                model["net.norm." + name.removeprefix(own)] if shared else before[client][name]
            )
            assert torch.equal(value, expected), name
    assert fed.ledger.totals[:, fed.ledger.UP].tolist() == [4 * 12 + 8] * 3


def test_a_server_model_loads_into_a_row_without_a_message() -> None:
    algorithm = Renamed()
    fed = fleet(algorithm)
    run_round(fed, 0)
    model, sent = server(algorithm), fed.ledger.totals.copy()
    fed.load(algorithm.model, 1)
    found = tensors(fed, 1)
    assert all(torch.equal(found[f"net.last.{n}"], model[f"net.norm.{n}"]) for n in NAMES)
    fed.load(algorithm.model, 2, tensors=["net.norm.bias"])
    found = tensors(fed, 2)
    equal = {n for n in NAMES if torch.equal(found[f"net.last.{n}"], model[f"net.norm.{n}"])}
    assert equal == {"bias"}
    assert (fed.ledger.totals == sent).all()


def test_tensors_that_do_not_fit_are_refused() -> None:
    class Wrong(Renamed):
        common = ("norm", "layers.1")

    with pytest.raises(UserError, match=r"net\.norm\.weight is \[6\], which is no slice of \[3\]"):
        fleet(Wrong())
