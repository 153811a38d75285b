"""The kernel of draws: arithmetic and one store."""

from tests.kernels.machine.harness import Case

_TABLES = {"keys_ptr": "*i64", "offsets_ptr": "*i64", "size": "i64", "blocks": "i32"}

CASES = [
    Case(
        "uniform", "draws:uniform_kernel", {"out_ptr": "*fp32"} | _TABLES, {"BLOCK": 1024},
        ("out_ptr",), registers=40, blocks=12,
    ),
]  # fmt: skip
