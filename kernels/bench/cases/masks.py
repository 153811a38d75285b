"""Packed masks and compressed rows: what a mask and a masked row cost on the wire."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from lightfed_kernels.layout import Layout
from lightfed_kernels.masks import apply_mask_, compress, expand, pack_mask, popcount, unpack_mask
from lightfed_kernels.reference import masks as reference
from torch import Tensor

from bench import official, rivals
from bench.case import COMPILED, OFFICIAL, OURS, Bind, Case, Result, Run
from bench.cases.common import Source, as_float
from bench.models import Model

OPERATIONS = ("pack_mask", "unpack_mask", "popcount", "compress", "expand", "apply_mask")


@dataclass(frozen=True)
class Inputs:
    """A row, its mask in three forms, and the values that the mask covers."""

    layout: Layout
    row: Tensor
    words: Tensor
    mask: Tensor
    floats: Tensor
    values: Tensor


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """One client: three of masks alone, then three of a masked row."""
    layout = model.layout
    size, words, row_bytes = layout.size, layout.size // 8, layout.size * dtype.itemsize
    half = row_bytes // 2  # a bit is set with probability 1/2

    def build(seed: int) -> Inputs:
        source = Source(layout, seed, dtype, device)
        row, words = source.row(), source.words(1)[0]
        mask = unpack_mask(words)
        return Inputs(layout, row, words, mask, as_float(words, dtype), row[mask])

    def case(
        operation: str, of: torch.dtype, truth: Callable[[Inputs], Tensor],
        codes: Mapping[str, Bind], floor: int,
    ) -> Case:  # fmt: skip
        return Case(
            operation, model.name, "1 client", of, build, truth, codes, floor,
            input_bytes=12 * layout.size * 4, exact=True, rival_tolerance=0.0,
        )  # fmt: skip

    return [
        case("pack_mask", torch.bool, lambda x: x.mask.cpu(), PACK, size + words),
        case("unpack_mask", torch.bool, _on_cpu(reference.unpack_mask), UNPACK, size + words),
        case("popcount", torch.bool, _on_cpu(reference.popcount), POPCOUNT, words),
        case(
            "compress",
            dtype,
            _on_cpu(reference.compress, "row"),
            COMPRESS,
            row_bytes + half + words,
        ),
        case(
            "expand", dtype, _on_cpu(reference.expand, "values"), EXPAND, row_bytes + half + words
        ),
        case(
            "apply_mask", dtype, _on_cpu(reference.apply_mask, "row"), APPLY, 2 * row_bytes + words
        ),
    ]


def _on_cpu(function: Callable[..., Tensor], *fields: str) -> Callable[[Inputs], Tensor]:
    """A reference of fields of the inputs and the packed mask."""
    return lambda given: function(*(getattr(given, name).cpu() for name in (*fields, "words")))


def _code(function: Callable[[Inputs], Result]) -> Bind:
    return lambda given: partial(function, given)


def _shifts(function: Callable[[Tensor], Tensor], argument: str) -> dict[str, Bind]:
    """The official expression of one field of the inputs, and what torch.compile makes of it."""

    def bind(given: Inputs, *, compiled: bool = False) -> Run:
        called = rivals.compiled(function) if compiled else function
        return lambda: called(getattr(given, argument))

    return {OFFICIAL: bind, COMPILED: partial(bind, compiled=True)}


def _compress(given: Inputs) -> Run:
    nnz = given.values.numel()
    return lambda: compress(given.row, given.words, nnz=nnz)


def _assign(given: Inputs) -> Tensor:
    out = torch.zeros_like(given.row)
    out[given.mask] = given.values
    return out


def _scatter(given: Inputs) -> Tensor:
    return torch.zeros_like(given.row).masked_scatter_(given.mask, given.values)


def _apply_named(given: Inputs) -> Run:
    model, masks = given.layout.views(given.row), given.layout.views(given.floats)

    def run() -> Tensor:
        for name, mask in masks.items():
            model[name].mul_(mask)
        return given.row

    return run


def _apply_foreach(given: Inputs) -> Run:
    views, masks = (list(given.layout.views(x).values()) for x in (given.row, given.floats))

    def run() -> Tensor:
        torch._foreach_mul_(views, masks)
        return given.row

    return run


PACK = {OURS: _code(lambda x: pack_mask(x.mask)), **_shifts(official.pack_by_shifts, "mask")}
UNPACK = {
    OURS: _code(lambda x: unpack_mask(x.words)),
    **_shifts(official.unpack_by_shifts, "words"),
}
POPCOUNT = {OURS: _code(lambda x: popcount(x.words)), **_shifts(official.count_by_shifts, "words")}
COMPRESS = {
    OURS: _compress,
    OFFICIAL: _code(lambda x: x.row[x.mask]),
    "flat": _code(lambda x: torch.masked_select(x.row, x.mask)),
}
EXPAND = {
    OURS: _code(lambda x: expand(x.values, x.words)),
    OFFICIAL: _code(_assign),
    "flat": _code(_scatter),
}
APPLY = {
    OURS: _code(lambda x: apply_mask_(x.row, x.words)),
    OFFICIAL: _apply_named,
    "foreach": _apply_foreach,
    "flat": _code(lambda x: x.row.mul_(x.floats)),
}
