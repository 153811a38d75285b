"""Local training and static statistics of HeteroFL's released code (golden/heterofl)."""

import json
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import SGD

from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.local.client_group import ClientGroup
from lightfed.local.group_state import GroupState
from lightfed.local.hooks import SessionContext
from lightfed.local.session import Work
from lightfed.networks.cnn import Conv
from lightfed.networks.resnet import PreActResNet
from tests.small import GOLDEN, data_of, fleet_of


def settings_of(name: str) -> dict[str, Any]:
    """Return what is recorded besides tensors."""
    every = json.loads((GOLDEN / "heterofl/local_and_sbn.json").read_text())
    settings: dict[str, Any] = every[name]
    return settings


def load_row(state: GroupState, row: Tensor, tensors: dict[str, Tensor], prefix: str) -> None:
    for name, view in state.layout.floats.views(row).items():
        view.copy_(tensors[f"{prefix}/{name.removeprefix('net.')}"])


def released_name(name: str) -> str:
    """Return the released code's name of a parameter of PreActResNet with basic blocks.

    >>> released_name("stages.1.0.body.1.norm.bias")
    'layer2.0.n2.bias'
    """
    path, _, kind = name.rpartition(".")
    first, *rest = path.split(".")
    if first != "stages":
        outside_stages = {"stem": "conv1", "activate": "n4", "linear": "linear"}
        return f"{outside_stages[first]}.{kind}"

    layers = {
        "activate.norm": "n1",
        "body.0": "conv1",
        "body.1.norm": "n2",
        "body.2": "conv2",
        "shortcut": "shortcut",
    }
    stage, block, *layer = rest
    return f"layer{int(stage) + 1}.{block}.{layers['.'.join(layer)]}.{kind}"


def same_name(name: str) -> str:
    return name


# By the recorded client's name: its network, level, and the released code's names of parameters.
CLIENTS: dict[str, Any] = {
    "local_conv_c": (Conv, "c", same_name),
    "local_resnet18_b": (PreActResNet, "b", released_name),
}
clients = pytest.mark.parametrize("name", CLIENTS)


class Local:
    """A recorded client, with two of six labels."""

    def __init__(self, name: str) -> None:
        network, level, self.released = CLIENTS[name]
        self.settings = settings_of(name)
        self.tensors = load_file(GOLDEN / f"heterofl/{name}.safetensors")
        x = self.tensors["x"]
        y = self.tensors["y"]
        size = self.settings["batch"]
        self.batches = list(zip(x.split(size), y.split(size), strict=True))

        # A first client has the global model, and the first sample.
        model = partial(network, hidden=self.settings["hidden"])
        data = data_of(x, y, [[0], range(1, len(y))], classes=6)
        self.fleet = fleet_of(
            [ClientGroup(1, model, level="a"), ClientGroup(1, model, level=level)],
            HeteroFL(),
            data,
            optimizer=partial(
                SGD,
                lr=self.settings["lr"],
                momentum=self.settings["momentum"],
                weight_decay=self.settings["weight_decay"],
            ),
            clip=self.settings["clip"],
        )
        assert data.labels(1).tolist() == self.settings["labels"]
        self.state = self.fleet.groups[1]
        self.fleet.send(self.fleet.algorithm.model, [1])  # type: ignore[arg-type]
        self.row = self.fleet.row(1)
        for key, view in self.views().items():
            view.copy_(self.tensors[f"init/{key}"])

    def views(self) -> dict[str, Tensor]:
        """Return the tensors of the client's row, by the released code's names."""
        views = self.state.layout.floats.views(self.row.floats)
        return {self.released(name.removeprefix("net.")): view for name, view in views.items()}

    def module(self, *, masked: bool) -> L.LightningModule:
        """Return the client's module with its recorded weights, in training mode."""
        module = self.fleet.bind(1)
        assert isinstance(self.fleet.algorithm, HeteroFL)
        if masked:
            context = SessionContext(self.fleet, 1, 0, self.fleet.state(1), self.row)
            self.fleet.algorithm.session_start(context)
        return module.train()


def assert_close(found: Tensor, expected: Tensor, bound: float = 1e-6) -> None:
    """The released code sums in float32, in orders of its own.

    Weights, losses and statistics differ by 2e-7; logits and gradients, behind divisions by small
    variances, by up to 1.5e-6: it depends on the instructions of the CPU.
    """
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


def test_parameters_come_in_the_order_of_the_released_code() -> None:
    recorded = json.loads((GOLDEN / "heterofl/resnet18_iid_aeec.json").read_text())
    model = PreActResNet(6, hidden=recorded["cfg"]["hidden_size"], blocks=recorded["cfg"]["blocks"])
    shapes = [(released_name(name), list(p.shape)) for name, p in model.named_parameters()]
    assert shapes == list(recorded["param_shapes"].items())


