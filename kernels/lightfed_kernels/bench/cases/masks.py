"""Packed masks and compressed rows: what a mask and a masked row cost on the wire."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lightfed_kernels.bench import official, rivals
from lightfed_kernels.bench.case import COMPILED, OFFICIAL, OURS, Case, Contender, Result, Run
from lightfed_kernels.bench.cases.common import Source, as_float, tensors
from lightfed_kernels.bench.models import Model
from lightfed_kernels.layout import Layout
from lightfed_kernels.masks import (
    apply_mask_,
    compress,
    expand,
    pack_mask,
    popcount,
    unpack_mask,
)
from lightfed_kernels.reference import masks as reference

WORD_OPERATIONS = ("pack_mask", "unpack_mask", "popcount")
ROW_OPERATIONS = ("compress", "expand", "apply_mask")


@dataclass(frozen=True)
class Inputs:
    """A row, its mask in three forms, and the values that the mask covers."""

    layout: Layout
    row: Tensor
    words: Tensor
    mask: Tensor
    values: Tensor


def word_cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Masks alone, of one client, whatever `clients` and `dtype` are."""
    size = model.layout.size
    alone, words = _case(model, device, torch.bool), size // 8
    return [
        replace(
            alone, operation="pack_mask", reference=lambda given: given.mask.cpu(),
            contenders=_pack(), floor_bytes=size + words,
        ),
        replace(
            alone, operation="unpack_mask", reference=_unpacked,
            contenders=_unpack(), floor_bytes=size + words,
        ),
        replace(
            alone, operation="popcount", reference=_counted,
            contenders=_popcount(), floor_bytes=words,
        ),
    ]  # fmt: skip


def row_cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Masks and a row of one client, whatever `clients` is."""
    row_bytes, words = model.layout.size * dtype.itemsize, model.layout.size // 8
    masked = _case(model, device, dtype)
    half = row_bytes // 2  # a bit is set with probability 1/2
    return [
        replace(
            masked, operation="compress", reference=_compressed,
            contenders=_compress(), floor_bytes=row_bytes + half + words,
        ),
        replace(
            masked, operation="expand", reference=_expanded,
            contenders=_expand(), floor_bytes=row_bytes + half + words,
        ),
        replace(
            masked, operation="apply_mask", reference=_applied,
            contenders=_apply(), floor_bytes=2 * row_bytes + words,
        ),
    ]  # fmt: skip


def _case(model: Model, device: torch.device, dtype: torch.dtype) -> Case:
    """What the cases have in common."""
    layout = model.layout
    rows = torch.float32 if dtype == torch.bool else dtype

    def build(seed: int) -> Inputs:
        source = Source(layout, seed, rows, device)
        row, words = source.row(), source.words(1)[0]
        mask = unpack_mask(words)
        return Inputs(layout, row, words, mask, row[mask])

    return Case(
        operation="",
        model=model.name,
        shape="1 client",
        clients=1,
        dtype=dtype,
        build=build,
        reference=_applied,
        contenders={},
        floor_bytes=0,
        input_bytes=12 * layout.size * rows.itemsize,
        tolerance=0.0,
        rival_tolerance=0.0,
    )


def _unpacked(given: Inputs) -> Tensor:
    return reference.unpack_mask(given.words.cpu())


def _counted(given: Inputs) -> Tensor:
    return reference.popcount(given.words.cpu())


def _compressed(given: Inputs) -> Tensor:
    return reference.compress(given.row.cpu(), given.words.cpu())


def _expanded(given: Inputs) -> Tensor:
    return reference.expand(given.values.cpu(), given.words.cpu())


def _applied(given: Inputs) -> Tensor:
    return reference.apply_mask(given.row.cpu(), given.words.cpu())


def _contender(function: Callable[[Inputs], Result]) -> Contender:
    """A call that overwrites nothing."""
    return Contender(lambda given: partial(function, given))


def _both(
    function: Callable[[Tensor], Tensor], argument: Callable[[Inputs], Tensor]
) -> dict[str, Contender]:
    """The official expression, and what torch.compile makes of it."""

    def bind(given: Inputs) -> Run:
        compiled = rivals.compiled(function)
        return lambda: compiled(argument(given))

    return {
        OFFICIAL: _contender(lambda x: function(argument(x))),
        COMPILED: Contender(bind),
    }


def _pack() -> dict[str, Contender]:
    return {
        OURS: _contender(lambda x: pack_mask(x.mask)),
        **_both(official.pack_by_shifts, lambda x: x.mask),
    }


def _unpack() -> dict[str, Contender]:
    return {
        OURS: _contender(lambda x: unpack_mask(x.words)),
        **_both(official.unpack_by_shifts, lambda x: x.words),
    }


def _popcount() -> dict[str, Contender]:
    return {
        OURS: _contender(lambda x: popcount(x.words)),
        **_both(official.count_by_shifts, lambda x: x.words),
    }


def _compress() -> dict[str, Contender]:
    def ours(given: Inputs) -> Run:
        nnz = given.values.numel()
        return lambda: compress(given.row, given.words, nnz=nnz)

    return {
        OURS: Contender(ours),
        OFFICIAL: _contender(lambda x: x.row[x.mask]),
        "flat": _contender(lambda x: torch.masked_select(x.row, x.mask)),
    }


def _expand() -> dict[str, Contender]:
    def index(given: Inputs) -> Tensor:
        out = torch.zeros_like(given.row)
        out[given.mask] = given.values
        return out

    def scatter(given: Inputs) -> Tensor:
        return torch.zeros_like(given.row).masked_scatter_(given.mask, given.values)

    return {
        OURS: _contender(lambda x: expand(x.values, x.words)),
        OFFICIAL: _contender(index),
        "flat": _contender(scatter),
    }


def _apply() -> dict[str, Contender]:
    def ours(given: Inputs) -> Run:
        row = given.row.clone()
        return lambda: apply_mask_(row, given.words)

    def per_tensor(given: Inputs) -> Run:
        row = given.row.clone()
        floats = as_float(given.words, row.dtype)
        model, masks = tensors(given.layout, row[None])[0], tensors(given.layout, floats[None])[0]

        def run() -> Tensor:
            for name, mask in masks.items():
                model[name].mul_(mask)
            return row

        return run

    def foreach(given: Inputs) -> Run:
        row, floats = given.row.clone(), as_float(given.words, given.row.dtype)
        views, masks = (list(given.layout.views(x).values()) for x in (row, floats))

        def run() -> Tensor:
            torch._foreach_mul_(views, masks)
            return row

        return run

    def flat(given: Inputs) -> Run:
        row, floats = given.row.clone(), as_float(given.words, given.row.dtype)
        return lambda: row.mul_(floats)

    return {
        OURS: Contender(ours),
        OFFICIAL: Contender(per_tensor),
        "foreach": Contender(foreach),
        "flat": Contender(flat),
    }
