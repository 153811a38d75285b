"""The perceptron of the last characters."""

import pytest
import torch

from lightfed.networks.char_mlp import CharMLP
from lightfed.utils.errors import UserError


def test_only_the_last_characters_count() -> None:
    network = CharMLP(5, (12,), context=4)
    text = torch.randint(1, 71, (3, 12), dtype=torch.uint8)
    logits = network(text)
    assert logits.shape == (3, 5)

    other_beginning = text.clone()
    other_beginning[:, :8] = 1
    assert torch.equal(network(other_beginning), logits)

    other_end = text.clone()
    other_end[:, 8] = text[:, 8] % 70 + 1
    assert (network(other_end) != logits).any(1).all()


def test_no_character_is_zero_and_stays_so() -> None:
    network = CharMLP(5, (4,), context=4, hidden=[7])
    network(torch.zeros(2, 4, dtype=torch.uint8)).sum().backward()
    assert not network.embedding.weight[0].any()
    assert network.embedding.weight.grad is not None
    assert not network.embedding.weight.grad.any()


def test_hidden_layers_have_their_share_of_units() -> None:
    network = CharMLP(5, (9,), context=3, embedding=2, hidden=[10, 7], letters=255, rate=0.5)
    shapes = [tuple(p.shape) for p in network.parameters() if p.dim() == 2]
    assert shapes == [(256, 2), (5, 6), (4, 5), (5, 4)]


@pytest.mark.parametrize("shape", [(3,), (1, 8, 8)])
def test_samples_that_are_no_texts_of_the_length_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="context: 4 for samples of shape"):
        CharMLP(5, shape, context=4)
