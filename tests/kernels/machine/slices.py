"""Slice operations, on tensors whose slices are aligned (flat) and on the rest."""

from typing import Any

from lightfed_kernels.slices import TILE

from tests.kernels.machine.harness import Case

_TABLES = {
    "tiles_ptr": "*i64",
    "tensors_ptr": "*i64",
    "n_tensors": "i32",
    "levels_ptr": "*i64",
    "first_ptr": "*i32",
}
_VECTOR = {"fp32": 4, "bf16": 8, "fp64": 2}
_MODES = {"merge": 0, "sum": 1, "finish": 2}


def _constants(dtype: str, *, flat: bool) -> dict[str, Any]:
    return {"TYPE": dtype, "TILE": TILE, "FLAT": flat, "VECTOR": _VECTOR[dtype]}


def _merge(mode: str, dtype: str, *, fixed: bool = False, flat: bool = True, **bounds: int) -> Case:
    sums = "*i64" if fixed else "*fp64"
    return Case(
        f"slices {mode} {dtype}{' fixed' if fixed else ''}{'' if flat else ' rest'}",
        "slices:merge_kernel",
        _TABLES
        | {
            "out_ptr": f"*{dtype}",
            "partial_ptr": sums,
            "rows_ptr": "*i64",
            "n_levels": "i32",
            "totals_ptr": "*fp64",
            "words_ptr": "*i32",
            "n_words": "i32",
            "label_totals_ptr": "*fp64",
            "n_labels": "i32",
            "weights_ptr": "*fp64",
        },
        _constants(dtype, flat=flat) | {"MODE": _MODES[mode], "FIXED": fixed},
        aligned=("out_ptr", "partial_ptr"),
        warps=TILE // (32 * _VECTOR[dtype] if flat else 64),
        **bounds,  # type: ignore[arg-type]
    )


def _take(dtype: str, *, flat: bool = True, **bounds: int) -> Case:
    return Case(
        f"slices take {dtype}{'' if flat else ' rest'}",
        "slices:take_kernel",
        _TABLES | {"row_ptr": f"*{dtype}", "outs_ptr": "*i64"},
        _constants(dtype, flat=flat),
        aligned=("row_ptr",),
        warps=TILE // (32 * _VECTOR[dtype] if flat else 64),
        **bounds,  # type: ignore[arg-type]
    )


CASES = [
    _merge("merge", "fp32", wide_loads=2, wide_stores=1),
    _merge("merge", "fp32", fixed=True, wide_loads=2, wide_stores=1),
    _merge("merge", "bf16", registers=80, wide_loads=2, wide_stores=1),
    _merge("merge", "fp64", wide_loads=2, wide_stores=1),
    _merge("sum", "fp32", wide_loads=2, wide_stores=2, shared=4096),
    _merge("sum", "fp32", fixed=True, wide_loads=2, wide_stores=2, shared=4096),
    _merge("finish", "fp32", wide_loads=2, wide_stores=1),
    _merge("finish", "fp32", fixed=True, wide_loads=2, wide_stores=1),
    _merge("merge", "fp32", flat=False),
    _merge("merge", "fp32", fixed=True, flat=False),
    _merge("sum", "fp32", flat=False),
    _merge("finish", "fp32", flat=False),
    _take("fp32", wide_loads=1, wide_stores=1),
    _take("bf16", wide_loads=1, wide_stores=1),
    _take("fp64", wide_loads=1, wide_stores=1),
    _take("fp32", flat=False),
]
