"""What `auto` packs by its types, what a number packs after a check, and why the rest is alone."""

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import ASGD, SGD, Adam, RMSprop
from typing_extensions import override

from lightfed.models.client_module import ClientModule
from lightfed.networks import (
    MLP,
    VGG,
    CIFARResNet,
    Conv,
    LeNet,
    MoECNN,
    PreActResNet,
    ResNet18GN,
    SimpleCNN,
)
from lightfed.packs.known_layers import LAYERS, PEFT_LAYERS, unknown
from tests.packs.federations import (
    CLIENTS,
    Bent,
    Listened,
    Reads,
    Residual,
    Smooth,
    after,
    fleet,
    images,
)
from tests.tiers import by_default


def flat(*layers: nn.Module) -> Callable[..., nn.Module]:
    """Return a network with layers between a first one and the logits, for 4 features."""
    return partial(nn.Sequential, nn.Linear(4, 8), *layers, nn.Linear(8, 3))


def spatial(*layers: nn.Module, size: int = 64) -> Callable[..., nn.Module]:
    """Return a network with layers between a first one and the logits, for 1 x 8 x 8 images."""
    first = nn.Conv2d(1, 4, 3, padding=1)
    return partial(nn.Sequential, first, *layers, nn.Flatten(), nn.Linear(4 * size, 3))


def adapted(**settings: Any) -> Callable[..., nn.Module]:
    """Return what makes a network for 4 features with peft's adapters of its linear layers."""

    def build(num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> nn.Module:
        peft = pytest.importorskip("peft", reason="needs the extra hf")
        config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=r".*\.(1|3)", **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # one package warns of the other
            network = MLP(num_classes, input_shape, hidden=(8,))
            return peft.get_peft_model(network, config)  # type: ignore[no-any-return]

    return build


class Listed(nn.Module):
    """Layers in a list."""

    packs = True

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(*input_shape, 8), nn.Linear(8, num_classes)])

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def frozen_norm() -> nn.Module:
    """Return a layer of batch normalization whose weights are frozen; its statistics are not."""
    return nn.BatchNorm1d(8).requires_grad_(False)


NETWORKS: dict[str, tuple[Callable[..., nn.Module], bool]] = {
    "activations": (
        flat(
            nn.ReLU(inplace=True), nn.LeakyReLU(), nn.ELU(), nn.GELU(), nn.SiLU(inplace=True),
            nn.Sigmoid(), nn.Tanh(), nn.Identity(), nn.Dropout(0.0), nn.Softmax(1),
        ),
        False,
    ),
    "norms": (flat(nn.BatchNorm1d(8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.ReLU()), False),
    "images": (
        spatial(
            nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2, groups=2),
            nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), size=1,
        ),
        True,
    ),
    "lines": (
        partial(
            nn.Sequential, nn.Flatten(2), nn.Conv1d(1, 4, 3), nn.MaxPool1d(2), nn.AvgPool1d(2),
            nn.AdaptiveAvgPool1d(3), nn.Flatten(), nn.Linear(12, 3),
        ),
        True,
    ),
    "dilated": (spatial(nn.Conv2d(4, 4, 3, stride=2, dilation=2, bias=False), size=4), True),
    "Conv": (partial(Conv, hidden=(4, 8)), True),
    "Conv, one pixel": (partial(Conv, hidden=(4, 8, 8, 8), norm="ln"), True),
    "SimpleCNN": (partial(SimpleCNN, channels=(4, 4), hidden=8), True),
    "PreActResNet": (partial(PreActResNet, hidden=(4, 8), blocks=(1, 1)), True),
    "CIFARResNet": (partial(CIFARResNet, depth=8), True),
    "ResNet18GN": (partial(ResNet18GN, width=4, groups=2), True),
    "MLP": (partial(MLP, hidden=(8,)), False),
    "list of layers": (Listed, False),
    "frozen layers": (flat(nn.Linear(8, 8).requires_grad_(False), frozen_norm(), nn.Tanh()), False),
    "adapters": (adapted(lora_dropout=0.0), False),
    "adapters with biases": (adapted(lora_bias=True, bias="all"), False),
}  # fmt: skip


