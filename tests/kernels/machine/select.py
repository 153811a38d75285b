"""The kernels of selection; the counts of a tile's digits and ties pass through shared memory."""

from tests.kernels.machine.harness import TRITON_3_8, Case

_KEYS = {"fp32": 32, "bf16": 16, "fp64": 64}
# 16-byte loads that hold the 16 elements of a thread.
_WIDE = {"fp32": 4, "bf16": 2, "fp64": 8}
_WARPS = 8


def _case(
    kernel: str,
    row: str | None,
    registers: int,
    shared: int,
    *,
    largest: bool = False,
    free: bool = False,
    atomics: bool = False,
    **constants: object,
) -> Case:
    form = {
        "WORDS": 128,
        "BITS": _KEYS[row or "fp32"],
        "LARGEST": largest,
        "FREE": free,
        **constants,
    }
    name = f"select {kernel} {row or 'random'}"
    if row is None:
        form["row"] = None
    if largest:
        name += " largest"
    if free:
        name += " free"
    return Case(
        name,
        f"select:{kernel}",
        form,
        dtype=row or "",
        warps=_WARPS,
        registers=registers,
        shared=shared,
        wide_loads=_WIDE[row] if row else 0,
        atomics=atomics,
    )


# dtype of the row, or None for a draw; whether the largest win; whether zeros are the candidates.
_FORMS = [
    ("fp32", False, False), ("fp32", True, True), ("bf16", False, False), ("bf16", True, True),
    ("fp64", False, False), ("fp64", True, True), (None, False, False), (None, False, True),
]  # fmt: skip


def _cases() -> list[Case]:
    """Drawing at random takes up to 34 registers more with Triton 3.6 than with 3.7.

    With 3.8 it takes twice the shared memory to apply.
    """
    found: list[Case] = []
    for row, largest, free in _FORMS:
        form = {"largest": largest, "free": free}
        drawn = row is None
        # A draw among the ones of a mask gives its choice, the others the mask that follows.
        toggles = free or not drawn
        found.append(_case("histogram", row, 80 if drawn else 64, 1024, atomics=True, **form))
        found.append(_case("ties", row, 64 if drawn else 48, 512, **form))
        registers = 120 if drawn else 80
        shared = 1024 if drawn and TRITON_3_8 else 512
        found.append(_case("apply", row, registers, shared, TOGGLE=toggles, **form))
    return found


CASES: list[Case] = [
    *_cases(),
    Case("select narrow", "select:narrow", {"FIRST": True}, warps=1, registers=64),
    Case("select count", "select:count", {"WORDS": 128}, warps=1, registers=40, atomics=True),
]
