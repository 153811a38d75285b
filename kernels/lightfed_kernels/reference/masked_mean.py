"""The mean over the neighbours that cover an element, in float64, with masks as booleans."""

from collections.abc import Sequence

import torch
from torch import Tensor


def masked_mean(
    rows: Sequence[Tensor],
    lists: Sequence[Sequence[int]],
    *,
    masks: Sequence[Tensor] | None = None,
    receivers: Sequence[Tensor] | None = None,
    weights: Sequence[Sequence[float]] | None = None,
    over: str = "covered",
) -> Tensor:
    """Return DisPFL's mean (algorithm 1, line 7) of every receiver, as (R, P) of float64.

        w~_r = [ sum_{k in S_r} a_k w_k * m_k / sum_{k in S_r} a_k m_k ] * m_r

    Args:
        rows: w_k, (senders, P).
        lists: S_r, one list of senders per receiver.
        masks: m_k, (senders, P) bool; everything is covered by default.
        receivers: m_r, (R, P) bool; everything is kept by default.
        weights: a_k, one list per receiver; a sender of weight 0 takes no part.
        over: `covered` divides by the weights that cover an element, `neighbours` by all of them.
    """
    means = []
    for r, senders in enumerate(lists):
        if not senders:
            means.append(torch.zeros(rows[0].shape, dtype=torch.float64))
            continue
        rows_of_senders = [rows[k].to(torch.float64) for k in senders]
        if masks is None:
            masks_of_senders = [torch.ones_like(row, dtype=torch.bool) for row in rows_of_senders]
        else:
            masks_of_senders = [masks[k].bool() for k in senders]
        weights_of_senders = [1.0] * len(senders) if weights is None else weights[r]
        means.append(_one(rows_of_senders, masks_of_senders, weights_of_senders, over))

    mean = torch.stack(means)
    if receivers is None:
        return mean
    return torch.where(torch.stack(list(receivers)), mean, 0.0)


def _one(rows: list[Tensor], masks: list[Tensor], weights: Sequence[float], over: str) -> Tensor:
    """Return the mean of one receiver, (P,)."""
    total = torch.zeros_like(rows[0])
    divisor = torch.zeros_like(rows[0])
    for row, mask, weight in zip(rows, masks, weights, strict=True):
        if weight == 0:
            continue
        # w_k * m_k, but a mask hides a NaN as well.
        total += weight * torch.where(mask, row, 0.0)
        divisor += weight * (mask if over == "covered" else torch.ones_like(mask))
    return torch.where(divisor > 0, total / divisor, 0.0)
