"""Times every operation against the codes that it replaces, and checks all of them.

    python -m lightfed_kernels.bench              everything; minutes, on a GPU or on a CPU core
    python -m lightfed_kernels.bench --quick      one small model, in seconds
    python -m lightfed_kernels.bench --gate       the required numbers; exit status 1 if missed
    python -m lightfed_kernels.bench --check      the kernels in Triton's interpreter

A row of the table is one code (`ours`; `official`, as the papers' codes compute it, tensor by
tensor; `foreach`, `flat`, `compiled`, ...: what torch offers) on one shape. `GB/s` is the bytes
that have to be moved (inputs read once, outputs written once) over the time; `official/` the
official time over this one; `/ours` this one over ours. Every result is held against a float64
reference before it is timed: a wrong one prints FAIL, and the exit status is 1.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from lightfed_kernels.bench import interpret, plot, report
from lightfed_kernels.bench.case import COMPILED, Case
from lightfed_kernels.bench.cases import OPERATIONS, build_cases
from lightfed_kernels.bench.environment import NO_CUDA, Clock, available_bytes, read_environment
from lightfed_kernels.bench.measure import Row, can_compile, measure
from lightfed_kernels.bench.models import MODELS, QUICK, RESNET18

# mode -> flags that would do nothing in it, help
MODES = {
    "quick": (("gate", "check", "model"), "one small model, 3 calls, nothing compiled"),
    "gate": (
        ("check", "model", "clients", "dtype"),
        "only what the requirements name; exit status 1 if one is missed",
    ),
    "check": (
        ("model", "clients", "device", "reps", "json", "csv", "plot"),
        "only check the kernels, on small rows in Triton's interpreter",
    ),
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def parser() -> argparse.ArgumentParser:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m lightfed_kernels.bench", description=description, epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add(
        "--case", nargs="+", choices=OPERATIONS, default=OPERATIONS, metavar="OPERATION",
        help=f"of {', '.join(OPERATIONS)}; all by default",
    )  # fmt: skip
    add("--model", nargs="+", choices=[*MODELS], help="both by default")
    add(
        "--clients",
        nargs="+",
        type=_positive,
        metavar="N",
        help="1 10 100, or on a CPU 1 10",
    )
    add("--dtype", nargs="+", choices=DTYPES, help="of the rows; float32 bfloat16 by default")
    add("--device", choices=["cpu", "cuda"], help="cuda by default, if there is one")
    add("--reps", type=_positive, metavar="N", help="timed calls: 30 by default, 7 on a CPU")
    for name, (_, text) in MODES.items():
        add(f"--{name}", action="store_true", help=text)
    add("--json", type=_writable, metavar="FILE", help="write {env, rows}")
    add("--csv", type=_writable, metavar="FILE", help="write a line a row, env repeated")
    add("--plot", type=_plottable, metavar="FILE.png", help="write a picture (needs matplotlib)")
    return parser  # fmt: skip


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _writable(text: str) -> Path:
    """Refused before minutes of measuring, not after."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is no folder")
    return path


def _plottable(text: str) -> Path:
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is not installed")
    path = _writable(text)
    if path.suffix != ".png":
        raise argparse.ArgumentTypeError(f"{path.name} does not end in .png")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    usage = parser()
    options = usage.parse_args(arguments)
    for mode, (useless, _) in MODES.items():
        for name in useless:
            if getattr(options, mode) and getattr(options, name):
                usage.error(f"--{name} has no effect with --{mode}; leave one of them out")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: there is no CUDA device; leave it out, or use cpu", file=sys.stderr)
        return 2
    if options.check:
        return _check(options)
    cuda = torch.cuda.is_available() and options.device != "cpu"
    if not cuda and os.environ.get("LIGHTFED_KERNELS") == "triton":
        print(
            "LIGHTFED_KERNELS=triton: on a CPU the torch paths are timed; unset it", file=sys.stderr
        )
        return 2
    if not torch.cuda.is_available():
        print(NO_CUDA)
    if not cuda:
        torch.set_num_threads(1)
    clock = Clock(torch.device("cuda" if cuda else "cpu"))
    environment = read_environment(clock)
    print(environment.line(), flush=True)
    failed = False if cuda else _check(options, implied=True) != 0
    rows = _measure(options, clock, environment.copy_gb_per_s)
    if not rows:
        print("nothing was measured")
    failed |= not all(row.passed for row in rows)
    lines, met = report.gates(rows, clock.device.type, options.case)
    if options.gate or not options.quick:
        print("required, of resnet18 in float32:", *lines, sep="\n")
    if options.json:
        report.write_json(options.json, environment, rows)
    if options.csv and rows:
        report.write_csv(options.csv, environment, rows)
    if options.plot and rows:
        plot.save(options.plot, environment, rows)
    return int(failed or (options.gate and not met))


def _check(options: argparse.Namespace, *, implied: bool = False) -> int:
    """The interpreter's verdict; where it cannot run, a line that says so."""
    reason = interpret.why_not()
    if reason is not None:
        print(f"kernels not checked: {reason}", file=sys.stdout if implied else sys.stderr)
        return 0 if implied else 2
    return interpret.check_in_child(options.case, options.dtype or ["float32", "bfloat16"])


def _measure(options: argparse.Namespace, clock: Clock, copy_gb_per_s: float) -> list[Row]:
    cuda = clock.device.type == "cuda"
    repetitions = options.reps or (3 if options.quick else 30 if cuda else 7)
    rows: list[Row] = []
    print(report.header())
    for case in _chosen(options, clock.device):
        if case.input_bytes > 0.8 * available_bytes(clock.device):
            print(f"{case.title}: left out, needs {case.input_bytes / 2**30:.0f} GiB of memory")
            continue
        measured = measure(case, clock, copy_gb_per_s=copy_gb_per_s, repetitions=repetitions)
        for row in measured:
            print(report.line(row), flush=True)
        rows.extend(measured)
    return rows


def _chosen(options: argparse.Namespace, device: torch.device) -> list[Case]:
    cuda = device.type == "cuda"
    clients = options.clients or ([1, 10, 100] if cuda else [1, 10])
    dtypes = [DTYPES[name] for name in options.dtype or ["float32", "bfloat16"]]
    models = [QUICK] if options.quick else [MODELS[name] for name in options.model or MODELS]
    if options.gate:
        clients, dtypes, models = [1, 10, 100] if cuda else [1, 10], [torch.float32], [RESNET18]
    cases = list(build_cases(options.case, models, clients, dtypes, device))
    if options.gate:
        cases = [c.only(codes) for c in cases if (codes := report.required(c, device.type))]
    if options.quick or not can_compile(device):
        cases = [c.only([name for name in c.contenders if name != COMPILED]) for c in cases]
    return cases


if __name__ == "__main__":
    sys.exit(main())
