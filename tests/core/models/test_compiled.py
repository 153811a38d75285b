"""Clients whose networks are compiled train, resume and export as those that are not.

The backend "eager" runs the operators that torch.compile has captured as they are, so that a
compiled network gives the same bits. Inductor makes code of its own; it takes most of a minute to
compile, and runs with `pytest -m matrix`.
"""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.flexifed.signature import layers_of
from lightfed.algorithms.prototypes.fedgh import FedGH
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.algorithm import Algorithm
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.models.build import blank
from lightfed.utils.errors import UserError
from tests.small import fit, random_data, server_row

SIZES = [9, 10, 11, 12, 8, 9]


class Net(nn.Module):
    def __init__(self, num_classes: int = 3, rate: float = 1.0) -> None:
        super().__init__()
        width = int(8 * rate)
        self.layer = nn.Linear(4, width)
        self.output = nn.Linear(width, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.layer(x).relu(), 0.3, self.training)
        output: Tensor = self.output(hidden)
        return output


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = Net()

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)


class Compiles(Module):
    """It compiles its network where Lightning says that large layers should be made."""

    @override
    def configure_model(self) -> None:
        if isinstance(self.net, Net):
            self.net = compile_(self.net)


def compile_(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def wrapped(rate: float = 1.0) -> nn.Module:
    return compile_(Net(rate=rate))


def in_place() -> nn.Module:
    network = Net()
    network.compile(backend="eager")
    return network


def one_layer() -> nn.Module:
    network: Any = Net()
    network.layer = compile_(network.layer)
    return network


def run(
    model: Callable[..., nn.Module],
    folder: Path,
    *,
    algorithm: Algorithm | None = None,
    groups: list[ClientGroup] | None = None,
    rounds: int = 2,
    ckpt_path: str | None = None,
    **settings: Any,
) -> Federation:
    torch._dynamo.reset()
    counters.clear()
    own_optimizer = isinstance(model, type) and issubclass(model, L.LightningModule)
    options: dict[str, Any] = {"side_by_side": "off", "export": ("server",), **settings}
    if own_optimizer:
        options["evaluate"] = ()
    else:
        options["optimizer"] = partial(SGD, lr=0.1)
    federation = Federation(
        algorithm or FedAvg(), clients=groups or [ClientGroup(len(SIZES), model)], **options
    )
    fit(federation, random_data(SIZES, batch_size=4), folder, rounds=rounds, ckpt_path=ckpt_path)
    return federation


CASES = [(wrapped, Net), (in_place, Net), (one_layer, Net), (Compiles, Module)]


@pytest.mark.parametrize(("model", "plain"), CASES, ids=lambda model: model.__name__)
def test_compiled_clients_have_the_bits_and_the_names_of_others(
    model: Callable[..., nn.Module], plain: Callable[..., nn.Module], tmp_path: Path
) -> None:
    expected = run(plain, tmp_path / "plain")
    federation = run(model, tmp_path / "compiled")

    assert torch.equal(server_row(federation), server_row(expected))
    assert counters["frames"]["ok"] > 0
    # Clients share the graphs: there are a few kinds of calls, and six clients.
    assert counters["stats"]["unique_graphs"] <= 8

    models = Path("run", "models")
    tensors = load_file(tmp_path / "compiled" / models / "server.safetensors")
    assert tensors.keys() == load_file(tmp_path / "plain" / models / "server.safetensors").keys()
    entry = json.loads((tmp_path / "compiled" / models / "models.json").read_text())["server"]
    inner = Compiles if model is Compiles else plain
    assert entry["network"].endswith(f".{inner.__name__}")
    assert "note" not in entry


def test_compiled_clients_resume_with_the_same_bits(tmp_path: Path) -> None:
    straight = run(wrapped, tmp_path / "straight", rounds=3)
    run(wrapped, tmp_path / "stopped", rounds=1)
    last = str(tmp_path / "stopped" / "run" / "checkpoints" / "last.ckpt")
    resumed = run(wrapped, tmp_path / "stopped", rounds=3, ckpt_path=last)
    assert torch.equal(server_row(resumed), server_row(straight))


def test_a_checkpoint_of_plain_clients_goes_on_with_compiled_ones(tmp_path: Path) -> None:
    def named(model: Callable[..., nn.Module]) -> list[ClientGroup]:
        return [ClientGroup(len(SIZES), model, name="all")]

    straight = run(Net, tmp_path / "straight", rounds=2, groups=named(Net))
    run(Net, tmp_path / "stopped", rounds=1, groups=named(Net))
    last = str(tmp_path / "stopped" / "run" / "checkpoints" / "last.ckpt")
    resumed = run(wrapped, tmp_path / "stopped", groups=named(wrapped), ckpt_path=last)
    assert torch.equal(server_row(resumed), server_row(straight))


def test_slices_of_compiled_networks_are_those_of_others(tmp_path: Path) -> None:
    def groups(model: Callable[..., nn.Module]) -> list[ClientGroup]:
        return [ClientGroup(3, model), ClientGroup(3, model, rate=0.5)]

    compiled = run(wrapped, tmp_path / "a", algorithm=HeteroFL(), groups=groups(wrapped))
    plain = run(Net, tmp_path / "b", algorithm=HeteroFL(), groups=groups(Net))
    assert torch.equal(server_row(compiled), server_row(plain))


def test_the_layers_of_a_compiled_network_are_grouped_by_their_classes() -> None:
    data = random_data(SIZES)
    data.prepare(clients=len(SIZES), seed=0, device=torch.device("cpu"))
    batch = blank(data, samples=2)
    layers = []
    for model in (Net, wrapped, in_place, one_layer):
        module = ClientGroup(3, model).build(data, position=0, seed=0)
        layers.append(layers_of(module, batch, key="model.clients.0"))
    assert len(layers[0]) == 2
    assert layers == [layers[0]] * 4


@pytest.mark.parametrize("side_by_side", ["auto", 3])
def test_compiled_clients_train_alone_and_say_so(
    side_by_side: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="lightfed.packs.packing"):
        federation = run(wrapped, tmp_path, rounds=1, side_by_side=side_by_side)
    packing = federation.fleet.groups[0].packing
    assert packing.most == 1
    assert packing.reason == "Net is compiled, for one client at a time"
    record = caplog.records[0]
    assert packing.reason in record.message
    assert record.levelno == (logging.INFO if side_by_side == "auto" else logging.WARNING)


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    @override
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.extractor(x))
        return logits


