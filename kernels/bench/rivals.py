"""The code that a careful user of torch would write: `_foreach`, views, flat rows, one expression.

A `foreach_` function takes models as lists of tensors, a `flat_` function takes them as rows. The
other arguments are those of the papers' formulation in `official`. The `flat_` functions are what
torch.compile gets.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

List = list[Tensor]


def foreach_masked_mean(
    models: Sequence[List], masks: Sequence[List], own: int, keep: List
) -> List:
    """Average as DisPFL does, on lists of tensors; arguments as of `official.dispfl_aggregate`."""
    counts = _zeros_like(keep)
    sums = _zeros_like(keep)
    for mask in masks:
        torch._foreach_add_(counts, mask)
    for model in models:
        torch._foreach_add_(sums, model)
    torch._foreach_clamp_min_(counts, 1)
    torch._foreach_div_(sums, counts)
    torch._foreach_mul_(sums, keep)
    return sums


def flat_masked_mean(
    rows: Sequence[Tensor], masks: Sequence[Tensor], own: int, keep: Tensor
) -> Tensor:
    """Average as DisPFL does, on rows; arguments as of `official.dispfl_aggregate`."""
    total = torch.zeros_like(keep)
    count = torch.zeros_like(keep)
    for row, mask in zip(rows, masks, strict=True):
        total += row
        count += mask
    return total.div_(count.clamp_(min=1)).mul_(keep)


def foreach_merge(
    parts: List, totals: List, counts: List, clients: Sequence[tuple[List, List, List]]
) -> List:
    """Make HeteroFL's mean on views.

    Args:
        parts: The global tensors.
        totals: Buffers like them.
        counts: Buffers like them.
        clients: For every client, views of the totals and of the counts that it covers, and of its
            own tensors there.
    """
    torch._foreach_zero_(totals)
    torch._foreach_zero_(counts)
    for totals_of_client, counts_of_client, tensors in clients:
        torch._foreach_add_(totals_of_client, tensors)
        torch._foreach_add_(counts_of_client, 1)
    for part, total, count in zip(parts, totals, counts, strict=True):
        part.copy_(torch.where(count > 0, total / count, part))
    return parts


def flat_merge(
    row: Tensor, clients: Sequence[Tensor], places: Sequence[Tensor], own: Sequence[Tensor]
) -> Tensor:
    """Make HeteroFL's mean with flat index tensors, one `index_add` a client.

    Args:
        row: (P,) of the global model.
        clients: The clients' rows.
        places: Where in `row` the elements of a client's row belong.
        own: Which of the client's elements they are.
    """
    total = torch.zeros_like(row)
    count = torch.zeros_like(row)
    for client, place, own_of_client in zip(clients, places, own, strict=True):
        values = client[own_of_client]
        total = total.index_add(0, place, values)
        count = count.index_add(0, place, torch.ones_like(values))
    return row.copy_(torch.where(count > 0, total / count, row))


def topk_prune_regrow(weights: List, masks: List, scores: List, counts: Sequence[int]) -> List:
    """Return a float mask for every tensor; of equal magnitudes any may be chosen."""
    out = []
    for weight, mask, score, count in zip(weights, masks, scores, counts, strict=True):
        drop = torch.where(mask > 0, weight.abs(), torch.inf).topk(count, largest=False).indices
        pruned = mask.index_fill(0, drop, 0)
        grow = torch.where(pruned > 0, -1.0, score.abs()).topk(count).indices
        out.append(pruned.index_fill_(0, grow, 1))
    return out


def kthvalue_prune_regrow(weights: List, masks: List, scores: List, counts: Sequence[int]) -> List:
    """Return the same by thresholds; all magnitudes that equal a threshold are taken."""
    out = []
    for weight, mask, score, count in zip(weights, masks, scores, counts, strict=True):
        if count == 0:
            out.append(mask.clone())
            continue
        size = torch.where(mask > 0, weight.abs(), torch.inf)
        pruned = mask * (size > size.kthvalue(count).values)
        gain = torch.where(pruned > 0, -1.0, score.abs())
        least = gain.kthvalue(gain.numel() - count + 1).values
        out.append(pruned + (gain >= least))
    return out


def foreach_grouped(jobs: Sequence[Sequence[List]]) -> None:
    """Average jobs: each has, for every member, the same tensors."""
    for members in jobs:
        mean = _zeros_like(members[0])
        for member in members:
            torch._foreach_add_(mean, member)
        torch._foreach_div_(mean, len(members))
        for member in members:
            torch._foreach_copy_(member, mean)


def flat_grouped(rows: Tensor, jobs: Sequence[tuple[Tensor, int, int]]) -> None:
    """Average jobs: each is a range of columns of the rows of its members."""
    for members, start, stop in jobs:
        columns = rows[:, start:stop]
        columns[members] = columns[members].mean(0)


def foreach_aspg(
    point: List, x: List, gradient: List, anchor: List, *, lr: float, gamma: float,
    extrapolation: float, box: tuple[float, float],
) -> None:  # fmt: skip
    """Take FedBCD's step on lists of tensors."""
    step = torch._foreach_sub(point, anchor)
    torch._foreach_mul_(step, gamma)
    torch._foreach_add_(step, gradient)
    new = torch._foreach_add(point, step, alpha=-lr)
    torch._foreach_clamp_min_(new, box[0])
    torch._foreach_clamp_max_(new, box[1])
    difference = torch._foreach_sub(new, x)
    torch._foreach_copy_(x, new)
    torch._foreach_add_(new, difference, alpha=extrapolation)
    torch._foreach_copy_(point, new)


def flat_aspg(
    point: Tensor, x: Tensor, gradient: Tensor, anchor: Tensor, *, lr: float, gamma: float,
    extrapolation: float, box: tuple[float, float],
) -> None:  # fmt: skip
    """Take FedBCD's step on rows."""
    new = (point - lr * (gradient + gamma * (point - anchor))).clamp(*box)
    point.copy_(new + extrapolation * (new - x))
    x.copy_(new)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for these shapes alone, which torch.compile does best."""
    return torch.compile(function, dynamic=False, fullgraph=True)


def _zeros_like(tensors: List) -> List:
    """Return zeros like every tensor."""
    return [torch.zeros_like(tensor) for tensor in tensors]