def settings_of(name: str) -> dict[str, Any]:
    """Return what the federation of a network differs by from the case "mlp"."""
    model, of_images = NETWORKS[name]

    def network(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
        torch.manual_seed(0)
        if isinstance(model, partial) and model.func is nn.Sequential:
            return deepcopy(model())  # it would hold the layers of the table
        return model(num_classes=num_classes, input_shape=input_shape)

    if of_images:
        return {"model": network, "data": images}
    return {"model": network}


# The others have the same layers.
QUICK = (
    "activations", "norms", "images", "lines", "dilated", "PreActResNet", "frozen layers",
    "adapters",
)  # fmt: skip


@pytest.mark.parametrize("name", by_default(NETWORKS, *QUICK))
def test_known_networks_train_in_packs_as_alone(name: str) -> None:
    sizes = [8] * CLIENTS
    settings = settings_of(name) | {"optimizer": partial(SGD, lr=1e-2)}
    packed = fleet("mlp", CLIENTS, sizes, **settings)
    assert unknown(packed.groups[0].module) == ""
    assert list(packed.training.side_by_side.values()) == [CLIENTS]

    rows, metrics = after(packed)
    expected_rows, expected_metrics = after(fleet("mlp", "off", sizes, **settings))
    torch.testing.assert_close(rows, expected_rows, rtol=1e-4, atol=2e-5)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4)


def test_every_known_layer_is_in_one_of_these_networks() -> None:
    kinds: set[type] = {ParametrizationList}  # test_adapters.py has networks with it
    for name, (_, of_images) in NETWORKS.items():
        build = settings_of(name)["model"]
        network = build(3, (1, 8, 8) if of_images else (4,))
        kinds |= {type(layer) for layer in network.modules()}
    assert kinds >= set(LAYERS)
    assert {(kind.__module__, kind.__name__) for kind in kinds} >= set(PEFT_LAYERS)


@pytest.mark.parametrize("build", [partial(VGG, depth=11), LeNet, partial(MoECNN, variant=5)])
def test_large_networks_of_the_package_are_known(build: Callable[..., nn.Module]) -> None:
    module = ClientModule(build(10, (3, 32, 32)), num_classes=10)
    assert unknown(module) == ""


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """Return what makes a network of three layers and changes it."""

    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        change(net)
        return net

    return make


def patch(net: Any) -> None:
    forward = net[0].forward
    net[0].forward = lambda x: 2 * forward(x)


def merged(net: Any) -> nn.Module:
    """Return a network whose adapters have been added to the weights of the base."""
    net.merge_adapter()
    return net


class Own(nn.Linear):
    """A layer of a user's."""


# By name, what makes an unknown network, and a part of the reason.
UNKNOWN: Mapping[str, tuple[Callable[[], nn.Module], str]] = {
    "a user's layer": (lambda: nn.Sequential(Own(4, 3)), "is a Own"),
    "a user's network": (lambda: Residual(), "is a Residual"),
    "a package's network, inherited": (lambda: type("Mine", (MLP,), {})(3, (4,)), "is a Mine"),
    "a hook": (changed(lambda net: net[0].register_forward_hook(print)), "has hooks"),
    "a hook on a gradient": (changed(lambda net: net[0].weight.register_hook(print)), "has hooks"),
    "a parametrisation": (lambda: nn.Sequential(weight_norm(nn.Linear(4, 3))), "_WeightNorm"),
    "DoRA": (adapted(use_dora=True), "variant"),
    "merged adapters": (lambda: merged(adapted()()), "merged adapters"),
    "tied layers": (changed(lambda net: setattr(net[1], "weight", net[0].weight)), "share"),
    "a forward of its own": (changed(patch), "hooks"),
    "a softmax over samples": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(0)), "may mix samples",
    ),
    "a mean of all batches": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None)), "momentum",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_auto_trains_alone_what_it_does_not_know(name: str) -> None:
    build, reason = UNKNOWN[name]
    made = fleet("mlp", "auto", [4] * 12, model=build)
    assert reason in str(made.training.side_by_side)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"model": Smooth}, "its own training step"),
        ({"algorithm": Bent}, "does not declare side_by_side"),
        ({"optimizer": partial(RMSprop, lr=0.01)}, "RMSprop"),
        ({"optimizer": partial(ASGD, lr=0.01)}, "may mix"),
        ({"optimizer": partial(Adam, lr=0.01, fused=True)}, "fused"),
        ({"fraction": 0.2}, "clients in a round"),
    ],
)
def test_auto_says_why_clients_train_alone(more: dict[str, Any], reason: str) -> None:
    made = fleet("mlp", "auto", [4] * 12, **more)
    assert reason in str(made.training.side_by_side)


