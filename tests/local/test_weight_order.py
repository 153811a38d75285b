"""Sessions that train convolution weights in channels_last leave the rows of those that do not."""

from functools import partial
from typing import Any

import pytest
import torch
from lightfed_kernels import pack_mask
from torch import Tensor, nn
from torch.optim import SGD, Adam

from lightfed.algorithms.shared.aspg import ASPG
from lightfed.local.optimizer import Clipping, Proximal, make_stepper
from lightfed.local.session import LocalSession, Runtime, Work
from lightfed.models import image_format
from lightfed.models.client_module import ClientModule
from lightfed.models.image_format import ChannelsLast
from lightfed.models.networks.cnn import Conv
from lightfed.state.rows import LiveModule, ModelLayout

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    # A larger eps: else Adam turns the sign of a gradient that only rounding has into a step.
    "adam": partial(Adam, eps=1e-2),
    "aspg": partial(ASPG, lr=0.1),
}
Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def small_networks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_format, "_LEAST", 1)


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, 16, 16, 3, generator=generator).permute(0, 1, 4, 2, 3)
    return [(images, torch.arange(4) % 2) for images in x]


class Session:
    """A session of a small network, and its row."""

    def __init__(self, *, follows: bool, optimizer: str = "sgd", clip: float | None = None) -> None:
        torch.manual_seed(0)
        self.net = Conv(2, (3, 16, 16), hidden=(8, 16))
        module = ClientModule(self.net, num_classes=2)
        self.live = LiveModule(module, ModelLayout.of(module))
        self.row = self.live.row_of_module()
        self.orders: list[bool] = []
        self.net.blocks[5].register_forward_pre_hook(self._note)
        stepper = make_stepper(
            OPTIMIZERS[optimizer](self.live.trainable),
            schedulers=[],
            clipping=None if clip is None else Clipping(clip),
        )
        self.local = LocalSession(module, Runtime(), live=self.live, stepper=stepper)
        if follows:
            self.local.channels_last = ChannelsLast(self.net)

    def _note(self, layer: nn.Module, _: Any) -> None:
        self.orders.append(not layer.get_parameter("weight").is_contiguous())

    def train(self, given: Any = None, **work: Any) -> Tensor:
        settings = {"hook": None} | work
        self.local.train(self.row, Work(0, given or batches(), 3, None, 0, **settings))
        return self.row.floats


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_the_row_is_that_of_a_session_in_torchs_order(optimizer: str, clip: float | None) -> None:
    ours = Session(follows=True, optimizer=optimizer, clip=clip)
    theirs = Session(follows=False, optimizer=optimizer, clip=clip)
    for _ in range(2):
        torch.testing.assert_close(ours.train(), theirs.train(), rtol=1e-5, atol=1e-6)
    assert ours.orders == [True] * 6
    assert theirs.orders == [False] * 6
    assert all(weight.is_contiguous() for weight in ours.net.parameters())


@pytest.mark.parametrize(
    ("optimizer", "part"),
    [("sgd", "mask"), ("sgd", "hook"), ("sgd", "proximal"), ("aspg", "nothing")],
)
def test_weights_stay_in_a_row_that_something_else_reads(optimizer: str, part: str) -> None:
    ours = Session(follows=True, optimizer=optimizer)
    theirs = Session(follows=False, optimizer=optimizer)
    layout = ours.live.layout
    parts: dict[str, Any] = {
        "mask": {"mask": pack_mask(layout.floats.live())},
        "hook": {"hook": lambda gradient: gradient.mul_(2)},
        "proximal": {"proximal": Proximal(torch.zeros(layout.floats.span(layout.parameters)), 0.1)},
        "nothing": {},
    }
    found, wanted = ours.train(**parts[part]), theirs.train(**parts[part])
    assert torch.equal(found, wanted)
    assert ours.orders == [False] * 3


def test_a_session_that_raises_leaves_its_steps_in_the_row() -> None:
    whole = Session(follows=True).train(batches()[:1])
    broken = Session(follows=True)

    def raising() -> Any:
        yield batches()[0]
        raise RuntimeError("no second batch")

    with pytest.raises(RuntimeError, match="no second"):
        broken.train(raising())
    broken.local.abandon()
    assert torch.equal(broken.row.floats, whole)
    assert all(weight.is_contiguous() for weight in broken.net.parameters())


def test_few_weights_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_format, "_LEAST", 10**6)
    ours = Session(follows=True)
    ours.train()
    assert ours.orders == [False] * 3
