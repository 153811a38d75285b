"""Times every operation against the codes that it replaces, and checks all of them.

    python kernels/bench              everything; minutes, on a GPU or on a CPU core
    python kernels/bench --quick      one small model, in seconds
    python kernels/bench --gate       the required numbers; exit status 1 if missed
    python kernels/bench --check      the kernels in Triton's interpreter, no times

A row of the table is one code on one shape. The codes are `ours`, `official`, which computes tensor
by tensor as the papers' codes do, and what torch offers: `foreach`, `flat`, `compiled` and others.
`GB/s` is the bytes that have to be moved (inputs read once, outputs written once) over the time.
`official/` is the official time over this one. Every result is compared with a float64 reference
before it is timed: a wrong one prints FAIL, and the exit status is 1.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # kernels/, if the folder is run
from lightfed_kernels._rows import interpreter_fault

from bench import plot, report
from bench.case import COMPILED, OURS, Case
from bench.cases import OPERATIONS, build_cases
from bench.measure import (
    Measurement,
    Row,
    available_bytes,
    can_compile,
    check,
    read_environment,
)
from bench.models import MODELS

# Triton has to see these before the kernels are imported.
INTERPRETED = {"TRITON_INTERPRET": "1", "LIGHTFED_KERNELS": "triton"}

# Seconds after which `--gate` begins no other code than ours: a card may be there for minutes only.
GATE_SECONDS = 35.0

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python kernels/bench", description=description, epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add(
        "--case", nargs="+", choices=OPERATIONS, default=OPERATIONS, metavar="OPERATION",
        help=f"of {', '.join(OPERATIONS)}; all by default",
    )  # fmt: skip
    add("--model", nargs="+", choices=MODELS, help="resnet18 cnn by default")
    add("--clients", nargs="+", type=_positive, metavar="N", help="1 10 100, or on a CPU 1 10")
    add("--dtype", nargs="+", choices=DTYPES, help="of the rows; float32 bfloat16 by default")
    add("--device", choices=["cpu", "cuda"], help="cuda by default, if there is one")
    add("--save", type=_folder, metavar="FOLDER", help="write PROCESSOR.csv and .png there")
    mode = parser.add_mutually_exclusive_group()
    for name, text in (
        ("quick", "one small model, 3 calls, nothing compiled"),
        ("gate", "only what the requirements name; exit status 1 if one is missed"),
        ("check", "only check the kernels, on small rows in Triton's interpreter"),
    ):
        mode.add_argument(f"--{name}", action="store_true", help=text)
    return parser


def _positive(text: str) -> int:
    """Read a number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _folder(text: str) -> Path:
    """Read a folder to write to; a wrong one is refused before minutes of measuring."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is not installed")
    return Path(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Those of the command line, by default.

    Returns:
        The exit status.
    """
    usage = parser()
    options = usage.parse_args(arguments)
    if options.check:
        if options.save or options.device == "cuda":
            usage.error("--check: times nothing, on no device; leave out --save and --device")
        if find_spec("triton") is None:
            usage.error("--check: Triton is not installed; install it")
        fault = interpreter_fault()
        if fault:
            usage.error(f"--check: {fault}")
        os.environ.update(INTERPRETED)
        return _check(options)

    if options.device == "cuda" and not torch.cuda.is_available():
        usage.error("--device cuda: there is no CUDA device; leave it out, or use cpu")
    on_cuda = torch.cuda.is_available() and options.device != "cpu"
    if not on_cuda and os.environ.get("LIGHTFED_KERNELS") == "triton":
        usage.error("LIGHTFED_KERNELS=triton: on a CPU the torch paths are timed; unset it")
    return _time(options, torch.device("cuda" if on_cuda else "cpu"))


def _check(options: argparse.Namespace) -> int:
    """Check the kernels on small rows, with a line for each case; return 1 if one failed."""
    status = 0
    # Six clients have all five widths, one of them twice.
    for case in _cases(options, torch.device("cpu"), ["cnn-w2"], [6]):
        error, passed = check(case)
        if not passed:
            status = 1
        word = "ok" if passed else "FAIL"
        print(f"  {word:4} {case.title}: interpreted kernel, error {error:.1e}", flush=True)
    return status