@clients
@pytest.mark.parametrize("masked", [True, False])
def test_the_forward_pass_is_the_released_codes(name: str, masked: bool) -> None:
    local = Local(name)
    x, y = local.batches[0]
    scores = local.module(masked=masked)(x)
    recorded = "fwd_train_masked" if masked else "fwd_train_nomask"
    assert_close(scores, local.tensors[f"{recorded}/score"], 5e-6)
    assert_close(F.cross_entropy(scores, y), local.tensors[f"{recorded}/loss"])
    absent = [label for label in range(6) if label not in local.settings["labels"]]
    assert (not scores[:, absent].any()) == masked


@clients
def test_in_evaluation_the_scaler_is_off_and_batches_normalize_themselves(name: str) -> None:
    local = Local(name)
    module = local.module(masked=False).eval()
    assert_close(module(local.batches[0][0]), local.tensors["fwd_eval_nomask/score"], 5e-6)


@clients
def test_the_gradients_are_the_released_codes(name: str) -> None:
    local = Local(name)
    module = local.module(masked=True)
    loss = module.training_step(local.batches[0], 0)
    assert isinstance(loss, Tensor)
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    for name, gradient in zip(parameters, gradients, strict=True):
        released = local.released(name.removeprefix("net."))
        assert_close(gradient, local.tensors[f"grad_train_masked/{released}"], 5e-6)


@clients
def test_a_local_session_is_the_released_codes(name: str) -> None:
    local = Local(name)
    start = local.row.floats.clone()
    local.module(masked=True)
    batches = local.batches * local.settings["local_epochs"]
    work = Work(1, batches, len(local.batches), lr=None, seed=0, hook=None)
    assert local.state.session is not None
    local.state.session.train(local.row, work)
    for key, value in local.views().items():
        assert_close(value, local.tensors[f"after_local/{key}"])
    assert (local.row.floats - start).abs().max() > 1e-2


class Static:
    """The global model, whose statistics are estimated on 37 samples in batches of ten."""

    def __init__(self) -> None:
        settings = settings_of("sbn_conv")
        self.tensors = load_file(GOLDEN / "heterofl/sbn_conv.safetensors")
        x = self.tensors["x"]
        y = self.tensors["y"]
        # Client 1 holds the labels 1 and 4, client 0 the others.
        of_client_1 = [i for i, label in enumerate(y.tolist()) if label in (1, 4)]
        of_client_0 = [i for i in range(len(y)) if i not in of_client_1]
        data = data_of(x, y, [of_client_0, of_client_1], classes=6)
        model = partial(Conv, hidden=settings["hidden"])
        self.algorithm = HeteroFL(statistics_batch_size=settings["batch"])
        self.fleet = fleet_of([ClientGroup(2, model, level="a")], self.algorithm, data)
        load_row(self.fleet.groups[0], self.algorithm.model.floats, self.tensors, "params")
        self.algorithm.evaluation_start(self.fleet)

    def bound(self, client: int | None) -> AbstractContextManager[L.LightningModule]:
        """Return the global model for the global test set, or for a client's data."""
        if client is None:
            rows = self.algorithm.models(self.fleet, "global", [])
        else:
            rows = self.algorithm.models(self.fleet, "local", [client])
        assert rows is not None
        return rows.bound(rows.clients[0])


def test_static_statistics_are_the_released_codes() -> None:
    static = Static()
    with static.bound(None) as module:
        state = module.state_dict()
    recorded = [name for name in static.tensors if name.startswith("sbn/") and "running" in name]
    assert len(recorded) == 8
    for name in recorded:
        assert_close(state[f"net.{name.removeprefix('sbn/')}"], static.tensors[name])


@torch.no_grad()
def test_evaluation_is_the_released_codes() -> None:
    static = Static()
    x = static.tensors["x"][:12]
    y = static.tensors["y"][:12]
    with static.bound(None) as module:
        scores = module(x)
    assert_close(scores, static.tensors["eval/score"], 5e-6)
    assert_close(F.cross_entropy(scores, y), static.tensors["eval/loss"])
    with static.bound(1) as module:
        assert_close(module(x), static.tensors["eval_masked_1_4/score"], 5e-6)


def test_evaluation_leaves_the_server_as_it_was() -> None:
    static = Static()
    before = static.algorithm.model.floats.clone()
    with static.bound(None) as module:
        module(static.tensors["x"])
    static.algorithm.evaluation_start(static.fleet)
    assert torch.equal(static.algorithm.model.floats, before)
    assert not any("running" in name for name in static.algorithm.state_dict())
