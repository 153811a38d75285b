"""Compile kernels for sm_90 without a GPU and read what the compiler says of the machine code.

    python -m tests.kernels.machine.harness [part of a name ..]

prints a table, with `--json` and whole names one JSON object, case name -> report. Tests run it in
a process of its own: under TRITON_INTERPRET=1 there is nothing to compile.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

PARTS = ("masked_mean", "masks", "select", "slices", "rows")


@dataclass(frozen=True)
class Case:
    """One variant of a kernel, and what its machine code has to be like.

    Attributes:
        name: unique.
        kernel: `module:function` under lightfed_kernels.gpu.
        signature: the type of every argument as Triton writes it (`*fp32`, `i64`); constants left
            out.
        constants: the values of the tl.constexpr arguments; fp32, bf16 and fp64 stand for types.
        aligned: arguments that are multiples of 16 (addresses in bytes, integers in units).
        registers: at most so many a thread.
        shared: at most so many bytes of shared memory.
        wide_loads: at least so many 16-byte loads, and as many `wide_stores`.
        asynchronous: at least so many 16-byte copies to shared memory that nothing waits for.
        blocks: at least so many at once on a multiprocessor.
        atomics: whether it may have atomic operations.
    """

    name: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    warps: int = 4
    registers: int = 64
    shared: int = 0
    wide_loads: int = 0
    wide_stores: int = 0
    asynchronous: int = 0
    blocks: int = 1
    atomics: bool = False


@dataclass(frozen=True)
class Report:
    """What the compiler made of a case: per thread, in bytes, or as counts of instructions."""

    registers: int
    stack: int
    local: int
    shared: int
    wide_loads: int
    wide_stores: int
    asynchronous: int
    atomics: int
    blocks: int


def cases() -> list[Case]:
    found: list[Case] = []
    for part in PARTS:
        found.extend(importlib.import_module(f"tests.kernels.machine.{part}").CASES)
    assert len({case.name for case in found}) == len(found)
    return found


def compile_case(case: Case) -> Report:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = case.kernel.split(":")
    function = getattr(importlib.import_module(f"lightfed_kernels.gpu.{module}"), name)
    order = list(function.arg_names)
    signature = {a: case.signature.get(a, "constexpr") for a in order}
    constants = {a for a, kind in signature.items() if kind == "constexpr"}
    assert constants == set(case.constants), f"{case.name}: {constants ^ set(case.constants)}"
    attributes = {(order.index(a),): [["tt.divisibility", 16]] for a in case.aligned}
    types = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp64": tl.float64}
    values = {a: types.get(v, v) for a, v in case.constants.items()}
    source = ASTSource(function, signature, constexprs=values, attrs=attributes)
    options = {"num_warps": case.warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return _read(compiled.asm["cubin"], compiled.asm["ptx"], compiled.metadata.shared, case.warps)


def _read(cubin: bytes, ptx: str, shared: int, warps: int) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = subprocess.run(
            [_cuobjdump(), "--dump-resource-usage", str(path)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    found = dict(re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", usage))
    # As the ptx says: 16 bytes are four 32-bit or two 64-bit registers (bf16 travels in pairs).
    wide = r"[\w.:]*\.(?:v4\.[bf]32|v2\.[bf]64)"
    return Report(
        registers=int(found["REG"]),
        stack=int(found["STACK"]),
        local=int(found["LOCAL"]),
        shared=shared,
        wide_loads=len(re.findall(rf"\bld\.global{wide}", ptx)),
        wide_stores=len(re.findall(rf"\bst\.global{wide}", ptx)),
        asynchronous=len(re.findall(r"\bcp\.async\.cg[\w.:]* .*, 0x10|\bcp\.async\.bulk", ptx)),
        atomics=len(re.findall(r"\b(?:atom|red)\.", ptx)),
        blocks=_blocks(int(found["REG"]), shared, warps),
    )


def _blocks(registers: int, shared: int, warps: int) -> int:
    """Blocks of a kernel at once on a multiprocessor of sm_90."""
    of_a_warp = 32 * -(-registers // 8) * 8
    by_registers = 65536 // (of_a_warp * warps)
    by_memory = 228 * 1024 // (shared + 1024)
    return min(32, 64 // warps, by_registers, by_memory)


def _cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


@cache
def reports(names: tuple[str, ...]) -> dict[str, Report]:
    """The reports of some cases, compiled by a child process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.machine.harness", "--json", *names],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: Report(**report) for name, report in json.loads(done.stdout).items()}


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--json"]:
        named = {case.name: case for case in cases()}
        print(json.dumps({name: compile_case(named[name]).__dict__ for name in words[1:]}))
        return
    chosen = [c for c in cases() if not words or any(part in c.name for part in words)]
    found = {case.name: compile_case(case).__dict__ for case in chosen}
    names = [each.name for each in fields(Report)]
    print(" ".join([f"{'':36}", *(f"{name:>12}" for name in names)]))
    for case, report in found.items():
        print(" ".join([f"{case:36}", *(f"{report[name]:12}" for name in names)]))


if __name__ == "__main__":
    main()
