"""prune_regrow: DisPFL's change of a client's mask, by gradient or at random."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch
from lightfed_kernels.layout import Layout
from lightfed_kernels.masks import unpack_mask
from lightfed_kernels.reference import select as reference
from lightfed_kernels.segments import Segments
from lightfed_kernels.select import prune_counts, prune_regrow
from torch import Tensor

from bench import official, rivals
from bench.case import OFFICIAL, OURS, Case, Run
from bench.cases.common import Source, as_float, listed
from bench.models import Model

OPERATIONS = ("prune_regrow",)

# The share of the active weights that is replaced in the first rounds.
RATE = 0.5

SEED = 1

# Thresholds and library sorts take ties as they come.
TIES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float64: 1e-6}


@dataclass(frozen=True)
class Inputs:
    """What a change of a client's mask takes.

    Attributes:
        layout: The layout of the rows.
        segments: Its tables.
        weights: (P,).
        scores: (P,) by which elements grow.
        words: (P / 32,) the packed mask.
        counts: How many elements of each tensor to replace.
    """

    layout: Layout
    segments: Segments
    weights: Tensor
    scores: Tensor
    words: Tensor
    counts: list[int]

    def floats(self) -> Tensor:
        """Return the mask in the dtype of the weights."""
        return as_float(self.words, self.weights.dtype)


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Return the cases of one client, whatever `clients` is."""
    layout = model.layout
    segments = Segments.build(layout, device=device)
    row_bytes = layout.size * dtype.itemsize
    mask_bytes = layout.size // 8

    def build(seed: int) -> Inputs:
        source = Source(layout, seed, dtype, device)
        weights, scores = source.rows(2)
        words = source.words(1)[0]
        masks = layout.views(unpack_mask(words))
        counts = prune_counts([int(mask.sum()) for mask in masks.values()], RATE)
        return Inputs(layout, segments, weights, scores, words, counts)

    by_gradient = Case(
        operation="prune_regrow",
        model=model.name,
        shape="1 client",
        dtype=dtype,
        build=build,
        reference=partial(_reference, random=False),
        codes={
            OURS: partial(_ours, random=False),
            OFFICIAL: partial(_official, random=False),
            "topk": partial(_rival, function=rivals.topk_prune_regrow),
            "kthvalue": partial(_rival, function=rivals.kthvalue_prune_regrow),
        },
        floor_bytes=2 * row_bytes + 2 * mask_bytes,
        input_bytes=8 * row_bytes,
        exact=True,
        rival_tolerance=TIES[dtype],
    )
    at_random = replace(
        by_gradient,
        shape="1 client, random",
        reference=partial(_reference, random=True),
        codes={OURS: partial(_ours, random=True), OFFICIAL: partial(_official, random=True)},
        floor_bytes=row_bytes + 2 * mask_bytes,
        # Each code draws another random mask.
        rival_tolerance=inf,
    )
    return [by_gradient, at_random]


def _ours(inputs: Inputs, *, random: bool) -> Run:
    regrow = SEED if random else inputs.scores
    return lambda: prune_regrow(
        inputs.weights, inputs.words, inputs.counts, inputs.segments, regrow=regrow
    )


def _official(inputs: Inputs, *, random: bool) -> Run:
    weights = inputs.layout.views(inputs.weights)
    scores = inputs.layout.views(inputs.scores)
    masks = inputs.layout.views(inputs.floats())
    counts = dict(zip(masks, inputs.counts, strict=True))

    def run() -> dict[str, Tensor]:
        pruned = official.dispfl_prune(weights, masks, counts)
        if random:
            return official.dispfl_random(pruned, counts)
        return official.dispfl_regrow(pruned, scores, counts)

    return run


def _rival(inputs: Inputs, *, function: Callable[..., list[Tensor]]) -> Run:
    """Return a call of a code that takes lists of flat tensors."""
    arguments = []
    for tensors in listed(inputs.layout, (inputs.weights, inputs.floats(), inputs.scores)):
        arguments.append([tensor.reshape(-1) for tensor in tensors])
    return lambda: function(*arguments, inputs.counts)


def _reference(inputs: Inputs, *, random: bool) -> Tensor:
    regrow = SEED if random else inputs.scores.cpu()
    mask = unpack_mask(inputs.words.cpu())
    return reference.prune_regrow(
        inputs.weights.cpu(), mask, inputs.counts, inputs.layout, regrow=regrow
    )
