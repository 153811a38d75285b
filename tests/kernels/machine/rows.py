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


def _sgd(dtype: str, *, flags: bool, mask: bool = True, **bounds: int) -> Case:
    rows = dict.fromkeys(("row_ptr", "gradient_ptr", "buffer_ptr", "anchor_ptr"), f"*{dtype}")
    numbers = dict.fromkeys(("lr", "momentum", "weight_decay", "prox"), "fp64")
    names = ("SCALE", "RATE", "DECAY", "PROX", "MOMENTUM", "NESTEROV")
    return Case(
        f"rows sgd {'all' if flags else 'plain'}{' mask' if mask else ''} {dtype}",
        "steps:sgd_kernel",
        rows
        | numbers
        | {
            "scale_ptr": "*fp32",
            "rate_ptr": "*fp64",
            "words_ptr": "*i32",
            "size": "i32",
            "span": "i32",
        },
        dict.fromkeys(names, flags) | {"MASK": mask, "WIDE": _WIDE[dtype], "WORDS": 32},
        aligned=(*rows, "words_ptr"),
        **bounds,  # type: ignore[arg-type]
    )


def _adam(dtype: str, *, flags: bool, **bounds: int) -> Case:
    rows = dict.fromkeys(("row_ptr", "gradient_ptr", "average_ptr", "square_ptr"), f"*{dtype}")
    numbers = dict.fromkeys(("beta1", "beta2", "eps", "weight_decay"), "fp64")
    return Case(
        f"rows adam {'all' if flags else 'plain'} {dtype}",
        "steps:adam_kernel",
        rows
        | numbers
        | {"scale_ptr": "*fp32", "numbers_ptr": "*fp64", "words_ptr": "*i32"}
        | {"size": "i32", "span": "i32"},
        {"SCALE": flags, "DECAY": flags, "MASK": flags, "WIDE": _WIDE[dtype], "WORDS": 32},
        aligned=(*rows, "words_ptr"),
        warps=4 if dtype == "bf16" else 8,
        **bounds,  # type: ignore[arg-type]
    )


def _aspg(dtype: str, **bounds: int) -> Case:
    rows = dict.fromkeys(("point_ptr", "x_ptr", "gradient_ptr", "anchor_ptr"), f"*{dtype}")
    numbers = dict.fromkeys(("lr", "gamma", "extrapolation", "low", "high"), "fp64")
    return Case(
        f"rows aspg {dtype}",
        "steps:aspg_kernel",
        rows | numbers | {"rate_ptr": "*fp64", "size": "i32"},
        {"WIDE": _WIDE[dtype], "RATE": True, "BOX": True, "BLOCK": 1024},
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
    _sgd("fp32", flags=False, mask=False, registers=32, wide_loads=4, wide_stores=2),
    _sgd("fp32", flags=False, registers=32, wide_loads=4, wide_stores=2),
    _sgd("fp32", flags=True, registers=40, wide_loads=8, wide_stores=4),
    _sgd("bf16", flags=True, registers=40, wide_loads=4, wide_stores=2),
    _sgd("fp64", flags=True, registers=72, wide_loads=16, wide_stores=8),
    _adam("fp32", flags=False, registers=32, wide_loads=4, wide_stores=3),
    _adam("fp32", flags=True, registers=32, wide_loads=4, wide_stores=3),
    _adam("bf16", flags=True, registers=48, wide_loads=4, wide_stores=3),
    _adam("fp64", flags=True, registers=64, wide_loads=8, wide_stores=6),
    _aspg("fp32", registers=40, wide_loads=8, wide_stores=4),
    _aspg("bf16", registers=40, wide_loads=4, wide_stores=2),
    _aspg("fp64", registers=56, wide_loads=16, wide_stores=8),
]
