"""Slice operations: one launch over tensors whose slices are aligned and the rest."""

from typing import Any

from lightfed_kernels.slices import TILE

from tests.kernels.machine.harness import TRITON_3_8, Case

_VECTOR = {"fp32": 4, "bf16": 8, "fp64": 2}
_MODES = {"merge": 0, "sum": 1, "finish": 2}


def _case(name: str, kernel: str, dtype: str, **settings: Any) -> Case:
    vector = _VECTOR[dtype]
    constants = {"TYPE": dtype, "TILE": TILE, "VECTOR": vector} | settings.pop("constants", {})
    return Case(
        f"slices {name} {dtype}",
        f"slices:{kernel}",
        constants,
        warps=TILE // (32 * vector),
        **settings,
    )


def _merge(mode: str, dtype: str, **bounds: int) -> Case:
    return _case(mode, "merge_kernel", dtype, constants={"MODE": _MODES[mode]}, **bounds)


def _take(dtype: str, **bounds: int) -> Case:
    return _case("take", "take_kernel", dtype, **bounds)


# Four clients a turn of the loop, by loads that nothing waits for in between: no shared memory, no
# barrier. Before, one client took 146 instructions.
_FOUR_CLIENTS = {"loop": 84, "barriers": 0, "wide_loads": 6}
CASES = [
    _merge("merge", "fp32", registers=64, blocks=8, wide_stores=1, **_FOUR_CLIENTS),
    _merge("merge", "bf16", registers=72, blocks=14, wide_stores=1, **_FOUR_CLIENTS),
    _merge(
        "merge",
        "fp64",
        registers=64 if TRITON_3_8 else 48,
        blocks=4 if TRITON_3_8 else 5,
        wide_stores=1,
        **_FOUR_CLIENTS,
    ),
    _merge(
        "sum", "fp32", registers=56, blocks=9, shared=4096, wide_loads=5, loop=84, wide_stores=2
    ),
    _merge("finish", "fp32", registers=40, wide_loads=2, wide_stores=1),
    _take("fp32", registers=32, wide_loads=1, wide_stores=1),
    _take("bf16", registers=32, wide_loads=1, wide_stores=1),
    _take("fp64", registers=32, wide_loads=1, wide_stores=1),
]
