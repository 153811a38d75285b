"""What slices and averages of any widths imply: HeteroFL on every kind of layer it has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.client_group import ClientGroup
from lightfed.models.build import Task
from lightfed.networks.cnn import Conv
from lightfed.networks.resnet import PreActResNet
from lightfed.networks.transformer import Transformer
from tests.small import Given, Tensors, fleet_of

CLASSES = 5
RATES = (1.0, 0.5, 0.25, 0.125)

quick = settings(
    max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


class Held(FederatedDataModule):
    """Clients that hold given labels, of images or of tokens."""

    def __init__(self, labels: Sequence[Sequence[int]], task: Task) -> None:
        shape = (6,) if task == "masked_lm" else (1, 8, 8)
        x = torch.zeros(len(labels), *shape)
        y = torch.zeros(len(labels), dtype=torch.int64)
        dataset = Tensors(x, y, classes=CLASSES, test=(x, y))
        dataset.task = task
        super().__init__(dataset, Given(*[[k] for k in range(len(labels))]))
        self._held = [sorted(own) for own in labels]

    @override
    def labels(self, client: int) -> Tensor:
        return torch.tensor(self._held[client])


@dataclass(frozen=True)
class Federation:
    """Clients of any rates and labels; the first has rate 1."""

    model: Callable[..., nn.Module]
    rates: list[float]
    labels: list[list[int]]

    def fleet(self) -> Fleet:
        task: Task = "masked_lm" if self.model.func is Transformer else "classification"  # type: ignore[attr-defined]
        groups = [ClientGroup(1, self.model, rate=rate) for rate in self.rates]
        return fleet_of(groups, HeteroFL(mask=False), Held(self.labels, task))


@st.composite
def federations(draw: st.DrawFn) -> Federation:
    width = draw(st.sampled_from([8, 12, 20]))
    model = draw(
        st.sampled_from(
            [
                partial(Conv, hidden=(width, 16), norm="bn"),
                partial(Conv, hidden=(width, 16), norm="none"),
                partial(PreActResNet, hidden=(width, 16), blocks=(1, 1), norm="ln"),
                partial(Transformer, embedding=16, heads=2, hidden=width, layers=1),
            ]
        )
    )
    rates = [1.0, *draw(st.lists(st.sampled_from(RATES), min_size=1, max_size=3))]
    held = st.sets(st.integers(0, CLASSES - 1), min_size=1).map(sorted)
    return Federation(model, rates, [draw(held) for _ in rates])


def server(fed: Fleet) -> Tensor:
    assert isinstance(fed.algorithm, HeteroFL)
    return fed.algorithm.model.floats


def number(fed: Fleet) -> None:
    """Set every element of the global model to another number."""
    assert isinstance(fed.algorithm, HeteroFL)
    layout = fed.algorithm.model.layout.floats
    server(fed).copy_((torch.arange(layout.size) + 1.0) * layout.live())


def send(fed: Fleet) -> None:
    assert isinstance(fed.algorithm, HeteroFL)
    fed.send(fed.algorithm.model, range(fed.clients))


def merge(fed: Fleet, clients: Sequence[int]) -> Tensor:
    assert isinstance(fed.algorithm, HeteroFL)
    fed.merge(clients, into=fed.algorithm.model, weights="uniform")
    return server(fed).clone()


def covered(fed: Fleet, client: int) -> set[float]:
    """Return the numbers of the elements that a client has; see `number`."""
    is_element = fed.state(client).layout.floats.live()
    return set(fed.row(client).floats[is_element].tolist())


@quick
@given(federations())
def test_what_is_sent_and_comes_back_unchanged_changes_nothing(federation: Federation) -> None:
    """A merge of identical updates is the identity, on one client's coverage and on all of them."""
    fed = federation.fleet()
    number(fed)
    before = server(fed).clone()
    for clients in ([len(federation.rates) - 1], range(fed.clients)):
        send(fed)
        assert torch.equal(merge(fed, list(clients)), before)


@quick
@given(federations())
def test_one_client_gives_its_coverage_and_nothing_else(federation: Federation) -> None:
    """W^e within W^d ... within W^a."""
    fed = federation.fleet()
    number(fed)
    before = server(fed).clone()
    send(fed)

    # Widest first, each client covers what the next one covers.
    widest_first = sorted(range(fed.clients), key=lambda k: -federation.rates[k])
    for wide, narrow in pairwise(widest_first):
        assert covered(fed, narrow) <= covered(fed, wide)
        is_as_wide = federation.rates[narrow] == federation.rates[wide]
        assert (covered(fed, narrow) == covered(fed, wide)) == is_as_wide

    client = fed.clients - 1
    of_client = covered(fed, client)
    fed.row(client).floats.mul_(-1.0)
    after = merge(fed, [client])
    assert torch.equal(after.abs(), before)
    changed = set(before[after != before].tolist())
    # Only rows of labels that the client does not hold are kept back.
    if len(federation.labels[client]) == CLASSES:
        assert changed == of_client
    else:
        assert changed < of_client
