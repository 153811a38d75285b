"""masked_mean: DisPFL's aggregation, for one receiver, for a rank's share of them, for all."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from lightfed_kernels.layout import Layout
from lightfed_kernels.masked_mean import masked_mean, masked_mean_expression
from lightfed_kernels.masks import unpack_mask
from lightfed_kernels.neighbours import Neighbours
from lightfed_kernels.reference import masked_mean as reference
from torch import Tensor

from bench import official, rivals
from bench.case import COMPILED, OFFICIAL, OURS, Bind, Case, Run
from bench.cases.common import Source, as_float, listed, named, plural, whole
from bench.models import Model

OPERATIONS = ("masked_mean",)

# A receiver averages itself and ten others (DisPFL, section 4.1).
DEGREE = 10

# Number of receivers that are compared with the reference, which is slow.
CHECKED = 4


@dataclass(frozen=True)
class Inputs:
    """Senders' rows (zero where their masks are) and masks, receivers' masks, who sends to whom."""

    layout: Layout
    rows: Tensor
    words: Tensor
    receivers: Tensor
    lists: list[list[int]]


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    # 13 receivers of 100 are what one of eight ranks has to do.
    counts = (13, 100) if clients == 100 else (clients,)
    return [
        _case(model, receivers, max(clients, DEGREE + 1), dtype, device) for receivers in counts
    ]


def _case(
    model: Model, receivers: int, senders: int, dtype: torch.dtype, device: torch.device
) -> Case:
    layout = model.layout
    lists = draw(receivers, senders)
    row_bytes, mask_bytes = layout.size * dtype.itemsize, layout.size // 8
    heard = len({sender for own in lists for sender in own})
    own_bytes = receivers * (row_bytes + mask_bytes)

    def build(seed: int) -> Inputs:
        source = Source(layout, seed, dtype, device)
        rows, words = source.rows(senders), source.words(senders)
        for row, mask in zip(rows, words, strict=True):
            row.mul_(unpack_mask(mask))
        return Inputs(layout, rows, words, source.words(receivers), lists)

    codes: dict[str, Bind] = {
        OURS: _ours,
        OFFICIAL: partial(_each, mean=lambda *x: official.dispfl_aggregate(*x)[0], form=named),
        "foreach": partial(_each, mean=rivals.foreach_masked_mean, form=listed),
        "flat": partial(_each, mean=rivals.flat_masked_mean, form=whole),
    }
    if receivers == 1:
        codes[COMPILED] = _compiled
    elif device.type == "cuda":
        codes["apart"] = _apart
    return Case(
        operation="masked_mean",
        model=model.name,
        shape=f"{plural(receivers, 'receiver')} of {senders}",
        dtype=dtype,
        build=build,
        reference=_reference,
        codes=codes,
        floor_bytes=heard * (row_bytes + mask_bytes) + own_bytes,
        read_bytes=sum(map(len, lists)) * (row_bytes + mask_bytes) + own_bytes,
        input_bytes=(2 * senders + 5 * receivers) * row_bytes,
    )


def draw(receivers: int, senders: int) -> list[list[int]]:
    """Every receiver averages itself and DEGREE others."""
    generator = torch.Generator().manual_seed(0)
    lists = []
    for receiver in range(receivers):
        others = [k for k in torch.randperm(senders, generator=generator).tolist() if k != receiver]
        lists.append(sorted([receiver, *others[:DEGREE]]))
    return lists


def _ours(given: Inputs) -> Run:
    neighbours = Neighbours.build(given.lists, senders=len(given.rows))
    out = torch.full_like(given.rows[: len(given.lists)], torch.nan)
    return lambda: masked_mean(
        given.rows, neighbours, masks=given.words, receivers=given.receivers, out=out
    )


def _apart(given: Inputs) -> Run:
    """Ours without tiles that receivers share."""
    run: Run = patch("lightfed_kernels.gpu.masked_mean.shared", lambda *sizes: False)(_ours(given))
    return run


def _each(given: Inputs, *, mean: Callable[..., Any], form: Callable[..., list[Any]]) -> Run:
    """One receiver after the other, with masks in the dtype of the rows."""
    floats = (as_float(words, given.rows.dtype) for words in (given.words, given.receivers))
    models, masks, keep = (form(given.layout, rows) for rows in (given.rows, *floats))
    return lambda: [
        mean([models[k] for k in heard], [masks[k] for k in heard], heard.index(own), keep[own])
        for own, heard in enumerate(given.lists)
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
