"""What the launchers hand to Triton, without a GPU: every operation once, its launches caught.

    python -m tests.kernels.machine.launches

prints one JSON array: of each distinct launch its kernel, the types that Triton's own binder sees
in the arguments, its constants, and what the machine code for sm_90 is like. With `named` as an
argument, they are only those that a case names. So what is examined is what a card would run. Tests
run it in a process of its own: under TRITON_INTERPRET=1 there is nothing to compile.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from tests.kernels.machine.harness import Case, Report, cases, report

CLIENTS = 6  # all five widths, one of them twice
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Launch:
    """One way in which a kernel is launched.

    Attributes:
        kernel: `module:function` under lightfed_kernels.gpu.
        signature: argument -> its type as Triton writes it, constants left out.
        constants: argument -> value.
        warps: of a program.
        report: of the machine code; None before it is compiled.
    """

    kernel: str
    signature: dict[str, str]
    constants: dict[str, str]
    warps: int
    report: Report | None = None

    @property
    def title(self) -> str:
        words = [f"{name}={value}" for name, value in self.constants.items()]
        return " ".join([self.kernel, *words, *sorted({*self.signature.values()})])

    def is_of(self, case: Case) -> bool:
        """Whether a case says what this launch has to be like."""
        constants = {name: str(value) for name, value in case.constants.items()}
        rows = f"*{case.dtype}" in self.signature.values() or not case.dtype
        same_kernel = (self.kernel, self.warps) == (case.kernel, case.warps)
        return same_kernel and rows and constants == self.constants


def of_case(case: Case, launches: Iterable[Launch]) -> Launch:
    """The launch that a case is about: there is one."""
    found = [launch for launch in launches if launch.is_of(case)]
    assert len(found) == 1, f"{case.name}: {[launch.title for launch in found]}"
    return found[0]


@contextmanager
def caught(chosen: Sequence[Case] | None) -> Iterator[list[dict[str, Any]]]:
    """Kernels are bound and compiled for an H100, and not launched.

    Args:
        chosen: The cases whose launches are compiled; None for all launches.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    found: dict[str, dict[str, Any]] = {}

    def run(kernel: Any, *arguments: Any, grid: object, warmup: bool, **options: Any) -> None:
        options.setdefault("debug", False)
        options.setdefault("instrumentation_mode", "")
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, parsed = bind(*arguments, **options)
        parsed, signature, constants, attributes = kernel._pack_args(
            backend, options, bound, specialization, parsed
        )
        names = list(kernel.arg_names)
        warps = parsed.num_warps
        key = str((kernel.__name__, signature, constants, attributes, warps))
        if key in found:
            return
        module = kernel.__module__.removeprefix("lightfed_kernels.gpu.")
        launch = Launch(
            kernel=f"{module}:{kernel.__name__}",
            signature={name: kind for name, kind in signature.items() if kind != "constexpr"},
            constants={names[path[0]]: str(value) for path, value in constants.items()},
            warps=warps,
        )
        if chosen is not None and not any(launch.is_of(case) for case in chosen):
            return

        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=target, options=parsed.__dict__)
        launch = replace(
            launch,
            report=report(
                compiled.asm["cubin"], compiled.asm["ptx"], compiled.metadata.shared, warps
            ),
        )
        found[key] = asdict(launch)

    launches: list[dict[str, Any]] = []
    with patch.object(JITFunction, "run", run):
        yield launches
    launches.extend(found.values())


def calls() -> Iterator[Callable[[], object]]:
    """Every operation that has a kernel, on rows of the host."""
    sys.path.insert(0, "kernels")  # for kernels/bench, which is not installed
    from bench.case import OURS
    from bench.cases import OPERATIONS, build_cases
    from bench.models import MODELS

    cpu = torch.device("cpu")
    for case in build_cases(OPERATIONS, [MODELS["cnn-w2"]], [CLIENTS], DTYPES, cpu):
        inputs = case.build(0)
        yield case.codes[OURS](inputs)
        if case.operation == "slice_merge":
            yield from _parts_of_a_merge(inputs)
        elif case.operation == "grouped_mean":
            yield from _parts_of_a_mean(inputs)
        elif case.operation == "masked_mean":
            yield from _other_means(case.dtype)
        elif case.operation == "prune_regrow":
            yield from _other_selections(inputs)


