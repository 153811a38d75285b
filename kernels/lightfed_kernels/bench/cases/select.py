"""prune_regrow: DisPFL's change of a client's mask, by gradient or at random."""

from dataclasses import dataclass
from functools import partial
from math import inf

import torch
from torch import Tensor

from lightfed_kernels.bench import official, rivals
from lightfed_kernels.bench.case import OFFICIAL, OURS, Case, Contender, Run
from lightfed_kernels.bench.cases.common import Source, as_float, values
from lightfed_kernels.bench.models import Model
from lightfed_kernels.layout import Layout
from lightfed_kernels.masks import unpack_mask
from lightfed_kernels.reference import select as reference
from lightfed_kernels.segments import Segments
from lightfed_kernels.select import prune_counts, prune_regrow

# The share of the active weights that is replaced in the first rounds.
RATE = 0.5

SEED = 1

# Thresholds and library sorts take ties as they come.
TIES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float64: 1e-6}


@dataclass(frozen=True)
class Inputs:
    """A client's weights, scores and mask, and how many elements of each tensor to replace."""

    layout: Layout
    segments: Segments
    weights: Tensor
    scores: Tensor
    words: Tensor
    counts: list[int]


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """One client, whatever `clients` is."""
    layout = model.layout
    segments = Segments.build(layout, device=device)
    row_bytes, mask_bytes = layout.size * dtype.itemsize, layout.size // 8

    def build(seed: int) -> Inputs:
        source = Source(layout, seed, dtype, device)
        rows, words = source.rows(2), source.words(1)[0]
        active = layout.views(unpack_mask(words))
        counts = prune_counts([int(mask.sum()) for mask in active.values()], RATE)
        return Inputs(layout, segments, rows[0], rows[1], words, counts)

    def case(shape: str, inputs: int, random: bool) -> Case:
        contenders = {
            OURS: Contender(partial(_ours, random=random)),
            # What is drawn at random is another mask in each code.
            OFFICIAL: Contender(partial(_official, random=random), inf if random else None),
        }
        if not random:
            contenders["topk"] = Contender(partial(_rival, function=rivals.topk_prune_regrow))
            contenders["kthvalue"] = Contender(
                partial(_rival, function=rivals.kthvalue_prune_regrow)
            )
        return Case(
            operation="prune_regrow",
            model=model.name,
            shape=shape,
            clients=1,
            dtype=dtype,
            build=build,
            reference=partial(_reference, random=random),
            contenders=contenders,
            floor_bytes=inputs * row_bytes + 2 * mask_bytes,
            input_bytes=8 * row_bytes,
            tolerance=0.0,
            rival_tolerance=TIES[dtype],
        )

    return [case("1 client", 2, random=False), case("1 client, random", 1, random=True)]


def _ours(given: Inputs, *, random: bool) -> Run:
    regrow = SEED if random else given.scores
    return lambda: prune_regrow(
        given.weights, given.words, given.counts, given.segments, regrow=regrow
    )


def _official(given: Inputs, *, random: bool) -> Run:
    views = given.layout.views
    weights, scores = views(given.weights), views(given.scores)
    masks = views(as_float(given.words, given.weights.dtype))
    counts = dict(zip(masks, given.counts, strict=True))

    def run() -> dict[str, Tensor]:
        pruned = official.dispfl_prune(weights, masks, counts)
        if random:
            return official.dispfl_random(pruned, counts)
        return official.dispfl_regrow(pruned, scores, counts)

    return run


def _rival(given: Inputs, *, function: rivals.PruneRegrow) -> Run:
    views = given.layout.views
    names = [entry.name for entry in given.layout]
    masks = views(as_float(given.words, given.weights.dtype))
    weights, scores, floats = (
        [tensor.reshape(-1) for tensor in values(named)]
        for named in (views(given.weights), views(given.scores), masks)
    )
    return lambda: dict(zip(names, function(weights, floats, scores, given.counts), strict=True))


def _reference(given: Inputs, *, random: bool) -> Tensor:
    regrow = SEED if random else given.scores.cpu()
    mask = unpack_mask(given.words.cpu())
    return reference.prune_regrow(
        given.weights.cpu(), mask, given.counts, given.layout, regrow=regrow
    )
