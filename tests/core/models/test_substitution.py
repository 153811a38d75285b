"""Modules that are called with other tensors than their own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.parametrizations import weight_norm
from typing_extensions import override

from lightfed.models.split import evaluating
from lightfed.models.substitution import Substitution


class Recurrent(nn.Module):
    """Keeps references to its weights in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, 3, batch_first=True)

    @override
    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.cell(x.view(-1, 2, 2))
        return outputs[:, -1]


class Moody(nn.Module):
    """Does more than to note its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = 1.0

    @override
    def train(self, mode: bool = True) -> "Moody":
        self.scale = 1.0 if mode else 3.0
        return super().train(mode)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x)


class Tied(nn.Module):
    """A weight with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)
    ),
    "frozen": lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)),
    "normalized weights": lambda: nn.Sequential(weight_norm(nn.Linear(4, 3))),
    "recurrent": Recurrent,
    "moody": Moody,
    "tied": Tied,
    "nothing": nn.Identity,
}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters and float buffers of a module."""
    tensors = {name: p for name, p in module.named_parameters() if p.requires_grad}
    tensors |= {name: b for name, b in module.named_buffers() if b.is_floating_point()}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def other(tensors: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Return other values of a module's tensors."""
    return {name: factor * tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", MODULES)
def test_it_is_functional_call_in_evaluation_mode(name: str) -> None:
    torch.manual_seed(1)
    module = MODULES[name]()
    x = torch.randn(5, 4)
    module(x)  # statistics of its own
    own = tensors_of(module)
    models = [other(own, 0.5), own, other(own, 2.0)]

    expected = []
    with evaluating(module):
        expected = [functional_call(module, dict(model), (x,)) for model in models]
    objects = {name: id(p) for name, p in module.state_dict(keep_vars=True).items()}
    values = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    substitution = Substitution(module, list(own))
    outputs = substitution.outputs([list(model.values()) for model in models], x)

    for output, of_functional_call in zip(outputs, expected, strict=True):
        assert torch.equal(output, of_functional_call)
        assert not output.requires_grad
    assert all(part.training for part in module.modules())
    assert {name: id(p) for name, p in module.state_dict(keep_vars=True).items()} == objects
    assert all(torch.equal(t, values[name]) for name, t in module.state_dict().items())


def test_modes_within_the_module_stay() -> None:
    module = MODULES["layers"]()
    module[1].eval()  # type: ignore[index]
    Substitution(module, []).outputs([[]], torch.randn(5, 4))
    assert [part.training for part in module] == [True, False, True, True, True]  # type: ignore[attr-defined]


def test_an_error_leaves_the_module_as_it_was() -> None:
    module: Any = MODULES["layers"]()
    weight = module[0].weight
    substitution = Substitution(module, ["0.weight"])
    with pytest.raises(RuntimeError, match="shape"):
        substitution.outputs([[torch.zeros(6, 3)]], torch.randn(5, 4))
    assert module[0].weight is weight
    assert module.training


def test_under_vmap_each_client_has_its_own_tensors() -> None:
    module = MODULES["layers"]()
    own = tensors_of(module)
    x = torch.randn(3, 5, 4)
    stacked = [torch.stack([tensor, 2 * tensor, 3 * tensor]) for tensor in own.values()]

    substitution = Substitution(module, list(own))
    (outputs,) = vmap(lambda tensors, x: substitution.outputs([tensors], x))(stacked, x)
    for client in range(3):
        tensors = [tensor[client] for tensor in stacked]
        (expected,) = substitution.outputs([tensors], x[client])
        torch.testing.assert_close(outputs[client], expected)
