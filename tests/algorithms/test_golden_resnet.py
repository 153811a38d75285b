"""Local training of HeteroFL's released ResNet (golden/heterofl/local_resnet18_b)."""

import json
from functools import partial

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import SGD

from lightfed.algorithms.heterofl import HeteroFL
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import SessionContext
from lightfed.local.session import Work
from lightfed.models.networks.resnet import PreActResNet
from tests.small import GOLDEN, data_of, fleet_of

FOLDER = GOLDEN / "heterofl"


def released_name(name: str) -> str:
    """The released code's name of a parameter of PreActResNet with basic blocks.

    >>> released_name("stages.1.0.body.1.norm.bias")
    'layer2.0.n2.bias'
    """
    path, kind = name.rsplit(".", 1)
    parts = path.split(".")
    if parts[0] != "stages":
        return f"{ {'stem': 'conv1', 'activate': 'n4', 'linear': 'linear'}[parts[0]] }.{kind}"
    layers = {
        "activate.norm": "n1",
        "body.0": "conv1",
        "body.1.norm": "n2",
        "body.2": "conv2",
        "shortcut": "shortcut",
    }
    return f"layer{int(parts[1]) + 1}.{parts[2]}.{layers['.'.join(parts[3:])]}.{kind}"


class Local:
    """A client of level b with labels 0 and 4, as recorded."""

    def __init__(self) -> None:
        self.settings = json.loads((FOLDER / "local_and_sbn.json").read_text())["local_resnet18_b"]
        self.tensors = load_file(FOLDER / "local_resnet18_b.safetensors")
        x, y = self.tensors["x"], self.tensors["y"]
        size = self.settings["batch"]
        self.batches = list(zip(x.split(size), y.split(size), strict=True))
        model = partial(PreActResNet, hidden=self.settings["hidden"])
        optimizer = partial(
            SGD, lr=self.settings["lr"], momentum=self.settings["momentum"],
            weight_decay=self.settings["weight_decay"],
        )  # fmt: skip
        data = data_of(x, y, [[0], range(1, len(y))], classes=6)
        groups = [ClientGroup(1, model, level="a"), ClientGroup(1, model, level="b")]
        self.fleet = fleet_of(
            groups, HeteroFL(), data, optimizer=optimizer, clip=self.settings["clip"]
        )
        assert data.labels(1).tolist() == self.settings["labels"]
        self.state = self.fleet.groups[1]
        self.fleet.send(self.fleet.algorithm.model, [1])  # type: ignore[arg-type]
        self.row = self.fleet.row(1)
        for name, view in self.views().items():
            view.copy_(self.tensors[f"init/{name}"])

    def views(self) -> dict[str, Tensor]:
        """The client's row, by the released code's names."""
        views = self.state.layout.floats.views(self.row.floats)
        return {released_name(name.removeprefix("net.")): view for name, view in views.items()}

    def module(self, *, masked: bool) -> L.LightningModule:
        """The client's module on its recorded weights."""
        module = self.fleet.bind(1)
        assert isinstance(self.fleet.algorithm, HeteroFL)
        if masked:
            s = SessionContext(self.fleet, 1, 0, self.fleet.state(1), self.row)
            self.fleet.algorithm.session_start(s)
        return module.train()


def assert_close(found: Tensor, expected: Tensor, bound: float = 1e-6) -> None:
    """The released code sums in float32, in orders of its own.

    Weights, losses and statistics differ by 2e-7; logits and gradients, behind divisions by small
    variances, by up to 1.5e-6: it depends on the instructions of the CPU.
    """
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


def test_parameters_come_in_the_order_of_the_released_code() -> None:
    recorded = json.loads((FOLDER / "resnet18_iid_aeec.json").read_text())
    model = PreActResNet(6, hidden=recorded["cfg"]["hidden_size"], blocks=recorded["cfg"]["blocks"])
    found = [(released_name(name), list(p.shape)) for name, p in model.named_parameters()]
    assert found == list(recorded["param_shapes"].items())


@pytest.mark.parametrize("masked", [True, False])
def test_the_forward_pass_is_the_released_codes(masked: bool) -> None:
    local = Local()
    x, y = local.batches[0]
    scores = local.module(masked=masked)(x)
    recorded = "fwd_train_masked" if masked else "fwd_train_nomask"
    assert_close(scores, local.tensors[f"{recorded}/score"], 5e-6)
    assert_close(F.cross_entropy(scores, y), local.tensors[f"{recorded}/loss"])
    absent = [label for label in range(6) if label not in local.settings["labels"]]
    assert (not scores[:, absent].any()) == masked


def test_in_evaluation_the_scaler_is_off_and_batches_normalise_themselves() -> None:
    local = Local()
    module = local.module(masked=False).eval()
    assert_close(module(local.batches[0][0]), local.tensors["fwd_eval_nomask/score"], 5e-6)


def test_the_gradients_are_the_released_codes() -> None:
    local = Local()
    module = local.module(masked=True)
    loss = module.training_step(local.batches[0], 0)
    names, parameters = zip(*module.named_parameters(), strict=True)
    assert isinstance(loss, Tensor)
    for name, gradient in zip(names, torch.autograd.grad(loss, parameters), strict=True):
        recorded = local.tensors[f"grad_train_masked/{released_name(name.removeprefix('net.'))}"]
        assert_close(gradient, recorded, 5e-6)


def test_a_local_session_is_the_released_codes() -> None:
    local = Local()
    start = local.row.floats.clone()
    local.module(masked=True)
    batches = local.batches * local.settings["local_epochs"]
    work = Work(1, batches, len(local.batches), lr=None, seed=0, hook=None)
    assert local.state.session is not None
    local.state.session.train(local.row, work)
    for name, value in local.views().items():
        assert_close(value, local.tensors[f"after_local/{name}"])
    assert (local.row.floats - start).abs().max() > 1e-2
