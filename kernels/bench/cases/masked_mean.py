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

# How many receivers are compared with the reference, which is slow.
CHECKED = 4


@dataclass(frozen=True)
class Inputs:
    """What a masked mean takes.

    Attributes:
        layout: The layout of the rows.
        rows: (senders, P), zero where their masks are.
        words: (senders, P / 32) their packed masks.
        receivers: (receivers, P / 32) the receivers' packed masks.
        lists: The senders of every receiver.
    """

    layout: Layout
    rows: Tensor
    words: Tensor
    receivers: Tensor
    lists: list[list[int]]


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Return the cases of some clients: all of them receive, or a rank's share of them."""
    # 13 receivers of 100 are what one of eight ranks has to do.
    counts = (13, 100) if clients == 100 else (clients,)
    senders = max(clients, DEGREE + 1)
    return [_case(model, receivers, senders, dtype, device) for receivers in counts]


def _case(
    model: Model, receivers: int, senders: int, dtype: torch.dtype, device: torch.device
) -> Case:
    layout = model.layout
    lists = draw(receivers, senders)
    row_bytes = layout.size * dtype.itemsize
    mask_bytes = layout.size // 8
    senders_in_lists = [sender for senders_of_receiver in lists for sender in senders_of_receiver]
    own_bytes = receivers * (row_bytes + mask_bytes)

    def build(seed: int) -> Inputs:
        source = Source(layout, seed, dtype, device)
        rows = source.rows(senders)
        words = source.words(senders)
        for row, mask in zip(rows, words, strict=True):
            row.mul_(unpack_mask(mask))
        return Inputs(layout, rows, words, source.words(receivers), lists)

    codes: dict[str, Bind] = {
        OURS: _ours,
        OFFICIAL: partial(_each, mean=_official_mean, form=named),
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
        floor_bytes=len(set(senders_in_lists)) * (row_bytes + mask_bytes) + own_bytes,
        read_bytes=len(senders_in_lists) * (row_bytes + mask_bytes) + own_bytes,
        input_bytes=(2 * senders + 5 * receivers) * row_bytes,
    )


def draw(receivers: int, senders: int) -> list[list[int]]:
    """Draw the senders of every receiver: itself and DEGREE others."""
    generator = torch.Generator().manual_seed(0)
    lists = []
    for receiver in range(receivers):
        others = [k for k in torch.randperm(senders, generator=generator).tolist() if k != receiver]
        lists.append(sorted([receiver, *others[:DEGREE]]))
    return lists


def _ours(inputs: Inputs) -> Run:
    neighbours = Neighbours.build(inputs.lists, senders=len(inputs.rows))
    out = torch.full_like(inputs.rows[: len(inputs.lists)], torch.nan)
    return lambda: masked_mean(
        inputs.rows, neighbours, masks=inputs.words, receivers=inputs.receivers, out=out
    )


def _apart(inputs: Inputs) -> Run:
    """Return our call without the kernel in which receivers share tiles."""
    without_shared_tiles = patch("lightfed_kernels.gpu.masked_mean.shared", lambda *sizes: False)
    run: Run = without_shared_tiles(_ours(inputs))
    return run


def _official_mean(*arguments: Any) -> official.Tensors:
    mean, _ = official.dispfl_aggregate(*arguments)
    return mean


def _each(inputs: Inputs, *, mean: Callable[..., Any], form: Callable[..., list[Any]]) -> Run:
    """Return a call that makes the mean of one receiver after the other.

    Args:
        inputs: What is averaged.
        mean: The code; it takes masks in the dtype of the rows.
        form: Brings rows into the form that the code takes.
    """
    dtype = inputs.rows.dtype
    models = form(inputs.layout, inputs.rows)
    masks = form(inputs.layout, as_float(inputs.words, dtype))
    receiver_masks = form(inputs.layout, as_float(inputs.receivers, dtype))

    def run() -> list[Any]:
        means = []
        for receiver, senders in enumerate(inputs.lists):
            models_of_senders = [models[sender] for sender in senders]
            masks_of_senders = [masks[sender] for sender in senders]
            own = senders.index(receiver)
            means.append(mean(models_of_senders, masks_of_senders, own, receiver_masks[receiver]))
        return means

    return run


def _compiled(inputs: Inputs) -> Run:
    function = rivals.compiled(masked_mean_expression)
    senders = inputs.lists[0]
    rows = [inputs.rows[sender] for sender in senders]
    words = [inputs.words[sender] for sender in senders]
    return lambda: function(rows, words, inputs.receivers[0])


def _reference(inputs: Inputs) -> Tensor:
    return reference.masked_mean(
        list(inputs.rows.cpu()),
        inputs.lists[:CHECKED],
        masks=list(unpack_mask(inputs.words.cpu())),
        receivers=list(unpack_mask(inputs.receivers.cpu()[:CHECKED])),
    )
