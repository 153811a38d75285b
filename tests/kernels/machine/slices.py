"""Slice operations: one launch over tensors whose slices are aligned and the rest."""

from typing import Any

from lightfed_kernels.slices import TILE

from tests.kernels.machine.harness import Case

_TABLES = {
    "flat_ptr": "*i64",
    "rest_ptr": "*i64",
    "n_rest": "i32",
    "tensors_ptr": "*i64",
    "n_tensors": "i32",
    "levels_ptr": "*i64",
    "first_ptr": "*i32",
}
_VECTOR = {"fp32": 4, "bf16": 8, "fp64": 2}
_MODES = {"merge": 0, "sum": 1, "finish": 2}


def _case(name: str, kernel: str, signature: dict[str, str], dtype: str, **settings: Any) -> Case:
    vector = _VECTOR[dtype]
    constants = {"TYPE": dtype, "TILE": TILE, "VECTOR": vector} | settings.pop("constants", {})
    return Case(
        f"slices {name} {dtype}",
        f"slices:{kernel}",
        _TABLES | signature,
        constants,
        warps=TILE // (32 * vector),
        **settings,
    )


def _merge(mode: str, dtype: str, **bounds: int) -> Case:
    signature = {
        "out_ptr": f"*{dtype}",
        "partial_ptr": "*fp64",
        "rows_ptr": "*i64",
        "levels_of_ptr": "*i32",
        "totals_ptr": "*fp64",
        "words_ptr": "*i32",
        "n_words": "i32",
        "label_totals_ptr": "*fp64",
        "n_labels": "i32",
        "weights_ptr": "*fp64",
        "start": "i32",
        "size": "i64",
    }
    constants = {"MODE": _MODES[mode]}
    aligned = ("out_ptr", "partial_ptr")
    return _case(
        mode, "merge_kernel", signature, dtype, constants=constants, aligned=aligned, **bounds
    )


def _take(dtype: str, **bounds: int) -> Case:
    signature = {"row_ptr": f"*{dtype}", "outs_ptr": "*i64"}
    return _case("take", "take_kernel", signature, dtype, aligned=("row_ptr",), **bounds)


# Copies of clients' rows go ahead of the sums: three tiles, and what says where they are.
_PIPELINE = {"shared": 6400, "asynchronous": 4}
CASES = [
    _merge("merge", "fp32", registers=40, blocks=12, wide_stores=1, **_PIPELINE),
    _merge("merge", "bf16", blocks=16, wide_stores=1, **_PIPELINE),
    _merge("merge", "fp64", registers=48, shared=12544, asynchronous=4, wide_stores=1),
    _merge("sum", "fp32", registers=40, blocks=12, wide_stores=2, **_PIPELINE),
    _merge("finish", "fp32", registers=40, wide_loads=2, wide_stores=1),
    _take("fp32", registers=32, wide_loads=1, wide_stores=1),
    _take("bf16", registers=32, wide_loads=1, wide_stores=1),
    _take("fp64", registers=32, wide_loads=1, wide_stores=1),
]
