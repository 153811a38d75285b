"""Operations on whole rows in float64, written like the papers' formulas."""

from collections.abc import Sequence

import torch
from torch import Tensor


def weighted_sum(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_k w_k x_k; what weighs 0 takes no part."""
    total = torch.zeros(rows[0].shape, dtype=torch.float64)
    for row, weight in zip(rows, weights, strict=True):
        if weight != 0:
            total += weight * row.to(torch.float64)
    return total


def weighted_mean(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """FedAvg: sum_k w_k x_k / sum_k w_k."""
    return weighted_sum(rows, weights) / sum(weights)


def grouped_mean(
    rows: Sequence[Tensor],
    jobs: Sequence[tuple[Sequence[int], int, int]],
    weights: Sequence[float] | None = None,
) -> list[Tensor]:
    """FlexiFed: every group's common layers are the mean of its members; copies of all rows."""
    out = [row.to(torch.float64, copy=True) for row in rows]
    for members, start, stop in jobs:
        shares = [1.0 if weights is None else weights[k] for k in members]
        if sum(shares) == 0:
            continue
        mean = weighted_mean([rows[k][start:stop] for k in members], shares)
        for k in members:
            out[k][start:stop] = mean
    return out


def aspg_step(
    point: Tensor,
    x: Tensor,
    gradient: Tensor,
    anchor: Tensor,
    *,
    lr: float,
    gamma: float,
    extrapolation: float,
    box: tuple[float, float] | None,
) -> tuple[Tensor, Tensor]:
    """FedBCD, eq. (4b) at `point`, and (4a) of the step after it: the next point and iterate."""
    point, x, gradient, anchor = (t.to(torch.float64) for t in (point, x, gradient, anchor))
    new = point - lr * (gradient + gamma * (point - anchor))
    if box is not None:
        new = torch.clamp(new, *box)
    return new + extrapolation * (new - x), new
