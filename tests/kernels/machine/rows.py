"""Rows: sums of float64 take two registers an element, and a division of them is a subroutine."""

from tests.kernels.machine.harness import Case

_WIDE = {"fp32": "fp32", "bf16": "fp32", "fp64": "fp64"}


def _means(target: str, dtype: str, *, finish: bool = False, **bounds: int) -> Case:
    return Case(
        f"rows means {target}{' finish' if finish else ''} {dtype}",
        "rows:means_kernel",
        {
            "rows_ptr": "*i64",
            "weights_ptr": "*fp64",
            "jobs_ptr": "*i64",
            "tiles_ptr": "*i32",
            "sums_ptr": "*fp64",
            "totals_ptr": "*fp64",
        },
        {
            "TYPE": dtype,
            "ROUND": _WIDE[dtype],
            "SUMS": target == "sums",
            "FROM_ROWS": not finish,
            "WEIGHTED": not finish,
            "BLOCK": 1024,
        },
        aligned=("sums_ptr",),
        **bounds,  # type: ignore[arg-type]
    )


def _aspg(dtype: str, **bounds: int) -> Case:
    rows = dict.fromkeys(("point_ptr", "x_ptr", "gradient_ptr", "anchor_ptr"), f"*{dtype}")
    numbers = dict.fromkeys(("lr", "gamma", "extrapolation", "low", "high"), "fp64")
    return Case(
        f"rows aspg {dtype}",
        "steps:aspg_kernel",
        rows | numbers | {"size": "i32"},
        {"WIDE": _WIDE[dtype], "BOX": True, "BLOCK": 1024},
        aligned=tuple(rows),
        **bounds,  # type: ignore[arg-type]
    )


# Two rows are copied ahead of a sum.
_AHEAD = {"fp32": 6, "bf16": 3, "fp64": 12}


def _sum(target: str, dtype: str, registers: int, stores: int) -> Case:
    copies = _AHEAD[dtype]
    bounds = {"shared": 1400 * copies, "asynchronous": copies, "wide_stores": stores}
    return _means(target, dtype, registers=registers, **bounds)


CASES = [
    _sum("sums", "fp32", registers=40, stores=4),
    _sum("members", "fp32", registers=48, stores=2),
    _sum("members", "bf16", registers=48, stores=1),
    _sum("members", "fp64", registers=48, stores=4),
    _means("members", "fp32", finish=True, registers=48, wide_loads=4, wide_stores=2),
    _aspg("fp32", registers=40, wide_loads=8, wide_stores=4),
    _aspg("bf16", registers=40, wide_loads=4, wide_stores=2),
    _aspg("fp64", registers=56, wide_loads=16, wide_stores=8),
]
