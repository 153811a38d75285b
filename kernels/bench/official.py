"""The papers' formulations: named tensors, loops over them, float masks, sorts, index tensors.

They are written from the papers, and structured as the papers' released codes are. The benchmark
compares the operations with them, and them with the same references.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

# The magnitude of an element that is no candidate, where candidates are chosen by sorting.
SENTINEL = 1e5


def dispfl_aggregate(
    models: Sequence[Tensors], masks: Sequence[Tensors], own: int, keep: Tensors
) -> tuple[Tensors, Tensors]:
    """Average as DisPFL does (algorithm 1): sum_j w_j / sum_j m_j where somebody covers.

    The mean is masked by the receiver's own mask. The released code starts its sums from a copy of
    the receiver's own tensors less themselves, and keeps a copy of the mean that is not masked.

    Args:
        models: The senders' models, zero where their masks are.
        masks: The masks of the senders' last training, as floats.
        own: The receiver's position among the senders.
        keep: The mask of the receiver's next training.

    Returns:
        The masked mean, and the mean that is not masked.
    """
    share = _copy(masks[own])
    for name in share:
        share[name] = share[name] - share[name]
        for mask in masks:
            share[name] += mask[name]
    for name in share:
        share[name] = torch.where(share[name] != 0, 1 / share[name], 0.0)
    mean = _copy(models[own])
    for name in mean:
        mean[name] = mean[name] - mean[name]
        for model in models:
            mean[name] += share[name] * model[name]
    unmasked = _copy(mean)
    for name in keep:
        mean[name] = mean[name] * keep[name]
    return mean, unmasked


def _copy(tensors: Tensors) -> Tensors:
    """Return copies of all tensors."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def dispfl_prune(weights: Tensors, masks: Tensors, counts: Mapping[str, int]) -> Tensors:
    """Drop the active weights of least magnitude, `counts[name]` of each tensor."""
    out: Tensors = {}
    for name, mask in masks.items():
        magnitude = torch.where(mask > 0, weights[name].abs(), SENTINEL)
        _, order = torch.sort(magnitude.view(-1))
        out[name] = mask.clone()
        out[name].view(-1)[order[: counts[name]]] = 0
    return out


def dispfl_regrow(masks: Tensors, scores: Tensors, counts: Mapping[str, int]) -> Tensors:
    """Grow where the score is largest among all zeros, `counts[name]` of each tensor."""
    out: Tensors = {}
    for name, mask in masks.items():
        magnitude = torch.where(mask == 0, scores[name].abs(), -SENTINEL)
        _, order = torch.sort(magnitude.view(-1), descending=True)
        out[name] = mask.clone()
        out[name].view(-1)[order[: counts[name]]] = 1
    return out


def dispfl_random(masks: Tensors, counts: Mapping[str, int]) -> Tensors:
    """Grow at random positions among all zeros, `counts[name]` of each tensor."""
    out: Tensors = {}
    generator = torch.Generator(next(iter(masks.values())).device).manual_seed(0)
    for name, mask in masks.items():
        grown = mask.clone().view(-1)
        free = (grown == 0).float()
        if counts[name]:
            grown[torch.multinomial(free, counts[name], generator=generator)] = 1
        out[name] = grown.view_as(mask)
    return out


Indices = dict[str, tuple[Tensor, ...]]


def heterofl_split(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> Indices:
    """Return the leading indices of the first two dimensions of every tensor of a level."""
    indices: Indices = {}
    for name, shape in shapes.items():
        indices[name] = tuple(torch.arange(size, device=device) for size in shape[:2])
    return indices


def heterofl_distribute(model: Tensors, clients: Sequence[Indices]) -> list[Tensors]:
    """Distribute as HeteroFL does: a client gets the global parameters at its indices."""
    models = []
    for indices in clients:
        models.append({name: model[name][_grid(index)].clone() for name, index in indices.items()})
    return models


def heterofl_combine(
    model: Tensors,
    locals_: Sequence[Tensors],
    clients: Sequence[Indices],
    labels: Sequence[Tensor | None],
    label_rows: Sequence[str],
) -> Tensors:
    """Combine as HeteroFL does (equation 3): the mean over the clients that hold an element.

    What nobody holds stays. Of a tensor whose rows are labels, a client holds only the rows of its
    labels.
    """
    for name, parameter in model.items():
        total = torch.zeros_like(parameter)
        count = torch.zeros_like(parameter)
        for local, indices, held_labels in zip(locals_, clients, labels, strict=True):
            index = indices[name]
            value = local[name]
            if name in label_rows and held_labels is not None:
                index = (index[0][held_labels], *index[1:])
                value = value[held_labels]
            grid = _grid(index)
            total[grid] += value
            count[grid] += 1
        held = count > 0
        total[held] = total[held] / count[held]
        parameter[held] = total[held]
    return model


def _grid(index: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the indices of all combinations of some indices per dimension."""
    return torch.meshgrid(*index, indexing="ij")


def flexifed_average(models: Sequence[Tensors], jobs: Iterable[tuple[Sequence[int], str]]) -> None:
    """Average as FlexiFed does: clients that share a tensor all get its mean over them."""
    for members, name in jobs:
        mean = torch.zeros_like(models[members[0]][name])
        for k in members:
            mean += models[k][name]
        mean /= len(members)
        for k in members:
            models[k][name].copy_(mean)


def fedbcd_local(
    point: Tensors, x: Tensors, gradient: Tensors, anchor: Tensors, *, lr: float, gamma: float,
    extrapolation: float, box: tuple[float, float],
) -> None:  # fmt: skip
    """Take FedBCD's projected step from the extrapolated point, equations (4a) and (4b)."""
    for name in x:
        step = gradient[name] + gamma * (point[name] - anchor[name])
        new = torch.clamp(point[name] - lr * step, *box)
        point[name].copy_(new + extrapolation * (new - x[name]))
        x[name].copy_(new)


_SHIFTS = 32


def pack_by_shifts(mask: Tensor) -> Tensor:
    """Pack a mask by adding up thirty-two shifted copies."""
    shifts = torch.arange(_SHIFTS, device=mask.device, dtype=torch.int32)
    return (mask.view(-1, _SHIFTS).to(torch.int32) << shifts).sum(-1, dtype=torch.int32)


def unpack_by_shifts(words: Tensor) -> Tensor:
    """Unpack a mask by thirty-two shifts."""
    shifts = torch.arange(_SHIFTS, device=words.device, dtype=torch.int32)
    return (((words[:, None] >> shifts) & 1) > 0).view(-1)


def count_by_shifts(words: Tensor) -> Tensor:
    """Count the ones of a mask after unpacking it."""
    return unpack_by_shifts(words).sum()
