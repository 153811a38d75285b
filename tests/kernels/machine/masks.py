"""The kernels of packed masks.

Sums over bits, and elements that move to another place, pass through some shared memory; Triton 3.6
uses more of it than 3.7 (8192 bytes in float64).
"""

from tests.kernels.machine.harness import Case

_WORDS = {"WORDS": 32}
_ROWS = ("fp32", "bf16", "fp64")
# 16-byte accesses that hold the 8 elements of a thread.
_WIDE = {"fp32": 2, "bf16": 1, "fp64": 4}


CASES: list[Case] = [
    Case(
        "masks pack", "masks:pack",
        {"WORDS": 64}, registers=32, shared=256, wide_loads=1,
    ),
    Case(
        "masks unpack", "masks:unpack",
        {"WORDS": 64}, registers=32, wide_stores=1,
    ),
    Case(
        "masks count", "masks:count",
        _WORDS | {"TILES": 32}, registers=32, shared=128,
    ),
    *(
        Case(
            f"masks compress {row}", "masks:compress",
            _WORDS, row, registers=56, shared=8192, wide_loads=_WIDE[row],
        )
        for row in _ROWS
    ),
    *(
        Case(
            f"masks expand {row}", "masks:expand",
            _WORDS, row, registers=40, shared=8192, wide_stores=_WIDE[row],
        )
        for row in _ROWS
    ),
    *(
        Case(
            f"masks apply {row}", "masks:apply",
            _WORDS, row, registers=40, wide_loads=_WIDE[row], wide_stores=_WIDE[row],
        )
        for row in _ROWS
    ),
]  # fmt: skip
