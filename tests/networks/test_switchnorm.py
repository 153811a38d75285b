"""Switchable normalisation against the authors' module and the two norms that it mixes."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from lightfed.algorithms.pfedmoe.mixture import SwitchNorm1d
from tests.core.models.client_cases import random
from tests.small import GOLDEN

VECTORS = load_file(GOLDEN / "pfedmoe/moe.safetensors")


def recorded(part: str) -> dict[str, Tensor]:
    """The tensors of the authors' module, whose shapes are (1, F)."""
    prefix = f"sn1d/{part}/"
    return {n.removeprefix(prefix): t for n, t in VECTORS.items() if n.startswith(prefix)}


def loaded(*, debias: bool) -> SwitchNorm1d:
    norm = SwitchNorm1d(12, debias=debias)
    start = {n: t.reshape(norm.state_dict()[n].shape) for n, t in recorded("init").items()}
    missing = norm.load_state_dict(start, strict=False)
    assert missing.missing_keys == ["num_batches_tracked"]
    assert not missing.unexpected_keys
    return norm


@pytest.mark.parametrize("debias", [False, True])
def test_training_is_the_released_modules(debias: bool) -> None:
    norm = loaded(debias=debias)
    x = VECTORS["sn1d/x0"].clone().requires_grad_()
    y = norm(x)
    (y * torch.arange(12)).sum().backward()  # the recorded gradients are of this
    torch.testing.assert_close(y, VECTORS["sn1d/train_y0"], rtol=0, atol=1e-6)
    torch.testing.assert_close(x.grad, VECTORS["sn1d/grad_x0"], rtol=1e-6, atol=1e-6)
    for name, grad in recorded("grad0").items():
        found = norm.get_parameter(name).grad
        torch.testing.assert_close(found, grad.view_as(found), rtol=1e-6, atol=1e-6)
    for batch in (1, 2):
        y = norm(VECTORS[f"sn1d/x{batch}"])
        torch.testing.assert_close(y, VECTORS[f"sn1d/train_y{batch}"], rtol=0, atol=1e-6)
    for name, tensor in recorded("after3").items():
        found = norm.state_dict()[name]
        torch.testing.assert_close(found, tensor.view_as(found), rtol=0, atol=1e-6)
    assert norm.num_batches_tracked == 3


def test_evaluation_is_the_released_modules_only_without_debias() -> None:
    for debias in (False, True):
        norm = loaded(debias=debias)
        for batch in range(3):
            norm(VECTORS[f"sn1d/x{batch}"])
        y = norm.eval()(VECTORS["sn1d/x0"])
        same = torch.allclose(y, VECTORS["sn1d/eval_y0"], rtol=0, atol=1e-6)
        assert same is not debias


@torch.no_grad()
def test_debiased_statistics_are_those_of_the_batches() -> None:
    norm, x = SwitchNorm1d(6), 3 * random(9, 6) + 2
    norm.mean_weight.copy_(torch.tensor([-40.0, 40.0]))  # the batch's alone
    norm.var_weight.copy_(torch.tensor([-40.0, 40.0]))
    for _ in range(4):
        trained = norm(x)
    torch.testing.assert_close(norm.eval()(x), trained, rtol=1e-4, atol=1e-4)
    for other in (x.flip(1), -x):
        norm.train()(other)
    running = norm._running_statistics()
    shares = torch.tensor([0.997**k for k in (5, 4, 3, 2, 1, 0)])
    batches = torch.stack([x, x, x, x, x.flip(1), -x])
    for found, each in zip(running, (batches.mean(1), batches.var(1)), strict=True):
        expected = (shares[:, None] * each).sum(0) / shares.sum()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_one_sided_weights_are_layer_and_batch_normalisation() -> None:
    x = random(9, 6)
    shifted = {"weight": random(6, seed=1), "bias": random(6, seed=2)}
    for side, dimension in ((40.0, 1), (-40.0, 0)):
        norm = SwitchNorm1d(6)
        for share in (norm.mean_weight, norm.var_weight):
            share.copy_(torch.tensor([side, -side]))
        for name, tensor in shifted.items():
            norm.get_parameter(name).copy_(tensor)
        count = x.shape[dimension]
        # Those take the biased variance.
        eps = 1e-5 * (count - 1) / count
        if dimension == 1:
            plain = F.layer_norm(x, (6,), eps=eps)
        else:
            plain = F.batch_norm(x, None, None, training=True, eps=eps)
        expected = plain * ((count - 1) / count) ** 0.5 * shifted["weight"] + shifted["bias"]
        torch.testing.assert_close(norm(x), expected, rtol=1e-4, atol=1e-5)
