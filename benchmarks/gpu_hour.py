"""The first minutes on a card: kernels, published rounds, peers, NCCL, tests, in order of value.

    python benchmarks/gpu_hour.py --out results [--minutes 25] [--parts tests,..] [--quick]

Run it in the root of a checkout, installed or not. Each part is a process with a time limit, a log
and a folder of its own, so a run that is cut off keeps what it has; the same command again skips
the parts that are done. The end of a log is printed too if its part does not end well. Without a
CUDA device, parts that need one are named as not run, and the others run on the CPU. `--quick`
shows in minutes that they run. At the end stands what was aimed at, and what was reached.

`cohort` compares with a peer, pfl, which a machine may lack. Who names `published` gets it as well,
last, if pfl is installed and time is left.
"""

import argparse
import csv
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # as a test imports it
from aims import Aim, read_aims

DONE, NOT_RUN = "done", "not run: no CUDA device"
NO_TIME = "not run: no time is left"
_GRACE = 15  # seconds for a part that is cut off to say what it has found
_SHOWN = 4_000  # characters of the log of a part that did not end well
_LEAST = 20.0  # seconds in which a part that follows another can still find something


@dataclass(frozen=True)
class Part:
    """One step of the hour.

    Attributes:
        name: also of its log and folder.
        words: of the command; DEVICE, ACCELERATOR and OUT, its folder, are replaced.
        share: of the time.
        needs_card: not run on a CPU.
        quick: words after those, to take less time.
        follows: the part whose name asks for this one as well. It then comes after all that are
            named, in the time that they leave.
        package: without which it does not follow.
    """

    name: str
    words: tuple[str, ...]
    share: float
    needs_card: bool = False
    quick: tuple[str, ...] = ()
    follows: str = ""
    package: str = ""

    def runs_on(self, device: str) -> bool:
        """Whether it runs on this device, cpu or cuda."""
        return device != "cpu" or not self.needs_card


# The files with tests for a card: to read all takes minutes, and packages that those do without.
TESTS = (
    "tests/core/distributed/test_rates.py",
    "tests/promises/ranks/test_strategy.py", "tests/core/data/test_resident.py", "tests/kernels",
    "tests/promises/test_gpu.py",
)  # fmt: skip
# In processes that share the card: most of the time the host compiles kernels. Each test is named
# as it ends, and a file is no unit, as one of them takes most of the time.
_PYTEST = (
    *("-m", "pytest", "-p", "no:cacheprovider", "-n", "12", "--dist", "worksteal"),
    *("-vv", "-m", "gpu", "-rf", "--tb", "short", *TESTS),  # -q is the default
)
_BENCH = ("kernels/bench", "--device", "cuda")
_KERNELS = (*_BENCH, "--save", "OUT")
# Every kernel once, held against float64: what fails here need not be timed.
_FIRST = (*_BENCH, "--quick", "--clients", "10", "--dtype", "float32")
_ROUNDS = (
    *("benchmarks/rounds.py", "--device", "DEVICE", "--passes", "3", "--limit", "12"),
    *("--workloads", "W5,W3,W1,W2,W4"),  # each is printed as it ends
)
_ON_DEVICE = ("--device", "DEVICE", "--out", "OUT")
_MODELS = ("benchmarks/models.py", *_ON_DEVICE)
_PUBLISHED = ("benchmarks/published.py", *_ON_DEVICE)
_COHORT = ("benchmarks/cohort.py", *_ON_DEVICE)
_FORMATS = ("benchmarks/formats.py", "--device", "DEVICE")
_NCCL = ("benchmarks/nccl.py", *_ON_DEVICE)
_OPERATORS = ("benchmarks/operators.py", *_ON_DEVICE, "--workloads", "cohort,hundred,W5")
_CURVE = ("benchmarks/curve.py", *_ON_DEVICE)
_QUICKSTART = (
    *("-m", "lightfed", "fit", "--config", "configs/quickstart.yaml"),
    *("--trainer.accelerator", "ACCELERATOR", "--trainer.default_root_dir", "OUT/runs"),
)
_TINY = ("--tiny", "--passes", "1")
_LITTLE = (*_TINY, "--workloads", "W6")
# In the order of what they are worth, as a card may be lent for minutes only. Shares are about the
# seconds that a part takes on an H100.
PARTS = (
    Part("first", _FIRST, 30, needs_card=True),
    Part("kernels", (*_KERNELS, "--gate"), 60, needs_card=True),
    Part("cohort", _COHORT, 60, quick=_TINY, follows="published", package="pfl"),
    Part("published", _PUBLISHED, 110, quick=(*_TINY, "--case", "hundred")),
    Part("nccl", _NCCL, 40, needs_card=True, quick=("--cases", "heterofl")),
    Part("operators", _OPERATORS, 40, quick=("--workloads", "W5")),
    Part("tests", _PYTEST, 110, needs_card=True),
    Part("rounds", _ROUNDS, 110, quick=("--workloads", "W5", "--passes", "1")),
    Part("models", _MODELS, 150, needs_card=True, quick=_LITTLE),
    Part("curve", _CURVE, 30, quick=("--tiny", "--rounds", "2")),
    Part("training", _QUICKSTART, 20, quick=("--trainer.max_epochs", "2")),
    Part("formats", _FORMATS, 20, needs_card=True, quick=_LITTLE),
    Part("operations", (*_KERNELS, "--dtype", "float32"), 60, needs_card=True),
)
# Of the copy bandwidth, by operation and shape; see the benchmark of the kernels.
_KERNEL_AIMS = (
    ("slice_merge", "10 clients"),
    ("slice_merge", "100 clients"),
    ("masked_mean", "1 receiver of 11"),
    ("masked_mean", "13 receivers of 100"),
    ("masked_mean", "100 receivers of 100"),
)


