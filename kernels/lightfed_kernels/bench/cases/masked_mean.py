"""masked_mean: DisPFL's aggregation, for one receiver, for a rank's share of them, for all."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightfed_kernels.bench import official, rivals
from lightfed_kernels.bench.case import COMPILED, OFFICIAL, OURS, Case, Contender, Run
from lightfed_kernels.bench.cases.common import (
    RIVAL_TOLERANCE,
    TOLERANCE,
    Source,
    as_float,
    nan_like,
    tensors,
    values,
)
from lightfed_kernels.bench.models import Model
from lightfed_kernels.layout import Layout
from lightfed_kernels.masked_mean import masked_mean, masked_mean_expression
from lightfed_kernels.masks import unpack_mask
from lightfed_kernels.neighbours import Neighbours
from lightfed_kernels.reference import masked_mean as reference

# A receiver averages itself and ten others (DisPFL, section 4.1).
DEGREE = 10

# Receivers whose result is held against the reference, which is slow.
CHECKED = 4


@dataclass(frozen=True)
class Inputs:
    """Senders' rows (zero where their masks are) and masks, receivers' masks, who hears whom."""

    layout: Layout
    rows: Tensor
    words: Tensor
    receivers: Tensor
    lists: list[list[int]]


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    senders = max(clients, DEGREE + 1)
    shapes = [(clients, senders)]
    if clients == 100:
        shapes.insert(0, (13, senders))  # what one of eight ranks has to do
    return [_case(model, clients, r, s, dtype, device) for r, s in shapes]


def _case(
    model: Model, clients: int, receivers: int, senders: int, dtype: torch.dtype,
    device: torch.device,
) -> Case:  # fmt: skip
    layout = model.layout
    lists = draw(receivers, senders)
    row_bytes, mask_bytes = layout.size * dtype.itemsize, layout.size // 8
    heard = len({sender for own in lists for sender in own})
    own_bytes = receivers * (row_bytes + mask_bytes)
    many = "s" if receivers > 1 else ""

    def build(seed: int) -> Inputs:
        source = Source(layout, seed, dtype, device)
        rows, words = source.rows(senders), source.words(senders)
        for row, mask in zip(rows, words, strict=True):
            row.mul_(unpack_mask(mask))
        return Inputs(layout, rows, words, source.words(receivers), lists)

    contenders = {
        OURS: Contender(_ours),
        OFFICIAL: Contender(_official),
        "foreach": Contender(_foreach),
        "flat": Contender(_flat),
    }
    if receivers == 1:
        contenders[COMPILED] = Contender(_compiled)
    return Case(
        operation="masked_mean",
        model=model.name,
        shape=f"{receivers} receiver{many} of {senders}",
        clients=clients,
        dtype=dtype,
        build=build,
        reference=_reference,
        contenders=contenders,
        floor_bytes=heard * (row_bytes + mask_bytes) + own_bytes,
        read_bytes=sum(map(len, lists)) * (row_bytes + mask_bytes) + own_bytes,
        input_bytes=(2 * senders + 5 * receivers) * row_bytes,
        tolerance=TOLERANCE[dtype],
        rival_tolerance=RIVAL_TOLERANCE[dtype],
    )


def draw(receivers: int, senders: int) -> list[list[int]]:
    """Every receiver hears itself and DEGREE others."""
    generator = torch.Generator().manual_seed(0)
    lists = []
    for receiver in range(receivers):
        others = [k for k in torch.randperm(senders, generator=generator).tolist() if k != receiver]
        lists.append(sorted([receiver, *others[:DEGREE]]))
    return lists


def _ours(given: Inputs) -> Run:
    neighbours = Neighbours.build(given.lists, senders=len(given.rows))
    out = nan_like(given.rows[: len(given.lists)])
    return partial(
        masked_mean, given.rows, neighbours, masks=given.words, receivers=given.receivers, out=out
    )


def _official(given: Inputs) -> Run:
    models = tensors(given.layout, given.rows)
    masks = tensors(given.layout, as_float(given.words, given.rows.dtype))
    own = tensors(given.layout, as_float(given.receivers, given.rows.dtype))
    return lambda: [
        official.dispfl_aggregate(
            [models[k] for k in heard], [masks[k] for k in heard], heard.index(receiver), keep
        )[0]
        for receiver, (heard, keep) in enumerate(zip(given.lists, own, strict=True))
    ]


def _foreach(given: Inputs) -> Run:
    models = [values(m) for m in tensors(given.layout, given.rows)]
    floats = as_float(given.words, given.rows.dtype)
    masks = [values(m) for m in tensors(given.layout, floats)]
    own = as_float(given.receivers, given.rows.dtype)
    names = [entry.name for entry in given.layout]
    mine = [values(m) for m in tensors(given.layout, own)]

    def run() -> list[dict[str, Tensor]]:
        out = []
        for heard, keep in zip(given.lists, mine, strict=True):
            mean = rivals.foreach_masked_mean(
                [models[k] for k in heard], [masks[k] for k in heard], keep
            )
            out.append(dict(zip(names, mean, strict=True)))
        return out

    return run


def _flat(given: Inputs) -> Run:
    masks = as_float(given.words, given.rows.dtype)
    own = as_float(given.receivers, given.rows.dtype)
    return lambda: [
        rivals.flat_masked_mean([given.rows[k] for k in heard], [masks[k] for k in heard], mine)
        for heard, mine in zip(given.lists, own, strict=True)
    ]


def _compiled(given: Inputs) -> Run:
    function = rivals.compiled(masked_mean_expression)
    heard = given.lists[0]
    rows, words = [given.rows[k] for k in heard], [given.words[k] for k in heard]
    return lambda: function(rows, words, given.receivers[0])


def _reference(given: Inputs) -> Tensor:
    return reference.masked_mean(
        list(given.rows.cpu()),
        given.lists[:CHECKED],
        masks=list(unpack_mask(given.words.cpu())),
        receivers=list(unpack_mask(given.receivers.cpu()[:CHECKED])),
    )
