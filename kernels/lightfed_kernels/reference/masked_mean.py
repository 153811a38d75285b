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
    """(R, P) float64: DisPFL, algorithm 1, line 7, for every receiver.

        w~_r = [ sum_{k in S_r} a_k w_k * m_k / sum_{k in S_r} a_k m_k ] * m_r

    Args:
        rows: w_k, (senders, P).
        lists: S_r, one list of senders per receiver.
        masks: m_k, (senders, P) bool.
        receivers: m_r, (R, P) bool.
        weights: a_k, one list per receiver; a sender of weight 0 takes no part.
        over: `covered` divides by the weights that cover an element, `neighbours` by all of them.
    """
    out = [
        _one(
            [rows[k].to(torch.float64) for k in chosen],
            [torch.ones_like(rows[k], dtype=torch.bool) if masks is None else masks[k].bool()
             for k in chosen],
            [1.0] * len(chosen) if weights is None else weights[r],
            over,
        )
        if chosen
        else torch.zeros(rows[0].shape, dtype=torch.float64)
        for r, chosen in enumerate(lists)
    ]  # fmt: skip
    means = torch.stack(out)
    return means if receivers is None else torch.where(torch.stack(list(receivers)), means, 0.0)


def _one(rows: list[Tensor], masks: list[Tensor], weights: Sequence[float], over: str) -> Tensor:
    total = torch.zeros_like(rows[0])
    divisor = torch.zeros_like(rows[0])
    for row, mask, weight in zip(rows, masks, weights, strict=True):
        if weight == 0:
            continue
        # w_k * m_k, where a mask hides a NaN as well
        total += weight * torch.where(mask, row, 0.0)
        divisor += weight * (mask if over == "covered" else torch.ones_like(mask))
    return torch.where(divisor > 0, total / divisor, 0.0)
