"""What the machine code of a kernel has to be like, and what it is like.

    python -m tests.kernels.machine.harness [part of a name ..]

prints a table of the cases. Kernels are compiled for sm_90 without a GPU, see launches.py.
"""

import importlib
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

# From 3.8 on Triton compiles a few kernels to more registers or more shared memory. Each version is
# held to bounds of its own, so that a change of ours cannot hide in the room of another.
TRITON_3_8 = tuple(int(part) for part in version("triton").split(".")[:2]) >= (3, 8)

PARTS = ("masked_mean", "masks", "select", "slices", "rows")


@dataclass(frozen=True)
class Case:
    """One variant of a kernel, and what its machine code has to be like.

    Attributes:
        name: unique.
        kernel: `module:function` under lightfed_kernels.gpu.
        constants: the values of the tl.constexpr arguments, as the launcher gives them; fp32, bf16
            and fp64 stand for types.
        dtype: of the rows, where the constants do not say it: fp32, bf16 or fp64.
        registers: at most so many a thread.
        shared: at most so many bytes of shared memory.
        wide_loads: at least so many 16-byte loads, and as many `wide_stores`.
        blocks: at least so many at once on a multiprocessor.
        atomics: whether it may have atomic operations.
        barriers: at most so many barriers in the whole kernel; None for any number.
        loop: at most so many instructions in its busiest innermost loop; None for any number.
    """

    name: str
    kernel: str
    constants: dict[str, Any] = field(default_factory=dict)
    dtype: str = ""
    warps: int = 4
    registers: int = 64
    shared: int = 0
    wide_loads: int = 0
    wide_stores: int = 0
    blocks: int = 1
    atomics: bool = False
    barriers: int | None = None
    loop: int | None = None


@dataclass(frozen=True)
class Report:
    """What the compiler made of a case: per thread, in bytes, or as counts of instructions.

    Attributes:
        instructions: in the whole kernel.
        barriers: instructions at which a block waits for all its warps.
        loop: instructions of the innermost loop that has most loads, 0 without a loop.
        loop_loads: loads from global memory in it, copies to shared memory included.
    """

    registers: int
    stack: int
    local: int
    shared: int
    wide_loads: int
    wide_stores: int
    asynchronous: int
    atomics: int
    blocks: int
    instructions: int
    barriers: int
    loop: int
    loop_loads: int


def cases() -> list[Case]:
    found: list[Case] = []
    for part in PARTS:
        found.extend(importlib.import_module(f"tests.kernels.machine.{part}").CASES)
    assert len({case.name for case in found}) == len(found)
    return found


def report(cubin: bytes, ptx: str, shared: int, warps: int) -> Report:
    """Read the machine code of a kernel."""
    found = resources(cubin)
    instructions, loops = _instructions(_examined(cubin, "nvdisasm", "--print-code"))
    loop = max(loops, key=lambda body: (_loads(body), len(body)), default=[])

    # As the ptx says: 16 bytes are four 32-bit or two 64-bit registers (bf16 travels in pairs).
    wide = r"[\w.:]*\.(?:v4\.[bf]32|v2\.[bf]64)"
    return Report(
        registers=found["REG"],
        stack=found["STACK"],
        local=found["LOCAL"],
        shared=shared,
        wide_loads=len(re.findall(rf"\bld\.global{wide}", ptx)),
        wide_stores=len(re.findall(rf"\bst\.global{wide}", ptx)),
        asynchronous=len(re.findall(r"\bcp\.async\.cg[\w.:]* .*, 0x10|\bcp\.async\.bulk", ptx)),
        atomics=len(re.findall(r"\b(?:atom|red)\.", ptx)),
        blocks=_blocks(found["REG"], shared, warps),
        instructions=len(instructions),
        barriers=sum("BAR." in line for line in instructions),
        loop=len(loop),
        loop_loads=_loads(loop),
    )


def _instructions(code: str) -> tuple[list[str], list[list[str]]]:
    """The instructions of disassembled code, and those of each innermost loop.

    A loop is what lies between a label and a branch back to it.
    """
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/", line) and "NOP" not in line:
            lines.append(line)

    spans: list[tuple[int, int]] = []
    for position, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*(\.L_x_\d+)", line)
        # A branch to itself fills the end of the code.
        if target is not None and labels[target[1]] < position:
            spans.append((labels[target[1]], position + 1))

    loops: list[list[str]] = []
    for begin, end in spans:
        inside = [span for span in spans if span != (begin, end) and begin <= span[0] < end]
        if not inside:
            loops.append(lines[begin:end])
    return lines, loops


def _loads(lines: list[str]) -> int:
    return sum(bool(re.search(r"\b(?:LDG|LDGSTS|UBLKCP)\b", line)) for line in lines)


def resources(cubin: bytes) -> dict[str, int]:
    """REG a thread, STACK and LOCAL bytes a thread, SHARED bytes a block, of machine code."""
    usage = _examined(cubin, "cuobjdump", "--dump-resource-usage")
    found = re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", usage)
    return {name: int(value) for name, value in found}


def _examined(cubin: bytes, tool: str, option: str) -> str:
    """What one of NVIDIA's tools, which Triton's wheel carries, says of machine code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [_tool(tool), option, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _blocks(registers: int, shared: int, warps: int) -> int:
    """Blocks of a kernel at once on a multiprocessor of sm_90."""
    of_a_warp = 32 * -(-registers // 8) * 8
    by_registers = 65536 // (of_a_warp * warps)
    by_memory = 228 * 1024 // (shared + 1024)
    return min(32, 64 // warps, by_registers, by_memory)


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def main() -> None:
    from tests.kernels.machine.launches import launches, of_case

    words = sys.argv[1:]
    chosen = [case for case in cases() if not words or any(word in case.name for word in words)]
    names = [each.name for each in fields(Report)]
    print(" ".join([f"{'':36}", *(f"{name:>12}" for name in names)]))
    for case in chosen:
        found = asdict(of_case(case, launches()).report)
        print(" ".join([f"{case.name:36}", *(f"{found[name]:12}" for name in names)]))


if __name__ == "__main__":
    main()
