"""A client's local steps on flat rows: FedBCD's projected step, SGD with DisPFL's mask, Adam."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightfed_kernels.bench import official, rivals
from lightfed_kernels.bench.case import COMPILED, OFFICIAL, OURS, Bind, Case, Run
from lightfed_kernels.bench.cases.common import Source, as_float, listed, named, whole
from lightfed_kernels.bench.models import Model
from lightfed_kernels.layout import Layout
from lightfed_kernels.masks import unpack_mask
from lightfed_kernels.reference import rows as reference
from lightfed_kernels.steps import adam_numbers, adam_step_, aspg_step_, sgd_step_

OPERATIONS = ("aspg_step", "sgd_step", "adam_step")

ASPG: dict[str, Any] = {"lr": 0.1, "gamma": 0.5, "extrapolation": 0.3, "box": (-2.0, 2.0)}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
ADAM: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 5e-4}


@dataclass(frozen=True)
class Inputs:
    """Rows and a mask.

    ASPG: point, x, gradient, anchor. SGD: weights, buffer, gradient, -. Adam: weights, moments
    (the second is squared), gradient.
    """

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
    codes: dict[str, Bind] = {
        OURS: _sgd_ours,
        OFFICIAL: partial(_sgd, step=official.sgd, form=named),
        "foreach": partial(_sgd, step=rivals.foreach_sgd, form=listed),
        "flat": partial(_sgd, step=rivals.flat_sgd, form=whole),
        COMPILED: lambda x: _sgd(x, step=rivals.compiled(rivals.flat_sgd), form=whole),
    }
    # On a CPU its bfloat16 step is wrong (pytorch/pytorch#191763, in torch 2.11 and 2.12).
    if device.type == "cuda" or dtype != torch.bfloat16:
        codes["fused"] = _sgd_fused
    sgd = replace(
        aspg,
        operation="sgd_step",
        reference=_sgd_reference,
        codes=codes,
        floor_bytes=5 * row_bytes + layout.size // 8,
    )
    adam = replace(
        aspg,
        operation="adam_step",
        reference=_adam_reference,
        codes={
            OURS: _adam_ours,
            OFFICIAL: partial(_adam, form=listed, foreach=False),
            "foreach": partial(_adam, form=listed, foreach=True),
            "flat": partial(_adam, form=whole, foreach=False),
            **({"fused": partial(_adam, form=whole, fused=True)} if "fused" in codes else {}),
        },
        floor_bytes=7 * row_bytes,
    )
    return [aspg, sgd, adam]


def _aspg(given: Inputs, *, step: Callable[..., Any], form: Callable[..., list[Any]]) -> Run:
    rows = form(given.layout, given.rows)

    def run() -> Tensor:
        step(*rows, **ASPG)
        return given.rows[:2]

    return run


def _sgd_ours(given: Inputs) -> Run:
    row, buffer, gradient, _ = given.rows

    def run() -> Tensor:
        sgd_step_(row, gradient, buffer=buffer, words=given.words, **SGD)
        return given.rows[:2]

    return run


def _sgd(given: Inputs, *, step: Callable[..., Any], form: Callable[..., list[Any]]) -> Run:
    floats = as_float(given.words, given.rows.dtype)
    row, buffer, gradient, mask = form(given.layout, [*given.rows[:3], floats])

    def run() -> Tensor:
        step(row, gradient, buffer, mask, **SGD)
        return given.rows[:2]

    return run


def _sgd_fused(given: Inputs) -> Run:
    """torch.optim's own fused step on the flat row, then the mask."""
    row, buffer, gradient, _ = given.rows
    mask = as_float(given.words, row.dtype)
    weights = torch.nn.Parameter(row)
    weights.grad = gradient
    optimiser = torch.optim.SGD([weights], fused=True, **SGD)
    optimiser.state[weights]["momentum_buffer"] = buffer

    def run() -> list[Tensor]:
        optimiser.step()
        weights.data.mul_(mask)
        return [weights.data, optimiser.state[weights]["momentum_buffer"]]

    return run


def _sgd_reference(given: Inputs) -> Tensor:
    row, buffer, gradient, _ = given.rows.cpu()
    mask = unpack_mask(given.words.cpu())
    new, moved = reference.sgd_step(row, gradient, buffer=buffer, mask=mask, **SGD)
    assert moved is not None
    return torch.cat([new, moved])


def _adam_ours(given: Inputs) -> Run:
    row, average, square, gradient = given.rows
    [numbers] = adam_numbers(1, lr=0.1, betas=ADAM["betas"]).to(row.device)
    square.square_()

    def run() -> Tensor:
        adam_step_(row, gradient, average, square, numbers, **ADAM)
        return row

    return run


def _adam(given: Inputs, *, form: Callable[..., list[Any]], **how: Any) -> Run:
    """torch.optim's; a later call is a later step."""
    given.rows[2].square_()
    row, *moments, gradient = ([x] if form is whole else x for x in form(given.layout, given.rows))
    weights = [torch.nn.Parameter(part) for part in row]
    optimiser = torch.optim.Adam(weights, lr=0.1, **how, **ADAM)
    for weight, grad, *of in zip(weights, gradient, *moments, strict=True):
        weight.grad = grad
        step = torch.zeros((), device=grad.device if how.get("fused") else None)
        optimiser.state[weight] = {"step": step, "exp_avg": of[0], "exp_avg_sq": of[1]}

    def run() -> list[Tensor]:
        optimiser.step()
        return [weight.data for weight in weights]

    return run


def _adam_reference(given: Inputs) -> Tensor:
    row, average, square, gradient = given.rows.cpu()
    [numbers] = adam_numbers(1, lr=0.1, betas=ADAM["betas"]).tolist()
    return reference.adam_step(row, gradient, average, square.square(), numbers, **ADAM)[0]
