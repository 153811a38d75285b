"""Operations on whole rows in float64, written like the formulas of the papers."""

from collections.abc import Sequence

import torch
from torch import Tensor


def weighted_sum(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return sum_k w_k x_k; a row of weight 0 takes no part."""
    total = torch.zeros(rows[0].shape, dtype=torch.float64)
    for row, weight in zip(rows, weights, strict=True):
        if weight != 0:
            total += weight * row.to(torch.float64)
    return total


def weighted_mean(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return FedAvg's mean, sum_k w_k x_k / sum_k w_k."""
    return weighted_sum(rows, weights) / sum(weights)


def grouped_mean(
    rows: Sequence[Tensor],
    jobs: Sequence[tuple[Sequence[int], int, int]],
    weights: Sequence[float] | None = None,
) -> list[Tensor]:
    """Return copies of all rows in which every group's common layers are the mean of its members.

    This is FlexiFed's average.

    Args:
        rows: The clients' rows.
        jobs: The groups: members, the first of their common columns, and the one behind the last.
        weights: The clients' weights; all 1 by default.
    """
    averaged = [row.to(torch.float64, copy=True) for row in rows]
    for members, start, stop in jobs:
        if weights is None:
            weights_of_members = [1.0] * len(members)
        else:
            weights_of_members = [weights[k] for k in members]
        if sum(weights_of_members) == 0:
            continue
        mean = weighted_mean([rows[k][start:stop] for k in members], weights_of_members)
        for k in members:
            averaged[k][start:stop] = mean
    return averaged


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
    """Take FedBCD's step, eq. (4b) at `point`, and (4a) of the step after it.

    Returns:
        The next point and the next iterate.
    """
    point = point.to(torch.float64)
    x = x.to(torch.float64)
    gradient = gradient.to(torch.float64)
    anchor = anchor.to(torch.float64)

    new_x = point - lr * (gradient + gamma * (point - anchor))
    if box is not None:
        new_x = torch.clamp(new_x, *box)
    new_point = new_x + extrapolation * (new_x - x)
    return new_point, new_x
