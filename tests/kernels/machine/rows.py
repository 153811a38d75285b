"""Rows: sums of float64 take two registers an element, and a division of them is a subroutine."""

from tests.kernels.machine.harness import Case

_WIDE = {"fp32": "fp32", "bf16": "fp32", "fp64": "fp64"}


def _means(target: str, dtype: str, *, finish: bool = False, **bounds: int) -> Case:
    return Case(
        f"rows means {target}{' finish' if finish else ''} {dtype}",
        "rows:means_kernel",
        {
            "TYPE": dtype,
            "ROUND": _WIDE[dtype],
            "SUMS": target == "sums",
            "FROM_ROWS": not finish,
            "WEIGHTED": not finish,
            "BLOCK": 1024,
        },
        **bounds,  # type: ignore[arg-type]
    )


def _aspg(dtype: str, **bounds: int) -> Case:
    return Case(
        f"rows aspg {dtype}",
        "steps:aspg_kernel",
        {"WIDE": _WIDE[dtype], "BOX": True, "BLOCK": 1024},
        dtype=dtype,
        **bounds,  # type: ignore[arg-type]
    )


def _sum(target: str, dtype: str, registers: int, stores: int) -> Case:
    """Four members a turn, loaded before they are added; one took 93 instructions before."""
    loads = {"fp32": 10, "bf16": 5, "fp64": 20}[dtype]
    barriers, shared = (3, 4096) if target == "sums" else (0, 0)
    return _means(
        target, dtype, registers=registers, shared=shared, barriers=barriers, loop=190,
        wide_loads=loads, wide_stores=stores,
    )  # fmt: skip


CASES = [
    _sum("sums", "fp32", registers=56, stores=4),
    _sum("members", "fp32", registers=64, stores=2),
    _sum("members", "bf16", registers=64, stores=1),
    _sum("members", "fp64", registers=72, stores=4),
    _means("members", "fp32", finish=True, registers=48, wide_loads=4, wide_stores=2),
    _aspg("fp32", registers=40, wide_loads=8, wide_stores=4),
    _aspg("bf16", registers=40, wide_loads=4, wide_stores=2),
    _aspg("fp64", registers=56, wide_loads=16, wide_stores=8),
]
