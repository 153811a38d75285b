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

# The numbers of the step.
ASPG: dict[str, Any] = {"lr": 0.1, "gamma": 0.5, "extrapolation": 0.3, "box": (-2.0, 2.0)}


@dataclass(frozen=True)
class Inputs:
    """The rows of a step.

    Attributes:
        layout: Their layout.
        rows: (4, P): point, x, gradient and anchor.
    """

    layout: Layout
    rows: Tensor


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Return the case of one client, whatever `clients` is."""
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
        reference=_reference,
        codes={
            OURS: partial(_aspg, step=aspg_step_, form=whole),
            OFFICIAL: partial(_aspg, step=official.fedbcd_local, form=named),
            "foreach": partial(_aspg, step=rivals.foreach_aspg, form=listed),
            "flat": partial(_aspg, step=rivals.flat_aspg, form=whole),
            COMPILED: _compiled,
        },
        floor_bytes=6 * row_bytes,  # four rows are read, and two are written
        input_bytes=20 * row_bytes,
    )
    return [aspg]


def _aspg(inputs: Inputs, *, step: Callable[..., Any], form: Callable[..., list[Any]]) -> Run:
    """Return a call of a step.

    Args:
        inputs: The rows.
        step: The code.
        form: Brings the rows into the form that the code takes.
    """
    rows = form(inputs.layout, inputs.rows)

    def run() -> Tensor:
        step(*rows, **ASPG)
        return inputs.rows[:2]

    return run


def _compiled(inputs: Inputs) -> Run:
    return _aspg(inputs, step=rivals.compiled(rivals.flat_aspg), form=whole)


def _reference(inputs: Inputs) -> Tensor:
    return torch.cat(reference.aspg_step(*inputs.rows.cpu(), **ASPG))
