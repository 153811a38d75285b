"""A client's local steps on flat rows: FedBCD's projected step, and SGD with DisPFL's mask."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightfed_kernels.bench import official, rivals
from lightfed_kernels.bench.case import COMPILED, OFFICIAL, OURS, Case, Contender, Run
from lightfed_kernels.bench.cases.common import (
    RIVAL_TOLERANCE,
    TOLERANCE,
    Source,
    as_float,
    values,
)
from lightfed_kernels.bench.models import Model
from lightfed_kernels.layout import Layout
from lightfed_kernels.masks import unpack_mask
from lightfed_kernels.reference import rows as reference
from lightfed_kernels.steps import aspg_step_, sgd_step_

OPERATIONS = ("aspg_step", "sgd_step")

LR = 0.1
GAMMA, EXTRAPOLATION, BOX = 0.5, 0.3, (-2.0, 2.0)
MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4


@dataclass(frozen=True)
class Inputs:
    """Rows (ASPG: point, x, gradient, anchor; SGD: weights, gradient, buffer, -) and a mask."""

    layout: Layout
    rows: Tensor
    words: Tensor


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """One client, whatever `clients` is."""
    layout = model.layout
    row_bytes = layout.size * dtype.itemsize

    def build(seed: int) -> Inputs:
        source = Source(layout, seed, dtype, device)
        return Inputs(layout, source.rows(4), source.words(1)[0])

    aspg = Case(
        operation="aspg_step",
        model=model.name,
        shape="1 client",
        clients=1,
        dtype=dtype,
        build=build,
        reference=_aspg_reference,
        contenders={
            OURS: Contender(partial(_aspg, step=aspg_step_)),
            OFFICIAL: Contender(_aspg_official),
            "foreach": Contender(_aspg_foreach),
            "flat": Contender(partial(_aspg, step=rivals.flat_aspg)),
            COMPILED: Contender(_aspg_compiled),
        },
        floor_bytes=6 * row_bytes,
        input_bytes=20 * row_bytes,
        tolerance=TOLERANCE[dtype],
        rival_tolerance=RIVAL_TOLERANCE[dtype],
    )
    # On a CPU its bfloat16 step is wrong (pytorch/pytorch#191763, in torch 2.11 and 2.12).
    right = device.type == "cuda" or dtype != torch.bfloat16
    fused = {"fused": Contender(_sgd_fused)} if right else {}
    sgd = replace(
        aspg,
        operation="sgd_step",
        reference=_sgd_reference,
        contenders={
            OURS: Contender(_sgd),
            OFFICIAL: Contender(_sgd_official),
            "foreach": Contender(_sgd_foreach),
            "flat": Contender(_sgd_flat),
            COMPILED: Contender(partial(_sgd_flat, compiled=True)),
        }
        | fused,
        floor_bytes=5 * row_bytes + layout.size // 8,
    )
    return [aspg, sgd]


def _aspg(given: Inputs, *, step: Callable[..., Any]) -> Run:
    point, x, gradient, anchor = given.rows.clone()

    def run() -> list[Tensor]:
        step(point, x, gradient, anchor, lr=LR, gamma=GAMMA, extrapolation=EXTRAPOLATION, box=BOX)
        return [point, x]

    return run


def _aspg_compiled(given: Inputs) -> Run:
    return _aspg(given, step=rivals.compiled(rivals.flat_aspg))


def _aspg_official(given: Inputs) -> Run:
    point, x, gradient, anchor = (given.layout.views(row) for row in given.rows.clone())

    def run() -> list[dict[str, Tensor]]:
        official.fedbcd_local(
            point, x, gradient, anchor, lr=LR, gamma=GAMMA, extrapolation=EXTRAPOLATION, box=BOX
        )
        return [point, x]

    return run


def _aspg_foreach(given: Inputs) -> Run:
    rows = given.rows.clone()
    point, x, gradient, anchor = (values(given.layout.views(row)) for row in rows)

    def run() -> Tensor:
        rivals.foreach_aspg(
            point, x, gradient, anchor, lr=LR, gamma=GAMMA, extrapolation=EXTRAPOLATION, box=BOX
        )
        return rows[:2]

    return run


def _aspg_reference(given: Inputs) -> Tensor:
    point, x, gradient, anchor = given.rows.cpu()
    new = reference.aspg_step(
        point, x, gradient, anchor, lr=LR, gamma=GAMMA, extrapolation=EXTRAPOLATION, box=BOX
    )
    return torch.cat(new)


def _sgd(given: Inputs) -> Run:
    row, gradient, buffer, _ = given.rows.clone()

    def run() -> list[Tensor]:
        sgd_step_(
            row,
            gradient,
            buffer=buffer,
            words=given.words,
            lr=LR,
            momentum=MOMENTUM,
            weight_decay=WEIGHT_DECAY,
        )
        return [row, buffer]

    return run


def _sgd_official(given: Inputs) -> Run:
    views = given.layout.views
    row, gradient, buffer, _ = (views(row) for row in given.rows.clone())
    mask = views(as_float(given.words, given.rows.dtype))

    def run() -> list[dict[str, Tensor]]:
        official.sgd(
            row, gradient, buffer, mask, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        )
        return [row, buffer]

    return run


def _sgd_foreach(given: Inputs) -> Run:
    rows = given.rows.clone()
    row, gradient, buffer = (values(given.layout.views(row)) for row in rows[:3])
    mask = values(given.layout.views(as_float(given.words, rows.dtype)))

    def run() -> list[Tensor]:
        rivals.foreach_sgd(
            row, gradient, buffer, mask, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        )
        return [rows[0], rows[2]]

    return run


def _sgd_flat(given: Inputs, *, compiled: bool = False) -> Run:
    function = rivals.compiled(rivals.flat_sgd) if compiled else rivals.flat_sgd
    row, gradient, buffer, _ = given.rows.clone()
    mask = as_float(given.words, row.dtype)

    def run() -> list[Tensor]:
        function(row, gradient, buffer, mask, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        return [row, buffer]

    return run


def _sgd_fused(given: Inputs) -> Run:
    """torch.optim's own fused step on the flat row, then the mask."""
    row, gradient, buffer, _ = given.rows.clone()
    mask = as_float(given.words, row.dtype)
    weights = torch.nn.Parameter(row)
    weights.grad = gradient
    optimiser = torch.optim.SGD(
        [weights], lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True
    )
    optimiser.state[weights]["momentum_buffer"] = buffer

    def run() -> list[Tensor]:
        optimiser.step()
        weights.data.mul_(mask)
        return [weights.data, optimiser.state[weights]["momentum_buffer"]]

    return run


def _sgd_reference(given: Inputs) -> Tensor:
    row, gradient, buffer, _ = given.rows.cpu()
    mask = unpack_mask(given.words.cpu())
    new, moved = reference.sgd_step(
        row, gradient, lr=LR, momentum=MOMENTUM, buffer=buffer, weight_decay=WEIGHT_DECAY, mask=mask
    )
    assert moved is not None
    return torch.cat([new, moved])
