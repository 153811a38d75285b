"""What a packed step launches: the arithmetic of its layers, and no copies between them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightfed.algorithms.fedavg import drop_statistics
from lightfed.models.client_module import ClientModule
from lightfed.networks import MLP, Conv, LeNet, PreActResNet, SimpleCNN
from lightfed.packs import stacked
from tests.packs.federations import CLIENTS, fleet
from tests.small import run_round

K, B = 3, 5
COPIES = ("clone", "copy_", "ones", "zeros", "new_zeros")


class Launches(TorchDispatchMode):
    """Counts operators below `vmap` and autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.names[func.name().partition("::")[2].partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def conv() -> nn.Module:
    network = Conv(3, (1, 16, 16), hidden=(8, 12, 16))
    drop_statistics(network)
    return network


def preactivated() -> nn.Module:
    network = PreActResNet(3, (1, 16, 16), hidden=(8, 12), blocks=(1, 2))
    drop_statistics(network)
    return network


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "conv": conv,
    "preactivated": preactivated,
    "simple": lambda: SimpleCNN(3, (1, 16, 16), channels=(8, 12), hidden=16),
    "lenet": lambda: LeNet(3, (1, 32, 32)),
    "statistics": lambda: Conv(3, (1, 16, 16), hidden=(8, 12)),
    "normalised last": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Flatten(),
        nn.LazyLinear(3),
    ),
    "mlp": lambda: MLP(3, (1, 16, 16), hidden=(8, 12)),
    "lines": lambda: nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(256, 8, bias=False), nn.GELU()),
        nn.Linear(8, 8),
        nn.Flatten(),
        nn.Tanh(),
        nn.Linear(8, 3),
    ),
}
CHAINS = ("mlp", "lines")  # of these networks


def trained(
    network: nn.Module, x: Tensor, *, plain: bool
) -> tuple[Tensor, Mapping[str, Tensor], Counter[str]]:
    """Return outputs and gradients of K clients, and the operators that were launched.

    Args:
        network: The network of all clients, whose models differ by noise.
        x: (K, B, ...) inputs.
        plain: Whether normalization and pooling follow the rules of `vmap`.
    """
    generator = torch.Generator().manual_seed(1)
    values = {}
    for name, parameter in network.named_parameters():
        noise = torch.randn(K, *parameter.shape, generator=generator)
        values[name] = (parameter.detach() + 0.1 * noise).requires_grad_()
    buffers = {name: torch.stack([buffer] * K) for name, buffer in network.named_buffers()}
    tensors = values | buffers

    places = stacked.Places(network, tensors, known=not plain)
    if plain:
        places.norms = []
        places.pools = []

    stacked.forward(network, dict(tensors), x, places=places)  # makes the constants
    with Launches() as launches:
        outputs = stacked.forward(network, dict(tensors), x, places=places)
        gradients = torch.autograd.grad((outputs**2).sum(), list(values.values()))
    return outputs.detach(), dict(zip(values, gradients, strict=True)), launches.names


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", NETWORKS)
def test_layers_of_our_own_have_the_bits_of_vmap(name: str, layout: torch.memory_format) -> None:
    size = 32 if name == "lenet" else 16
    torch.manual_seed(0)
    network = NETWORKS[name]().train()
    x = torch.randn(K * B, 1, size, size)
    network(x[:B])  # makes a lazy layer
    in_place = [getattr(layer, "inplace", None) for layer in network.modules()]
    batch = x.to(memory_format=layout).unflatten(0, (K, B))
    outputs, gradients, launches = trained(network, batch, plain=False)
    plain_outputs, plain_gradients, plain_launches = trained(network, batch, plain=True)

    assert torch.equal(outputs, plain_outputs)
    for name, gradient in plain_gradients.items():
        assert torch.equal(gradients[name], gradient), name
    assert sum(launches.values()) <= sum(plain_launches.values())

    # The network is as it was.
    assert not any("forward" in vars(layer) for layer in network.modules())
    assert [getattr(layer, "inplace", None) for layer in network.modules()] == in_place


def chain_of(network: nn.Module) -> Any:
    names = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    return stacked.Places(network, names, known=True).chain


@pytest.mark.parametrize("name", NETWORKS)
def test_lines_and_activations_do_without_vmap(name: str) -> None:
    network = NETWORKS[name]()
    assert (chain_of(network) is not None) == (name in CHAINS)
    assert (chain_of(ClientModule(network, num_classes=3)) is not None) == (name in CHAINS)


def hooked() -> nn.Module:
    network = MLP(3, (1, 16, 16), hidden=(8,))
    network.layers[2].register_forward_hook(lambda *_: None)
    return network


def frozen(name: str) -> nn.Module:
    network = MLP(3, (1, 16, 16), hidden=(8,))
    network.get_parameter(name).requires_grad_(False)
    return network


class Doubled(MLP):
    """Calls its layers, and does more."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "build",
    [
        hooked,
        lambda: frozen("layers.1.weight"),
        lambda: frozen("layers.1.bias"),
        lambda: Doubled(3, (1, 16, 16)),
        lambda: MLP(3, (1, 16, 16), hidden=(8,), dropout=0.5),
        lambda: nn.Sequential(nn.Flatten(2), nn.Linear(256, 3)),
        lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
    ],
)
def test_what_is_more_than_a_chain_goes_through_vmap(build: Callable[[], nn.Module]) -> None:
    assert chain_of(build()) is None


def test_lines_on_more_than_one_axis_go_through_vmap() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(K, B, 4, 16)
    outputs, gradients, _ = trained(network, x, plain=False)
    plain_outputs, plain_gradients, _ = trained(network, x, plain=True)

    assert torch.equal(outputs, plain_outputs)
    assert all(torch.equal(gradients[name], plain_gradients[name]) for name in gradients)


@pytest.mark.parametrize("name", ["conv", "preactivated", "simple"])
def test_nothing_is_copied_between_layers(name: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]().train()
    x = torch.randn(K, B, 1, 16, 16)
    _, _, launches = trained(network, x, plain=False)
    # On a CPU max-pooling copies images and gradients into the format channels_last and back.
    pools = sum(isinstance(layer, nn.MaxPool2d) for layer in network.modules())
    assert launches.pop("clone", 0) == 4 * pools
    assert [name for name in launches if name in COPIES] == []

    _, _, plain_launches = trained(network, x, plain=True)
    assert [name for name in plain_launches if name in COPIES] != []


def test_a_long_session_launches_only_its_steps() -> None:
    """What starts and ends a session, and gathers its batches, is launched once."""

    def launched(epochs: int) -> Counter[str]:
        made = fleet("mlp", CLIENTS, sizes=[8] * CLIENTS, epochs=epochs)
        run_round(made, 0)
        with Launches() as launches:
            run_round(made, 1)
        return launches.names

    short, long = launched(1), launched(3)
    for name in ("index_select", "clone", "copy_", "ones_like", "new_zeros", "stack", "cat"):
        assert long[name] == short[name], name
    assert long["baddbmm"] == 3 * short["baddbmm"]