def _time(options: argparse.Namespace, device: torch.device) -> int:
    """Time what is asked for, print the table, and save it; return the exit status."""
    if device.type == "cpu":
        print("On a CPU the torch paths are timed; --check interprets the kernels.")
        torch.set_num_threads(1)
    environment = read_environment(device)
    print(environment.line(), report.HEADER, sep="\n", flush=True)
    name = re.sub(r"\W+", "-", environment.processor).strip("-").lower()

    def keep(rows: list[Row]) -> None:
        """Write what there is: the run may be cut off."""
        if options.save:
            report.write_csv(options.save / f"{name}.csv", environment, rows)

    rows = _measure(options, device, environment.copy_gb_per_s, keep)
    if not rows:
        print("nothing was measured")
    lines, all_are_met = report.gates(rows, device.type, options.case)
    if not options.quick:
        print("required, of resnet18 in float32:", *lines, sep="\n")

    if options.save and rows:
        plot.save(options.save / f"{name}.png", environment, rows)
    all_are_right = all(row.passed for row in rows)
    if not all_are_right or (options.gate and not all_are_met):
        return 1
    return 0


def _measure(
    options: argparse.Namespace,
    device: torch.device,
    copy_gb_per_s: float,
    keep: Callable[[list[Row]], None],
) -> list[Row]:
    """Time what is asked for, keep it code by code, and print it case by case.

    Args:
        options: The options of the command.
        device: Where the rows are.
        copy_gb_per_s: The rate of a copy in this run.
        keep: Called with all rows whenever there is one more.
    """
    end = time.monotonic() + GATE_SECONDS
    measurements: list[Measurement] = []

    def rows() -> list[Row]:
        return [row for measurement in measurements for row in measurement.rows()]

    def take(measurement: Measurement, names: Sequence[str]) -> None:
        before = len(measurement.rows())
        for name in names:
            measurement.take(name)
            keep(rows())
        for row in measurement.rows()[before:]:
            print(report.line(row), flush=True)

    # On a card, the papers' codes take most of the time. What the requirements are about is ours.
    ours_first = options.gate and device.type == "cuda"
    calls = 3 if options.quick else 7
    for case in _chosen(options, device):
        measurement = Measurement(case, device, copy_gb_per_s=copy_gb_per_s, calls=calls)
        measurements.append(measurement)
        take(measurement, [OURS] if ours_first else list(case.codes))

    if ours_first:
        for measurement in measurements:
            others = [name for name in measurement.case.codes if name != OURS]
            if time.monotonic() < end:
                take(measurement, others)
            else:
                print(f"{measurement.case.title}: {', '.join(others)} left out, no time is left")
    return rows()


def _chosen(options: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """Yield the cases that are asked for and have room, with the codes that are."""
    if options.gate:
        models = ["resnet18"]
    elif options.quick:
        models = ["cnn-w8"]
    else:
        models = ["resnet18", "cnn"]
    clients = [1, 10, 100] if device.type == "cuda" else [1, 10]
    for case in _cases(options, device, models, clients):
        if options.gate:
            case = case.only(report.required(case, device.type))
            if not case.codes:
                continue

        if options.quick or not can_compile(device):
            case = case.only([name for name in case.codes if name != COMPILED])
        if device.type == "cuda":
            # What the case before has left in torch's allocator counts as taken.
            torch.cuda.empty_cache()
        if case.input_bytes > 0.8 * available_bytes(device):
            print(f"{case.title}: left out, needs {case.input_bytes / 2**30:.0f} GiB of memory")
            continue
        yield case


def _cases(
    options: argparse.Namespace, device: torch.device, models: list[str], clients: list[int]
) -> list[Case]:
    """Return the cases that are asked for.

    Args:
        options: The options of the command.
        device: Where the rows are.
        models: The models, unless the options name others.
        clients: The numbers of clients, likewise.
    """
    dtypes = options.dtype
    if dtypes is None:
        dtypes = ["float32"] if options.gate else ["float32", "bfloat16"]
    return list(
        build_cases(
            options.case,
            [MODELS[name] for name in options.model or models],
            options.clients or clients,
            [DTYPES[name] for name in dtypes],
            device,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
