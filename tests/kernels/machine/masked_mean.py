"""`masked_mean` in float32 keeps everything in registers; the count is one tensor with the sum."""

from typing import Any

from tests.kernels.machine.harness import Case


def _case(
    name: str,
    registers: int,
    loads: int,
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
        "kept_stride": "i32",
        "n_words": "i32",
        "n_receivers": "i32",
    }
    constants: dict[str, Any] = {
        "WORDS": 32,
        "DTYPE": types[dtype],
        "ACC": types[wide],
        "MASKED": masked,
        "COUNTED": counted,
    }
    for argument, there, kind in (("weights", weighted, wide), ("kept", kept, "i32")):
        if there:
            signature[argument] = f"*{kind}"
        else:
            constants[argument] = None
    return Case(
        f"masked_mean {name}", "masked_mean:masked_mean", signature, constants, ("out",),
        registers=registers, wide_loads=loads, wide_stores=stores,
    )  # fmt: skip


CASES: list[Case] = [
    _case("plain", 40, 6, 2, masked=False, counted=False),
    _case("float32", 56, 6, 2),
    _case("float32 receivers", 56, 6, 2, kept=True),
    _case("float32 weights", 64, 6, 2, weighted=True, kept=True),
    _case("float32 over neighbours", 48, 6, 2, counted=False, weighted=True, kept=True),
    _case("bfloat16", 56, 3, 1, dtype="bf16", kept=True),
    _case("bfloat16 plain", 40, 3, 1, dtype="bf16", masked=False, counted=False, weighted=True),
    _case("float64", 104, 12, 4, dtype="fp64", weighted=True, kept=True),
]
