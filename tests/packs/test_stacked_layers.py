"""Layers with a forward of their own for K clients, against the layers of one client each."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightfed.packs import stacked

SIZES = [4, 3, 2]
ARITHMETIC = (
    "add", "addcmul", "addcmul_", "div", "mul", "native_batch_norm", "native_batch_norm_backward",
    "neg", "pow", "pow_", "sub", "sub_",
)  # fmt: skip
NORMS: dict[int, type[nn.Module]] = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}


def values_of(modules: list[nn.Module]) -> stacked.Views:
    """Return the tensors of the modules, stacked; parameters are to be differentiated."""
    values = {}
    for name, tensor in modules[0].state_dict(keep_vars=True).items():
        copies = torch.stack([module.state_dict()[name] for module in modules])
        values[name] = copies.requires_grad_(tensor.requires_grad)
    return values


class Operators(TorchDispatchMode):
    """Counts the operators that compute tensors of at least this many elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.names: list[str] = []

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        of_result = result if isinstance(result, tuple) else (result,)
        if not func.is_view and any(
            isinstance(tensor, Tensor) and tensor.numel() >= self.elements for tensor in of_result
        ):
            self.names.append(str(func))
        return result


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("size", [(), (5,), (3, 4)], ids=["vectors", "sequences", "images"])
def test_filled_batches_are_normalized_as_those_of_a_client_alone(
    size: tuple[int, ...], affine: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    kind: Any = NORMS[len(size)]
    clients = [kind(6, affine=affine) for _ in SIZES]
    if affine:
        for client in clients:
            client.weight.data.normal_(generator=generator)
            client.bias.data.normal_(generator=generator)

    x = torch.randn(3, 4, 6, *size, generator=generator).mul_(3.0).add_(5.0)
    seen = torch.randn(3, 4, 6, *size, generator=generator)  # the gradient of the output
    values = values_of(clients)
    inputs = x.clone().requires_grad_()
    outputs = stacked.forward(clients[0], values, inputs, sizes=torch.tensor(SIZES))
    for weight, number in zip(seen, SIZES, strict=True):
        weight[number:] = 0.0
    outputs.backward(seen)

    for k, (client, number) in enumerate(zip(clients, SIZES, strict=True)):
        own = x[k, :number].clone().requires_grad_()
        expected = client(own)
        expected.backward(seen[k, :number])
        torch.testing.assert_close(outputs[k, :number], expected, rtol=1e-5, atol=1e-5)

        assert inputs.grad is not None
        assert own.grad is not None
        torch.testing.assert_close(inputs.grad[k, :number], own.grad, rtol=1e-4, atol=1e-5)
        assert not inputs.grad[k, number:].any()

        for name, buffer in client.named_buffers():
            torch.testing.assert_close(values[name][k], buffer, rtol=1e-5, atol=1e-5)
        for name, parameter in client.named_parameters():
            gradient = values[name].grad
            assert gradient is not None
            torch.testing.assert_close(gradient[k], parameter.grad, rtol=1e-4, atol=1e-4)


def test_normalizing_filled_batches_takes_few_operators_on_all_images() -> None:
    norm = nn.BatchNorm2d(6)
    values = values_of([norm] * 3)
    x = torch.randn(3, 4, 6, 8, 8, requires_grad=True)

    with Operators(x.numel()) as operators:
        outputs = stacked.forward(norm, values, x, sizes=torch.tensor(SIZES))
        outputs.backward(torch.ones_like(outputs))

    # The test itself causes copies between the axes of clients and samples.
    arithmetic = [name for name in operators.names if name.split(".")[1] in ARITHMETIC]
    # x - mean, its square, the normalized images; their gradient and its two corrections.
    assert len(arithmetic) == 6, operators.names


class Scaled(nn.Module):
    """Max-pooling of images times a parameter."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.pool = pool

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.pool(torch.relu(self.scale * x))  # with many equal maxima


@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 1, 0)])
def test_maxima_have_the_bits_of_a_client_alone(window: tuple[int, int, int]) -> None:
    module = Scaled(nn.MaxPool2d(*window))
    scales = torch.tensor([0.5, 1.5], requires_grad=True)
    x = torch.randn(2, 3, 8, 6, 6, generator=torch.Generator().manual_seed(1))
    inputs = x.clone().requires_grad_()
    outputs = stacked.forward(module, {"scale": scales}, inputs)
    outputs.square().sum().backward()

    for k in range(2):
        own = x[k].clone().requires_grad_()
        pooled = F.max_pool2d(torch.relu(scales[k].detach() * own), *window)
        pooled.square().sum().backward()
        assert torch.equal(outputs[k], pooled)
        assert inputs.grad is not None
        assert own.grad is not None
        assert torch.equal(inputs.grad[k], own.grad)
