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
    """A row and its mask.

    Attributes:
        layout: The layout of the row.
        row: (P,).
        words: (P / 32,) its mask, packed.
        mask: (P,) its mask as bool.
        floats: (P,) its mask in the dtype of the row.
        values: (nnz,) what the mask covers of the row.
    """

    layout: Layout
    row: Tensor
    words: Tensor
    mask: Tensor
    floats: Tensor
    values: Tensor


def cases(model: Model, clients: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Return the cases of one client: three of masks alone, then three of a masked row."""
    layout = model.layout
    bool_bytes = layout.size
    word_bytes = layout.size // 8
    row_bytes = layout.size * dtype.itemsize
    value_bytes = row_bytes // 2  # a bit is 1 with probability 1/2

    def build(seed: int) -> Inputs:
        source = Source(layout, seed, dtype, device)
        row = source.row()
        words = source.words(1)[0]
        mask = unpack_mask(words)
        return Inputs(layout, row, words, mask, as_float(words, dtype), row[mask])

    def case(
        operation: str,
        dtype_of_case: torch.dtype,
        truth: Callable[[Inputs], Tensor],
        codes: Mapping[str, Bind],
        floor_bytes: int,
    ) -> Case:
        return Case(
            operation=operation,
            model=model.name,
            shape="1 client",
            dtype=dtype_of_case,
            build=build,
            reference=truth,
            codes=codes,
            floor_bytes=floor_bytes,
            input_bytes=12 * layout.size * 4,
            exact=True,
            rival_tolerance=0.0,
        )

    compress_row = _on_cpu(reference.compress, "row")
    expand_values = _on_cpu(reference.expand, "values")
    apply_to_row = _on_cpu(reference.apply_mask, "row")
    return [
        case("pack_mask", torch.bool, lambda x: x.mask.cpu(), PACK, bool_bytes + word_bytes),
        case(
            "unpack_mask",
            torch.bool,
            _on_cpu(reference.unpack_mask),
            UNPACK,
            bool_bytes + word_bytes,
        ),
        case("popcount", torch.bool, _on_cpu(reference.popcount), POPCOUNT, word_bytes),
        case("compress", dtype, compress_row, COMPRESS, row_bytes + value_bytes + word_bytes),
        case("expand", dtype, expand_values, EXPAND, row_bytes + value_bytes + word_bytes),
        case("apply_mask", dtype, apply_to_row, APPLY, 2 * row_bytes + word_bytes),
    ]


def _on_cpu(function: Callable[..., Tensor], *fields: str) -> Callable[[Inputs], Tensor]:
    """Return a reference that takes fields of the inputs, and then the packed mask."""

    def truth(inputs: Inputs) -> Tensor:
        arguments = [getattr(inputs, name).cpu() for name in (*fields, "words")]
        return function(*arguments)

    return truth


def _code(function: Callable[[Inputs], Result]) -> Bind:
    """Return a code that prepares nothing."""
    return lambda inputs: partial(function, inputs)


def _shifts(function: Callable[[Tensor], Tensor], argument: str) -> dict[str, Bind]:
    """Return two codes: an official expression of one field, and the same one compiled."""

    def bind(inputs: Inputs, *, compiled: bool = False) -> Run:
        called = rivals.compiled(function) if compiled else function
        return lambda: called(getattr(inputs, argument))

    return {OFFICIAL: bind, COMPILED: partial(bind, compiled=True)}


def _compress(inputs: Inputs) -> Run:
    nnz = inputs.values.numel()
    return lambda: compress(inputs.row, inputs.words, nnz=nnz)


def _assign(inputs: Inputs) -> Tensor:
    out = torch.zeros_like(inputs.row)
    out[inputs.mask] = inputs.values
    return out


def _scatter(inputs: Inputs) -> Tensor:
    return torch.zeros_like(inputs.row).masked_scatter_(inputs.mask, inputs.values)


def _apply_named(inputs: Inputs) -> Run:
    model = inputs.layout.views(inputs.row)
    masks = inputs.layout.views(inputs.floats)

    def run() -> Tensor:
        for name, mask in masks.items():
            model[name].mul_(mask)
        return inputs.row

    return run


def _apply_foreach(inputs: Inputs) -> Run:
    views = list(inputs.layout.views(inputs.row).values())
    masks = list(inputs.layout.views(inputs.floats).values())

    def run() -> Tensor:
        torch._foreach_mul_(views, masks)
        return inputs.row

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
