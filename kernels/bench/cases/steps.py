"""A client's local step on flat rows: FedBCD's projected step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightfed_kernels.layout import Layout
from lightfed_kernels.reference import rows as reference
from lightfed_kernels.steps import aspg_step_
from torch import Tensor

from bench import official, rivals
from bench.case import COMPILED, OFFICIAL, OURS, Case, Run
from bench.cases.common import Source, listed, named, whole
from bench.models import Model

OPERATIONS = ("aspg_step",)

ASPG: dict[str, Any] = {"lr": 0.1, "gamma": 0.5, "extrapolation": 0.3, "box": (-2.0, 2.0)}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
ADAM: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 5e-4}


@dataclass(frozen=True)
class Inputs:
    """Rows: point, x, gradient, anchor."""

    layout: Layout
    rows: Tensor


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """One client, whatever `clients` is."""
    layout = model.layout
    row_bytes = layout.size * dtype.itemsize

    def build(seed: int) -> Inputs:
        source = Source(layout, seed, dtype, device)
        return Inputs(layout, source.rows(4))

    aspg = Case(
        operation="aspg_step",
        model=model.name,
        shape="1 client",
        dtype=dtype,
        build=build,
        reference=lambda x: torch.cat(reference.aspg_step(*x.rows.cpu(), **ASPG)),
        codes={
            OURS: partial(_aspg, step=aspg_step_, form=whole),
            OFFICIAL: partial(_aspg, step=official.fedbcd_local, form=named),
            "foreach": partial(_aspg, step=rivals.foreach_aspg, form=listed),
            "flat": partial(_aspg, step=rivals.flat_aspg, form=whole),
            COMPILED: lambda x: _aspg(x, step=rivals.compiled(rivals.flat_aspg), form=whole),
        },
        floor_bytes=6 * row_bytes,
        input_bytes=20 * row_bytes,
    )
    return [aspg]


def _aspg(given: Inputs, *, step: Callable[..., Any], form: Callable[..., list[Any]]) -> Run:
    rows = form(given.layout, given.rows)

    def run() -> Tensor:
        step(*rows, **ASPG)
        return given.rows[:2]

    return run