def _parts_of_a_merge(inputs: Any) -> Iterator[Callable[[], object]]:
    from lightfed_kernels import Members, slice_finish_, slice_sum

    members = Members.build(inputs.table, inputs.level, labels=inputs.labels)
    partial = torch.zeros(inputs.table.target.size, dtype=torch.float64)
    yield lambda: slice_sum(inputs.clients, members)
    yield lambda: slice_finish_(inputs.row, partial, members)


def _parts_of_a_mean(inputs: Any) -> Iterator[Callable[[], object]]:
    from lightfed_kernels import Groups, grouped_mean_, grouped_spread_, grouped_sum

    clients, size = inputs.rows.shape
    groups = Groups.build([(list(range(clients)), 0, size)], [size] * clients)
    weights = [1.0 + client for client in range(clients)]
    sums = torch.zeros(size, dtype=torch.float64)
    yield lambda: grouped_sum(inputs.rows, groups, weights)
    yield lambda: grouped_spread_(inputs.rows, sums, groups, totals=[1.0])
    yield lambda: grouped_mean_(inputs.rows, groups, weights)


def _other_means(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """With and without masks, weights and receivers' masks; many receivers share tiles."""
    from lightfed_kernels import Neighbours, masked_mean

    senders, size = 8, 1024
    rows = torch.zeros(senders, size, dtype=dtype)
    words = torch.zeros(senders, size // 32, dtype=torch.int32)
    few = Neighbours.build([[0, 1, 2]], senders=senders)
    weighted = Neighbours.build([[0, 1, 2]], senders=senders, weights=[[1.0, 2.0, 3.0]])
    every = Neighbours.build([list(range(senders))] * 2 * senders, senders=senders)
    kept = words.repeat(2, 1)
    yield lambda: masked_mean(rows, few)
    yield lambda: masked_mean(rows, weighted)
    yield lambda: masked_mean(rows, few, masks=words)
    yield lambda: masked_mean(rows, few, masks=words, receivers=words[:1])
    yield lambda: masked_mean(rows, weighted, masks=words, receivers=words[:1])
    yield lambda: masked_mean(rows, weighted, masks=words, receivers=words[:1], over="neighbours")
    yield lambda: masked_mean(rows, every)
    yield lambda: masked_mean(rows, every, masks=words, receivers=kept)
    yield lambda: masked_mean(rows, every, masks=words, receivers=kept, over="neighbours")


def _other_selections(inputs: Any) -> Iterator[Callable[[], object]]:
    from lightfed_kernels import count_per_tensor, prune_regrow, select_random

    segments = inputs.segments
    counts = [1] * len(segments.bounds)
    yield lambda: count_per_tensor(inputs.words, segments)
    yield lambda: select_random(inputs.words, counts, segments, seed=1)
    yield lambda: prune_regrow(inputs.weights, inputs.words, counts, segments, regrow=1)


@cache
def launches(*, named: bool = False) -> list[Launch]:
    """All distinct launches, or those that cases name, bound and compiled by a child process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.machine.launches", *["named"] * named],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = []
    for fields in json.loads(done.stdout):
        found.append(Launch(**fields | {"report": Report(**fields["report"])}))
    return found


def main() -> None:
    import lightfed_kernels.gpu.masked_mean
    import lightfed_kernels.gpu.masks
    import lightfed_kernels.gpu.rows
    import lightfed_kernels.gpu.select
    import lightfed_kernels.gpu.slices
    import lightfed_kernels.gpu.steps  # noqa: F401 - compiled ones: Triton looks at it here
    from lightfed_kernels import _rows

    # From here on the operations take rows of the host for rows that kernels can read. Nothing is
    # interpreted, whether or not this version of Triton could.
    os.environ["TRITON_INTERPRET"] = "1"
    chosen = cases() if "named" in sys.argv[1:] else None
    with caught(chosen) as found, patch.object(_rows, "interpreter_fault", lambda: ""):
        for call in calls():
            # Inputs come from the torch paths: a kernel that is not launched computes nothing.
            with patch.dict(os.environ, LIGHTFED_KERNELS="triton"):
                call()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