def two_parts() -> nn.Module:
    return compile_(TwoParts())


def test_a_method_that_takes_a_compiled_network_apart_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(two_parts, tmp_path, algorithm=FedGH(lr=0.1), rounds=1, export=())
    assert "takes TwoParts apart, so that what torch.compile made of it is unused" in caplog.text


def around_a_module() -> nn.Module:
    return compile_(Module())


def with_a_hook() -> nn.Module:
    network = wrapped()
    network.register_forward_hook(lambda *_: None)
    return network


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (around_a_module, "torch.compile around Module, a LightningModule"),
        (with_a_hook, "torch.compile's wrapper around Net has hooks"),
    ],
)
def test_what_a_wrapper_would_hide_is_refused(
    model: Callable[[], nn.Module], found: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        run(model, tmp_path)
    assert caught.value.key == "model.clients.0.model"
    assert caught.value.found == found


def by_inductor() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))  # type: ignore[return-value]


def not_compiled() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.matrix
def test_inductor_trains_and_resumes(tmp_path: Path) -> None:
    expected = run(not_compiled, tmp_path / "plain", rounds=3)
    straight = run(by_inductor, tmp_path / "straight", rounds=3)
    assert counters["stats"]["unique_graphs"] > 0
    assert torch.allclose(server_row(straight), server_row(expected), atol=1e-5)

    run(by_inductor, tmp_path / "stopped", rounds=1)
    last = str(tmp_path / "stopped" / "run" / "checkpoints" / "last.ckpt")
    resumed = run(by_inductor, tmp_path / "stopped", rounds=3, ckpt_path=last)
    assert torch.equal(server_row(resumed), server_row(straight))

    tensors = load_file(tmp_path / "straight" / "run" / "models" / "server.safetensors")
    not_compiled().load_state_dict(tensors)