@dataclass(frozen=True)
class Outcome:
    """How a part ended: its state in words, and its seconds."""

    part: Part
    state: str
    seconds: float = 0.0

    def line(self) -> str:
        return f"{self.part.name:10} {self.seconds:7.1f} s  {self.state}"


def followers(named: Sequence[str]) -> list[Part]:
    """The parts that are not named, and follow one that is."""
    return [part for part in PARTS if part.follows in named and part.name not in named]


def run_follower(part: Part, out: Path, *, device: str, seconds: float, quick: bool) -> Outcome:
    """As `run`; a line says so if its package is missing, or no time is left."""
    if part.package and importlib.util.find_spec(part.package) is None:
        return Outcome(part, f"not run: {part.package} is not installed")
    if seconds < _LEAST:
        return Outcome(part, NO_TIME)
    return run(part, out, device=device, seconds=seconds, quick=quick)


def run(part: Part, out: Path, *, device: str, seconds: float, quick: bool) -> Outcome:
    """Run a part; its output goes to `<name>.log`, its files to the folder `<name>`.

    Args:
        part: to run.
        out: folder of all results.
        device: cpu or cuda.
        seconds: limit.
        quick: take less time.
    """
    if not part.runs_on(device):
        return Outcome(part, NOT_RUN)
    folder = out / part.name
    folder.mkdir(exist_ok=True)
    given = {"DEVICE": device, "ACCELERATOR": "gpu" if device == "cuda" else "cpu"}
    wanted = [*part.words, *(part.quick if quick else ())]
    words = [given.get(word, word.replace("OUT", str(folder))) for word in wanted]
    places = [str(Path.cwd()), str(Path.cwd() / "kernels"), os.environ.get("PYTHONPATH", "")]
    start = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        log.write(" ".join(["python", *words]) + "\n")
        log.flush()
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))},
            start_new_session=True,  # so that its ranks end with it
            # A job in the background ignores it, and so would the part.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            return Outcome(part, f"cut off after {seconds:.0f} s", time.monotonic() - start)
        finally:
            with suppress(ProcessLookupError):  # also if this process is interrupted
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    state = DONE if status == 0 else f"exit status {status}"
    return Outcome(part, state, time.monotonic() - start)


def _aims(out: Path) -> list[str]:
    """What was aimed at and reached, a line each, of all parts that have said so."""
    aims: list[Aim] = []
    for operation, shape in _KERNEL_AIMS:
        share = _share_of_copy(out / "kernels", operation, shape)
        aims.append(Aim(f"{operation}, {shape}: of a copy", share, 90, 70, "%"))
    for name in ("cohort", "published"):
        aims += read_aims(out / name)
    return [aim.line() for aim in aims]


def _share_of_copy(folder: Path, operation: str, shape: str) -> float | None:
    """Percent of the copy bandwidth that our kernel reached; None if it was not measured."""
    for path in folder.glob("*.csv"):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if (row["operation"], row["shape"]) != (operation, shape):
                    continue
                if (row["contender"], row["dtype"]) == ("ours", "float32"):
                    return float(row["copy_percent"])
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts in order; print a line for each as it ends, and write them to summary.txt.

    Returns:
        0 if every part that ran ended well, else 1.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=25, help="limit of all parts together")
    parser.add_argument("--quick", action="store_true", help="a little of each part, in minutes")
    parser.add_argument("--parts", default=",".join(part.name for part in PARTS))
    options = parser.parse_args(argv)
    named = options.parts.split(",")
    if unknown := set(named) - {part.name for part in PARTS}:
        parser.error(f"--parts: {', '.join(sorted(unknown))}; choose among the default's")
    if not Path("benchmarks").is_dir():
        parser.error("no folder benchmarks here; run it in the root of a checkout")
    by_name = {part.name: part for part in PARTS}
    chosen = [by_name[name] for name in named]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    title = torch.cuda.get_device_name() if device == "cuda" else "CPU; no CUDA device"
    print(title, flush=True)
    lines = [title]
    left = 60 * options.minutes
    well = True
    for position, part in enumerate([*chosen, *followers(named)]):
        if (out / f"{part.name}.done").exists():
            lines.append(f"{part.name:10} done by an earlier command")
            print(lines[-1], flush=True)
            continue
        if position < len(chosen):
            # What a part does not use is there for the later ones.
            ahead = [later.share for later in chosen[position:] if later.runs_on(device)]
            seconds = left * part.share / (sum(ahead) or 1)
            found = run(part, out, device=device, seconds=seconds, quick=options.quick)
        else:
            found = run_follower(part, out, device=device, seconds=left, quick=options.quick)
        left -= found.seconds
        if found.state == DONE:
            (out / f"{part.name}.done").touch()
        lines.append(found.line())
        print(lines[-1], flush=True)
        if found.state != DONE and not found.state.startswith("not run"):
            well = False
            print((out / f"{part.name}.log").read_text(errors="replace")[-_SHOWN:], flush=True)
        (out / "summary.txt").write_text("\n".join([*lines, "", *_aims(out)]) + "\n")
    for line in _aims(out):
        print(line, flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
