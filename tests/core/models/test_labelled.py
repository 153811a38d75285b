"""Means over the samples that have a label: in packs, whose small batches are filled up."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from lightfed.models.labelled import UNLABELLED, classes_of, loss_of_labelled, mean_of_labelled

# Two clients; the batch of the second one has been filled up by a sample.
LABELS = torch.tensor([[0, 2, 1], [1, 1, UNLABELLED]])
VALUES = torch.arange(24.0).view(2, 3, 4)


def test_samples_without_a_label_are_in_no_mean() -> None:
    expected = torch.stack([VALUES[0].mean(), VALUES[1, :2].mean()])
    assert torch.equal(vmap(mean_of_labelled)(VALUES, LABELS), expected)

    of_samples = VALUES[..., 0]
    expected = torch.stack([of_samples[0].mean(), of_samples[1, :2].mean()])
    assert torch.equal(vmap(mean_of_labelled)(of_samples, LABELS), expected)


def test_they_are_in_no_loss() -> None:
    targets = VALUES.flip(1).softmax(2)

    def losses(outputs: Tensor, targets: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (
            loss_of_labelled(F.mse_loss, outputs, targets, y),
            loss_of_labelled(F.cross_entropy, outputs, targets, y),
        )

    in_a_pack = vmap(losses)(VALUES, targets, LABELS)
    for client, size in enumerate((3, 2)):
        outputs = VALUES[client, :size]
        alone = losses(outputs, targets[client, :size], LABELS[client, :size])
        assert torch.equal(alone[0], F.mse_loss(outputs, targets[client, :size]))
        for of_pack, of_client in zip(in_a_pack, alone, strict=True):
            torch.testing.assert_close(of_pack[client], of_client)


def test_they_have_a_place_in_tables_of_classes() -> None:
    table = torch.randn(3, 5)
    rows = vmap(lambda y: table[classes_of(y)])(LABELS)
    assert torch.equal(rows[1], table[[1, 1, 0]])
    assert torch.equal(classes_of(LABELS[0]), LABELS[0])
