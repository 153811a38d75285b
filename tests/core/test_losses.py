"""Losses of clients side by side have the bits of torch's, whichever way they are computed."""

import pytest
import torch
import torch.nn.functional as F

from lightfed.local.packed.operators import _columns_agree, cross_entropies


@pytest.mark.parametrize("classes", [1, 2, 3, 7, 8, 9, 10, 15, 16, 17, 31, 64, 100])
@pytest.mark.parametrize("rows", [1, 3, 31, 32, 33, 3200])
def test_losses_and_gradients_have_the_bits_of_torchs(rows: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(rows * classes)
    x = (5 * torch.randn(rows, classes, generator=generator)).requires_grad_()
    y = torch.randint(classes, (rows,), generator=generator)
    given = torch.randn(rows, generator=generator)
    wanted, found = F.cross_entropy(x, y, reduction="none"), cross_entropies(x, y)
    assert torch.equal(found, wanted)
    grads = [torch.autograd.grad(losses, x, given)[0] for losses in (found, wanted)]
    assert torch.equal(*grads)


def test_columns_are_used_where_they_are_faster() -> None:
    """Rows of two classes fit any vector; a hundred classes are added up in another order."""
    assert _columns_agree(2)
    assert not _columns_agree(100)


def test_masked_logits_have_finite_losses() -> None:
    x = torch.tensor([[1.0, -torch.inf, 0.5]]).repeat(5, 1)
    y = torch.tensor([0, 2, 0, 2, 0])
    assert torch.equal(cross_entropies(x, y), F.cross_entropy(x, y, reduction="none"))
