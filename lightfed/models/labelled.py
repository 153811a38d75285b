"""Means over the samples that have a label, for networks that compute their losses themselves.

Only packs have samples without one: they fill up the small batches of clients that train side by
side. All samples of a client alone have labels, and a search for others would take time.
"""

from collections.abc import Callable

from torch import Tensor

from lightfed.utils.torch_private import maybe_get_level

# The label of samples without weight, which torch's losses ignore.
UNLABELLED = -100


def mean_of_labelled(values: Tensor, y: Tensor) -> Tensor:
    """Return the mean of values over the samples that have a label, ().

    Args:
        values: (B, ...).
        y: Labels (B,).
    """
    if not _is_in_a_pack(y):
        return values.mean()

    of_samples = values if values.dim() == 1 else values.flatten(1).mean(1)
    is_labelled = y != UNLABELLED
    return (of_samples * is_labelled).sum() / is_labelled.sum()


def loss_of_labelled(
    loss: Callable[..., Tensor], outputs: Tensor, targets: Tensor, y: Tensor
) -> Tensor:
    """Return the mean of a loss over the samples that have a label, ().

    Args:
        loss: A loss of torch, such as the mean squared error.
        outputs: What it compares with the targets, (B, ...).
        targets: (B, ...), of the same shape.
        y: Labels (B,).
    """
    if not _is_in_a_pack(y):
        return loss(outputs, targets)
    return mean_of_labelled(loss(outputs, targets, reduction="none"), y)


def classes_of(y: Tensor) -> Tensor:
    """Return labels (B,) as positions in a table of classes; 0 for samples without a label."""
    return y.clamp(min=0) if _is_in_a_pack(y) else y


def _is_in_a_pack(y: Tensor) -> bool:
    """Return whether these are the labels of several clients, which `vmap` shows as one's."""
    return maybe_get_level(y) >= 0
