"""`masked_mean` copies two rows ahead of the sum; its count is one tensor with the sum."""

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
        "WORDS": 32,
        "DTYPE": types[dtype],
        "ACC": types[wide],
        "MASKED": masked,
        "COUNTED": counted,
        "KEPT": kept,
    }
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
    _case("float32 over neighbours", 56, 6, 2, counted=False, weighted=True, kept=True),
    _case("bfloat16", 56, 3, 1, dtype="bf16", kept=True),
    _case("bfloat16 plain", 32, 3, 1, dtype="bf16", masked=False, counted=False, weighted=True),
    _case("float64", 88, 12, 4, dtype="fp64", weighted=True, kept=True),
]
