"""What private names of torch do, on the version that is installed.

`lightfed/utils/torch_private.py` imports them; private attributes are read where they are needed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightfed.utils import torch_private as private

PACKAGE = Path(private.__file__).parents[1]
CLIENTS = 3
# Functions of torch itself. Their public doubles take one tensor at a time.
FOREACH = {
    "_foreach_add",
    "_foreach_add_",
    "_foreach_addcmul",
    "_foreach_addcmul_",
    "_foreach_clamp_max_",
    "_foreach_clamp_min_",
    "_foreach_copy_",
    "_foreach_mul_",
    "_foreach_sub",
}


def private_functions() -> Iterator[str]:
    """All `torch._name` of the package."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "torch":
                continue
            if node.attr.startswith("_") and not node.attr.startswith("__"):
                yield node.attr


def test_the_private_functions_of_torch_are_those_named_here() -> None:
    assert set(private_functions()) == FOREACH


def _own(name: str, one: Tensor, two: Tensor) -> Tensor:
    """What a function does to a tensor of the list."""
    if "clamp_max" in name:
        return one.clamp(max=0.25)
    if "clamp_min" in name:
        return one.clamp(min=0.25)
    if "addcmul" in name:
        return torch.addcmul(one, two, two)
    own = {"add": torch.add, "mul": torch.mul, "sub": torch.sub}
    kind = name.removeprefix("_foreach_").rstrip("_")
    return two if kind == "copy" else own[kind](one, two)


@pytest.mark.parametrize("name", sorted(FOREACH))
def test_a_function_of_a_list_is_that_of_each_tensor(name: str) -> None:
    one = [torch.randn(4, 3), torch.randn(5)]
    two = [torch.randn(4, 3), torch.randn(5)]
    expected = [_own(name, a, b) for a, b in zip(one, two, strict=True)]

    rest: tuple[Any, ...] = (two,)
    if "clamp" in name:
        rest = (0.25,)
    elif "addcmul" in name:
        rest = (two, two)
    found = getattr(torch, name)(one, *rest)

    for mine, wanted in zip(one if name.endswith("_") else found, expected, strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_the_parts_of_vmap_do_what_vmap_does(randomness: str) -> None:
    x, weight = torch.randn(CLIENTS, 5, 4), torch.randn(CLIENTS, 2, 4)

    def step(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.dropout(nn.functional.linear(x, weight).relu(), 0.5, training=True)

    torch.manual_seed(0)
    expected = torch.func.vmap(step, randomness=randomness)(x, weight)

    torch.manual_seed(0)
    private.lazy_load_decompositions()
    with private.vmap_increment_nesting(CLIENTS, randomness) as level:
        inner = [private._add_batch_dim(part, 0, level) for part in (x, weight)]
        found = private._remove_batch_dim(step(*inner), level, CLIENTS, 0)
    assert torch.equal(found, expected)


def test_a_tensor_in_vmap_says_what_it_is() -> None:
    x = torch.randn(5, CLIENTS, 4)
    with private.vmap_increment_nesting(CLIENTS, "different") as level:
        inner = private._add_batch_dim(x, 1, level)
        assert inner.shape == (5, 4)
        assert private.maybe_get_level(inner) == level
        assert private.maybe_get_bdim(inner) == 1
        assert private.get_unwrapped(inner) is x
        assert private.maybe_get_level(x) != level


def test_a_function_of_ones_own_can_leave_vmap_and_come_back() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Tensor:
            return 2 * gradients[0]

    x = torch.randn(CLIENTS, 4, requires_grad=True)
    with private.vmap_increment_nesting(CLIENTS, "different") as level:
        inner = private._add_batch_dim(x, 0, level)
        with private.temporarily_pop_interpreter_stack():
            doubled = Doubled.apply(private.get_unwrapped(inner))
        again = private._add_batch_dim(doubled, 0, level)
        # What was made before it is still of this level, and so is what is made afterwards.
        total = private._remove_batch_dim((inner + again).sum(), level, CLIENTS, 0)

    assert torch.allclose(total, 3 * x.sum(1))
    total.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_the_classes_of_layers() -> None:
    norms = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
    assert all(issubclass(kind, private._BatchNorm) for kind in norms)
    assert issubclass(nn.InstanceNorm2d, private._NormBase)
    assert issubclass(private._BatchNorm, private._NormBase)
    convolutions = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d
    assert all(issubclass(kind, private._ConvNd) for kind in convolutions)


def test_nested_structures() -> None:
    given = {"a": [torch.ones(2), 3], "b": (torch.zeros(1),)}
    leaves, spec = private.tree_flatten(given)
    assert [type(leaf) for leaf in leaves] == [Tensor, int, Tensor]
    assert private.tree_unflatten(leaves, spec) == given
    doubled = private.tree_map_only(Tensor, lambda x: 2 * x, given)
    assert doubled["a"][0].tolist() == [2.0, 2.0]
    assert doubled["a"][1] == 3


def test_hooks_of_a_module_are_seen() -> None:
    layer: Any = nn.Linear(2, 2)
    register = {
        "_forward_hooks": layer.register_forward_hook,
        "_forward_pre_hooks": layer.register_forward_pre_hook,
        "_backward_hooks": layer.register_full_backward_hook,
        "_backward_pre_hooks": layer.register_full_backward_pre_hook,
    }
    for name, registers in register.items():
        assert not getattr(layer, name)
        registers(lambda *_: None)
        assert len(getattr(layer, name)) == 1


def test_hooks_of_a_parameter_are_seen() -> None:
    weight: Any = nn.Parameter(torch.ones(2))
    assert not weight._backward_hooks
    assert not weight._post_accumulate_grad_hooks
    weight.register_hook(lambda grad: grad)
    weight.register_post_accumulate_grad_hook(lambda _: None)
    assert len(weight._backward_hooks) == len(weight._post_accumulate_grad_hooks) == 1


def test_hooks_of_an_optimizer_are_seen() -> None:
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_the_tensors_of_a_module_take_the_place_of_others() -> None:
    """`stacked.forward` puts tensors that are no parameters where a module keeps its own."""
    norm: Any = nn.BatchNorm1d(2)
    assert {*norm._parameters} == {"weight", "bias"}
    assert {*norm._buffers} == {"running_mean", "running_var", "num_batches_tracked"}
    mine = torch.full((2,), 7.0)
    norm._parameters["weight"] = mine
    assert norm.weight is mine
    assert {*nn.Sequential(norm)._modules} == {"0"}


def test_a_tensor_counts_its_changes() -> None:
    x = torch.ones(2)
    before = x._version
    x.add_(1)
    assert x._version == before + 1


def test_a_compiled_module_is_one_that_compiles_its_own_calls() -> None:
    """`lightfed/models/compiled.py` makes the second of the first."""
    wrapper = torch.compile(nn.Linear(2, 2), backend="eager")
    assert isinstance(wrapper, private.OptimizedModule)
    inner: Any = wrapper._orig_mod
    assert type(inner) is nn.Linear
    assert inner._compiled_call_impl is None
    assert callable(wrapper.dynamo_ctx(inner._call_impl))

    inner.compile(backend="eager")
    assert inner._compiled_call_impl is not None
