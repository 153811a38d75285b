"""`masked_mean` loads four rows before it adds them; its count is one tensor with the sum.

A neighbour took 97 instructions, with barriers, when its copy went through shared memory.
`mean_tile` reads rows from L1, 16 bytes a load: no shared memory, and 32 warps at once.
"""

from typing import Any

from tests.kernels.machine.harness import TRITON_3_8, Case


def _case(
    name: str,
    registers: int,
    loads: int,
    stores: int,
    loop: int,
    *,
    blocks: int,
    dtype: str = "fp32",
    masked: bool = True,
    counted: bool = True,
    weighted: bool = False,
    kept: bool = False,
    tile: bool = False,
) -> Case:
    wide = "fp64" if dtype == "fp64" else "fp32"
    constants: dict[str, Any] = {
        "WORDS": {"fp64": 2, "fp32": 4, "bf16": 8}[dtype] if tile else 32,
        "DTYPE": dtype,
        "ACC": wide,
        "MASKED": masked,
        "COUNTED": counted,
        "KEPT": kept,
    }
    bounds: dict[str, Any] = {
        "registers": registers,
        "blocks": blocks,
        "wide_loads": loads,
        "wide_stores": stores,
        "barriers": 0,
        "loop": loop,
    }
    if tile:
        constants["GROUP"] = 16
        return Case(f"mean_tile {name}", "masked_mean:mean_tile", constants, warps=16, **bounds)
    if not weighted:
        constants["weights"] = None
    return Case(f"masked_mean {name}", "masked_mean:masked_mean", constants, **bounds)


# Per turn of the loop: four neighbours.
CASES: list[Case] = [
    _case("plain", 32, 10, 2, 100, blocks=16, masked=False, counted=False),
    _case(
        "float32", 56 if TRITON_3_8 else 48, 10, 2, 210, blocks=9 if TRITON_3_8 else 10
    ),
    _case("float32 receivers", 64, 10, 2, 210, blocks=8, kept=True),
    _case("float32 weights", 64, 10, 2, 224, blocks=8, weighted=True, kept=True),
    _case(
        "float32 over neighbours", 56, 10, 2, 192, blocks=9, counted=False, weighted=True,
        kept=True,
    ),
    _case("bfloat16", 48, 5, 1, 232, blocks=10, dtype="bf16", kept=True),
    _case(
        "bfloat16 plain", 32, 5, 1, 136, blocks=16, dtype="bf16", masked=False, counted=False,
        weighted=True,
    ),
    _case("float64", 128, 20, 4, 410, blocks=4, dtype="fp64", weighted=True, kept=True),
    _case("plain", 40, 5, 1, 80, blocks=3, masked=False, counted=False, tile=True),
    _case("float32", 64, 5, 1, 140, blocks=2, kept=True, tile=True),
    _case("float32 over neighbours", 64, 5, 1, 120, blocks=2, counted=False, kept=True, tile=True),
    _case("bfloat16", 64, 5, 1, 224, blocks=2, dtype="bf16", kept=True, tile=True),
    _case("float64", 64, 5, 1, 156, blocks=2, dtype="fp64", kept=True, tile=True),
]  # fmt: skip