class Counts(Smooth):
    """Keeps a number in Python."""

    seen = 0

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)


class Penalty(Smooth):
    """A penalty on weights that it holds in a list, where vmap does not find them."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(num_classes, input_shape)
        self.held = [*self.net.parameters()]

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + sum(p.square().sum() for p in self.held)


class Words(nn.Module):
    """An embedding with a word that pads."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(5, 3, padding_idx=0), nn.Linear(12, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x.abs().long() % 5).flatten(1))


class Twice(Smooth):
    """Logs a name twice in a step."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.log("top", batch[0].max())
        return super().training_step(batch, batch_idx)


class Seeded(Residual):
    """A fixed projection, drawn in every forward pass."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            shift = torch.randn(x.shape[1])
        return super().forward(x + shift)


class Rated(Smooth):
    """Its step sets the rate of its own optimizer."""

    @override
    def configure_optimizers(self) -> Any:
        self.own = SGD(self.parameters(), lr=0.1)
        return self.own

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.own.param_groups[0]["lr"] = 0.1 * 0.5**batch_idx
        return super().training_step(batch, batch_idx)


class Late(Smooth):
    """As `Penalty`, but in batches of three samples."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        parts = [p.square().sum() for p in self.held] if len(batch[0]) == 3 else []
        return loss + sum(parts)

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(num_classes, input_shape)
        self.held = [*self.net.parameters()]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Seeded, "sets the seed"),
        (Rated, "settings of its optimizer"),
        (Late, "in a pack the gradient of net."),  # in batches of three samples
        (Reads, ".item()"),
        (Listened, "hooks on gradients"),
        (Counts, "numbers or tensors in attributes"),
        (Penalty, "in a pack the gradient of net."),
        (Words, "padding"),
        (Twice, "twice"),
    ],
)
def test_a_number_is_checked_on_a_copy(model: type[nn.Module], reason: str) -> None:
    made = fleet("mlp", CLIENTS, model=model)
    assert reason in str(made.training.side_by_side)

    rows, metrics = after(made)
    expected_rows, expected_metrics = after(fleet("mlp", "off", model=model))
    assert torch.equal(rows, expected_rows)
    assert metrics == expected_metrics


def test_a_check_leaves_the_module_as_it_is() -> None:
    stepped_modules = set()

    class Watched(Counts):
        @override
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            stepped_modules.add(id(self))
            return super().training_step(batch, batch_idx)

    group = fleet("mlp", CLIENTS, model=Watched).groups[0]
    assert stepped_modules
    assert id(group.module) not in stepped_modules
    assert group.module.seen == 0
    assert torch.equal(group.live.row_of_module().floats, group.initial.floats)


def centred(layer: nn.Module, _: object, output: Tensor) -> Tensor:
    """A hook that mixes the samples of a batch."""
    return output - output.mean(0)


def mixes_by_hook(net: Any) -> None:
    net[1].register_forward_hook(centred)


def mixes_by_patch(net: Any) -> None:
    forward = net[1].forward
    net[1].forward = lambda x: forward(x - x.mean(0))


@pytest.mark.parametrize("change", [mixes_by_hook, mixes_by_patch])
def test_samples_that_are_filled_up_are_not_mixed_with_others(
    change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients have batches of other sizes; and one line says what is not known."""
    packed = fleet("mlp", 3, model=changed(change))
    alone = fleet("mlp", "off", model=changed(change))
    assert list(packed.training.side_by_side.values()) == [3]

    rows, _ = after(packed)
    expected_rows, _ = after(alone)
    torch.testing.assert_close(rows, expected_rows, rtol=1e-4, atol=1e-5)

    (warning,) = warnings_in(caplog)
    assert "trains 3 clients at once" in warning
    assert "2, 3 and 4 samples" in warning


def test_a_known_network_needs_no_line(caplog: pytest.LogCaptureFixture) -> None:
    fleet("mlp", 3)
    assert warnings_in(caplog) == []


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings that have been logged."""
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
