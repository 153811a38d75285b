"""`masked_mean` copies two rows ahead of the sum; its count is one tensor with the sum.

`mean_tile` reads rows from L1, 16 bytes a thread: no shared memory, and 32 warps at once.
"""

from typing import Any

from tests.kernels.machine.harness import Case


def _case(
    name: str,
    registers: int,
    copies: int,
    stores: int,
    *,
    dtype: str = "fp32",
    masked: bool = True,
    counted: bool = True,
    weighted: bool = False,
    kept: bool = False,
    tile: bool = False,
) -> Case:
    import triton.language as tl

    types = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp64": tl.float64}
    wide = "fp64" if dtype == "fp64" else "fp32"
    signature = {
        "table": "*i64",
        "out": f"*{dtype}",
        "out_stride": "i32",
        "n_words": "i32",
        "n_receivers": "i32",
    }
    constants: dict[str, Any] = {
        "WORDS": {"fp64": 2, "fp32": 4, "bf16": 8}[dtype] if tile else 32,
        "DTYPE": types[dtype],
        "ACC": types[wide],
        "MASKED": masked,
        "COUNTED": counted,
        "KEPT": kept,
    }
    if tile:
        signature["most"], constants["GROUP"] = "i32", 16
        return Case(
            f"mean_tile {name}", "masked_mean:mean_tile", signature, constants, ("out",),
            warps=16, registers=registers, blocks=2, wide_loads=copies, wide_stores=stores,
        )  # fmt: skip
    if weighted:
        signature["weights"] = f"*{wide}"
    else:
        constants["weights"] = None
    return Case(
        f"masked_mean {name}", "masked_mean:masked_mean", signature, constants, ("out",),
        registers=registers, shared=1470 * copies, asynchronous=copies, wide_stores=stores,
    )  # fmt: skip


CASES: list[Case] = [
    _case("plain", 32, 6, 2, masked=False, counted=False),
    _case("float32", 48, 6, 2),
    _case("float32 receivers", 48, 6, 2, kept=True),
    _case("float32 weights", 48, 6, 2, weighted=True, kept=True),
    _case("float32 over neighbours", 48, 6, 2, counted=False, weighted=True, kept=True),
    _case("bfloat16", 48, 3, 1, dtype="bf16", kept=True),
    _case("bfloat16 plain", 32, 3, 1, dtype="bf16", masked=False, counted=False, weighted=True),
    _case("float64", 72, 12, 4, dtype="fp64", weighted=True, kept=True),
    _case("plain", 32, 3, 1, masked=False, counted=False, tile=True),
    _case("float32", 56, 3, 1, kept=True, tile=True),
    _case("float32 over neighbours", 32, 3, 1, counted=False, kept=True, tile=True),
    _case("bfloat16", 64, 3, 1, dtype="bf16", kept=True, tile=True),
    _case("float64", 64, 3, 1, dtype="fp64", kept=True, tile=True),
]
