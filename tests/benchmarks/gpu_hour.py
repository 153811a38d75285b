"""The first hour on a card: tests, kernels, rounds, operators a step and a short training.

    python tests/benchmarks/gpu_hour.py --out results [--minutes 25] [--parts tests,kernels]

Run it in the root of a checkout. Each part is a process with a time limit and a log of its own, so
a run that is cut off keeps what it has. Without a CUDA device, parts that need one are named as not
run, and the others run on the CPU.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

DONE, NOT_RUN = "done", "not run: no CUDA device"


@dataclass(frozen=True)
class Part:
    """One step of the hour.

    Attributes:
        name: also of its log.
        words: of the command; DEVICE and OUT are replaced.
        share: of the time.
        needs_card: not run on a CPU.
    """

    name: str
    words: tuple[str, ...]
    share: float
    needs_card: bool = False


_BENCHMARKS = "tests/benchmarks"
_PYTEST = ("-m", "pytest", "-n", "0", "-m", "gpu", "-rf", "tests")
_KERNELS = ("-m", "lightfed_kernels.bench", "--device", "cuda", "--gate", "--save", "OUT")
_ROUNDS = (f"{_BENCHMARKS}/rounds.py", "--device", "DEVICE", "--passes", "5")
_OPERATORS = (f"{_BENCHMARKS}/operators.py", "--device", "DEVICE", "--out", "OUT")
_QUICKSTART = (
    *("-m", "lightfed", "fit", "--config", "configs/quickstart.yaml"),
    *("--trainer.accelerator", "ACCELERATOR", "--trainer.default_root_dir", "OUT/runs"),
)
PARTS = (
    Part("tests", _PYTEST, 0.3, needs_card=True),
    Part("kernels", _KERNELS, 0.25, needs_card=True),
    Part("rounds", _ROUNDS, 0.25),
    Part("operators", _OPERATORS, 0.1),
    Part("training", _QUICKSTART, 0.1),
)


@dataclass(frozen=True)
class Outcome:
    """How a part ended: its state in words, and its seconds."""

    part: Part
    state: str
    seconds: float = 0.0

    def line(self) -> str:
        return f"{self.part.name:10} {self.seconds:7.1f} s  {self.state}"


def run(part: Part, out: Path, *, device: str, seconds: float) -> Outcome:
    """Run a part; its output goes to `<name>.log`.

    Args:
        part: to run.
        out: folder of all results.
        device: cpu or cuda.
        seconds: limit.
    """
    if part.needs_card and device == "cpu":
        return Outcome(part, NOT_RUN)
    given = {"DEVICE": device, "ACCELERATOR": "gpu" if device == "cuda" else "cpu"}
    words = [given.get(word, word.replace("OUT", str(out))) for word in part.words]
    start = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        log.write(" ".join(["python", *words]) + "\n")
        log.flush()
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its ranks end with it
        )
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Outcome(part, f"cut off after {seconds:.0f} s", time.monotonic() - start)
    state = DONE if status == 0 else f"exit status {status}"
    return Outcome(part, state, time.monotonic() - start)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts in order; print a line for each as it ends, and write them to summary.txt.

    Returns:
        0 if every part that ran ended well, else 1.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=25, help="limit of all parts together")
    parser.add_argument("--parts", default=",".join(part.name for part in PARTS))
    options = parser.parse_args(argv)
    named = options.parts.split(",")
    if unknown := set(named) - {part.name for part in PARTS}:
        parser.error(f"--parts: {', '.join(sorted(unknown))}; choose among the default's")
    if not Path(_BENCHMARKS).is_dir():
        parser.error("no tests/benchmarks in this folder; run it in the root of a checkout")
    chosen = [part for part in PARTS if part.name in named]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    title = torch.cuda.get_device_name() if device == "cuda" else "CPU; no CUDA device"
    print(title, flush=True)
    lines, left = [title], 60 * options.minutes
    outcomes = []
    for position, part in enumerate(chosen):
        # What a part does not use is there for the later ones.
        seconds = left * part.share / sum(later.share for later in chosen[position:])
        outcomes.append(run(part, out, device=device, seconds=seconds))
        left -= outcomes[-1].seconds
        lines.append(outcomes[-1].line())
        print(lines[-1], flush=True)
        (out / "summary.txt").write_text("\n".join(lines) + "\n")
    return 0 if all(outcome.state in (DONE, NOT_RUN) for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
