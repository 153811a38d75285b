"""The kernels of selection; the counts of a tile's digits and ties pass through shared memory."""

from tests.kernels.machine.harness import Case

_KEYS = {"fp32": 32, "bf16": 16, "fp64": 64}
# 16-byte loads that hold the 16 elements of a thread.
_WIDE = {"fp32": 4, "bf16": 2, "fp64": 8}
_WARPS = 8
_TABLES = {"words_in": "*i32", "tiles": "*i64", "thresholds": "*i64"}
_SEEDS = {"seed_low": "i32", "seed_high": "i32"}


def _form(row: str, *, largest: bool = False, free: bool = False) -> dict[str, object]:
    return {"WORDS": 128, "BITS": _KEYS[row], "LARGEST": largest, "FREE": free}


def _case(
    kernel: str, row: str | None, extra: dict[str, str], registers: int, shared: int,
    *, largest: bool = False, free: bool = False, atomics: bool = False, **constants: object,
) -> Case:  # fmt: skip
    signature = _TABLES | _SEEDS | extra
    form = _form(row or "fp32", largest=largest, free=free) | constants
    if row is None:
        form["row"] = None
    else:
        signature["row"] = f"*{row}"
    flags = " largest" * largest + " free" * free
    return Case(
        f"select {kernel} {row or 'random'}{flags}", f"select:{kernel}", signature, form,
        ("row",) if row else (), warps=_WARPS, registers=registers, shared=shared,
        wide_loads=_WIDE[row] if row else 0, atomics=atomics,
    )  # fmt: skip


_BINS = {"bins": "*i64", "shift": "i32"}
_TIES = {"ties_out": "*i32"}
_OUT = {"out": "*i32", "left": "*i64", "ends": "*i64"}
_FORMS = [
    ("fp32", False, False), ("fp32", True, True), ("bf16", False, False), ("bf16", True, True),
    ("fp64", False, False), ("fp64", True, True), (None, False, False), (None, False, True),
]  # fmt: skip

# Drawing at random takes up to 34 registers more with Triton 3.6 than with 3.7.
CASES: list[Case] = [
    *(
        _case("histogram", row, _BINS, 64 if row else 80, 1024, largest=a, free=b, atomics=True)
        for row, a, b in _FORMS
    ),
    *(_case("ties", row, _TIES, 48 if row else 64, 512, largest=a, free=b) for row, a, b in _FORMS),
    *(
        _case("apply", row, _OUT, 80 if row else 120, 512, largest=a, free=b, TOGGLE=True)
        for row, a, b in _FORMS
    ),
    Case(
        "select narrow", "select:narrow",
        dict.fromkeys(["bins", "thresholds", "wanted", "left", "taken"], "*i64"),
        {"FIRST": True}, warps=1, registers=64,
    ),
    Case(
        "select count", "select:count",
        {"counts": "*i64", "words_in": "*i32", "tiles": "*i64"}
        | dict.fromkeys(("words_stride", "n_tiles", "n_tensors"), "i32"),
        {"WORDS": 128}, warps=1, registers=40, atomics=True,
    ),
]  # fmt: skip
