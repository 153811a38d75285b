"""What rounds of this checkout cost, beside an older checkout, a plain loop and pfl.

    git worktree add ../before 6c60fb45
    python benchmarks/beside.py ../before [--rows W1,W5] [--passes 7] [--json FILE]
    python benchmarks/beside.py ../before --profile W1,W5,lora
    python benchmarks/beside.py ../before --commands

Each side is a process of its own with one torch thread; the sides of a row take turns. CPU time of
a round. A ratio is taken within a pass, so that a busy machine slows both; medians and range of the
passes are printed. pfl is left out where it is not installed.

`--profile` runs both checkouts under cProfile and lists the ten functions of lightfed and its
kernels that take most time themselves; cProfile overstates Python 1.4 to 2 times. `--commands`
measures commands that train little or nothing, as CPU time of the process and its children.
"""

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import machine, spread

HERE = str(Path(__file__).resolve().parents[1])
_SCRIPT = str(Path(__file__).with_name("scenarios.py"))
_WARM_UP = 2


@dataclass(frozen=True)
class Row:
    """What is measured together.

    Attributes:
        title: what it is.
        sides: scenarios by their names. Those whose name begins with `before` run in the older
            checkout.
        rounds: rounds of a measurement.
        over: pairs of sides whose ratio is printed.
        target: the largest ratio of the first pair that is good enough.
        less_one: whether the ratios are those of what a side takes beyond the other.
    """

    title: str
    sides: dict[str, str]
    rounds: int
    over: tuple[tuple[str, str], ...]
    target: float
    less_one: bool = False


def beside_a_loop(name: str, title: str, rounds: int, target: float, *peers: str) -> Row:
    """A workload of rounds.py: both checkouts, the loop, and peers."""
    sides = {"now": f"workload:{name}", "before": f"workload:{name}", "loop": f"loop:{name}"}
    sides |= {peer: f"{peer}:{name}" for peer in peers}
    over = [("now", "loop"), ("now", "before"), ("before", "loop")]
    return Row(title, sides, rounds, (*over, *[(peer, "loop") for peer in peers]), target)


def beside_before(scenario: str, title: str, rounds: int, target: float) -> Row:
    """The same scenario in both checkouts."""
    sides = {"now": scenario, "before": scenario}
    return Row(title, sides, rounds, (("now", "before"),), target)


def beside_alone(network: str, clients: int, alpha: str, rounds: int, target: float) -> Row:
    """Packs over clients that train alone, in both checkouts."""
    scenario = f"unequal:{network}:{clients}:{alpha}"
    sides = {
        "now": f"{scenario}:auto",
        "now off": f"{scenario}:off",
        "before": f"{scenario}:auto",
        "before off": f"{scenario}:off",
    }
    title = f"{clients} clients, {network}, {alpha}: `auto` over `off`"
    over = (("now", "now off"), ("before", "before off"), ("now off", "before off"))
    return Row(title, sides, rounds, over, target)


ROWS: dict[str, Row] = {
    "W1": beside_a_loop("W1", "W1: MLP 784-200-200-10, 10 of 100", 20, 0.95, "pfl"),
    "W2": beside_a_loop("W2", "W2: CNN on 3x32x32, 10 of 100", 2, 0.61, "pfl"),
    "W3": beside_a_loop("W3", "W3: HeteroFL, five widths, 10 of 100", 2, 0.84),
    "W4": beside_a_loop("W4", "W4: DisPFL, LeNet, 10 clients", 1, 0.73),
    "W5": beside_a_loop("W5", "W5: MLP 32-64-10, 100 of 10,000", 10, 0.20, "pfl"),
    "W5off": beside_before("workload:W5:sequential", "W5, clients alone", 3, 0.75),
    **{
        f"rows:{method}": beside_before(
            f"rows:{method}:1000", f"{method}, clients that keep rows, 100 of 1,000", 4, 0.15
        )
        for method in ("LGFedAvg", "Ditto", "FedPer", "SCAFFOLD", "MOON")
    },
    "rows:FedBCD": beside_before(
        "rows:FedBCD:1000", "FedBCD, five of ten clouds with 100 devices each", 4, 0.15
    ),
    "rows:100000": beside_before("rows:LGFedAvg:100000", "LGFedAvg, 100 of 100,000", 4, 0.15),
    "batchnorm:2": beside_alone("batchnorm", 20, "2", 3, 0.5),
    "batchnorm:.3": beside_alone("batchnorm", 20, ".3", 3, 0.5),
    "cnn:.3": beside_alone("cnn", 20, ".3", 3, 0.51),
    "mlp:.3": beside_alone("mlp", 20, ".3", 8, 0.5),
    "lora": beside_before("lora", "LoRA: 30 clients of ranks 16, 8, 4; RankMean", 3, 0.6),
    "lora:off": beside_before("lora:off", "LoRA, clients alone", 3, 1.0),
    "merge": Row(
        "merge of two rows of 10M parameters, in copies of a row",
        {"now": "merge:3154", "before": "merge:3154", "copy": "copies:3154"},
        5,
        (("now", "copy"), ("before", "copy")),
        6,
    ),
    "start": beside_before("start:100000", "start of 100,000 clients, and a round", 1, 0.21),
    "evaluation": Row(
        "HeteroFL's evaluation with static batch normalization, in rounds of ten clients",
        {
            "now": "heterofl:tested",
            "now, 2,000 samples": "heterofl:tested:2000",
            "now, untested": "heterofl:untested",
            "before": "heterofl:tested",
            "before, untested": "heterofl:untested",
        },
        1,
        (
            ("now", "now, untested"),
            ("now, 2,000 samples", "now, untested"),
            ("before", "before, untested"),
        ),
        2,
        less_one=True,
    ),
}


class Side:
    """A process that trains rounds on command; `scenarios.py` says how it is asked.

    Args:
        scenario: what it trains.
        checkout: whose lightfed trains it.
    """

    def __init__(self, scenario: str, checkout: str) -> None:
        benchmarks = Path(checkout, "benchmarks")
        if not benchmarks.is_dir():
            benchmarks = Path(checkout, "tests", "benchmarks")  # where older checkouts have them
        self._process = subprocess.Popen(
            [sys.executable, "-P", _SCRIPT, checkout, scenario],
            env=environment_of(checkout, str(benchmarks)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Wait until it can train.

        Raises:
            RuntimeError: it has ended, with what it said last.
        """
        self._answer()

    def ask(self, question: str) -> str:
        """Ask a question, and return the answer.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return self._answer()

    def seconds(self, rounds: int) -> float:
        """CPU seconds of one of so many rounds."""
        return float(self.ask(str(rounds))) / rounds

    def close(self) -> None:
        """End the process."""
        self._process.communicate("stop\n" if self._process.poll() is None else None)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer:
            assert self._process.stderr is not None
            raise RuntimeError(self._process.stderr.read()[-2000:])
        return answer


def environment_of(checkout: str, *more: str) -> dict[str, str]:
    """Return an environment in which Python imports a checkout, by one torch thread."""
    paths = os.pathsep.join((checkout, f"{checkout}/kernels", *more))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def checkout_of(side: str, before: str) -> str:
    """Return the checkout that a side of a row runs in."""
    return before if side.startswith("before") else HERE


def measure(row: Row, before: str, passes: int) -> dict[str, Any]:
    """Let the sides of a row take turns; print and return what they took."""
    scenarios = dict(row.sides)
    if importlib.util.find_spec("pfl") is None:
        scenarios.pop("pfl", None)
    sides = {name: Side(text, checkout_of(name, before)) for name, text in scenarios.items()}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for side in sides.values():
            side.wait()
        for side in sides.values():
            side.seconds(_WARM_UP)
        order = list(sides)
        for number in range(passes):
            turn = number % len(order)
            for name in order[turn:] + order[:turn]:
                taken[name].append(sides[name].seconds(row.rounds))
        peaks = {name: float(side.ask("peak")) for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.close()

    print(f"\n{row.title}")
    for name, seconds in taken.items():
        times = spread([1e3 * value for value in seconds], digits=2)
        print(f"    {name:20} {times} ms a round, peak {peaks[name]:.0f} MB")
    ratios: dict[str, list[float]] = {}
    for first, second in row.over:
        if first not in taken:
            continue
        found = [a / b for a, b in zip(taken[first], taken[second], strict=True)]
        if row.less_one:
            found = [ratio - 1 for ratio in found]
        name = f"{first} / {second}"
        goal = "" if ratios else f"  target {row.target:g}"
        ratios[name] = found
        print(f"    {name:38} {spread(found, digits=3)}{goal}", flush=True)
    return {"title": row.title, "seconds": taken, "ratios": ratios, "peak_MB": peaks}


def profile(name: str, before: str) -> None:
    """Print the ten most expensive own functions of a row's rounds, in both checkouts."""
    row = ROWS[name]
    for label, checkout in (("before", before), ("now", HERE)):
        side = Side(row.sides["now"], checkout)
        side.wait()
        side.seconds(5)
        rounds = 3 * row.rounds
        functions = json.loads(side.ask(f"profile {rounds}"))
        side.close()
        (_, _, total), *own = functions
        milliseconds = 1e3 * total / rounds
        share = sum(seconds for _, _, seconds in own) / total
        print(f"\n{row.title}, {label}: {milliseconds:.1f} ms a round, {share:.1%} of it own")
        for function, calls, seconds in sorted(own, key=lambda each: -each[2])[:10]:
            print(f"    {seconds / total:6.2%} {calls / rounds:8.1f} calls a round  {function}")


def cpu_of(words: Sequence[str], checkout: str, folder: Path) -> float:
    """Return the CPU seconds of a command of Python in a checkout."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment_of(checkout),
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def commands(before: str, passes: int) -> dict[str, dict[str, list[float]]]:
    """Measure commands in both checkouts, in turns."""
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folders = {label: Path(name, label) for label in ("now", "before")}
        checkouts = {"now": HERE, "before": before}
        for label, folder in folders.items():
            folder.mkdir()
            config = folder / "digits.yaml"
            config.write_text(_CONFIG)
            (folder / "other.yaml").write_text(_CONFIG.replace("FedAvg", "SCAFFOLD"))
            (folder / "two.sweep").write_text(_SWEEP)
            # What is measured below has nothing to do after this.
            for words in (["sweep", "two.sweep"], ["compare", "digits.yaml", "other.yaml"]):
                cpu_of(["-m", "lightfed", *words], checkouts[label], folder)
        for command, words in _COMMANDS.items():
            taken: dict[str, list[float]] = {label: [] for label in checkouts}
            for number in range(passes):
                order = list(checkouts) if number % 2 else list(checkouts)[::-1]
                for label in order:
                    # A run folder of its own, where the command trains.
                    own = [word.replace("NUMBER", str(number)) for word in words]
                    taken[label].append(cpu_of(own, checkouts[label], folders[label]))
            found[command] = taken
            both = "  ".join(f"{label} {spread(t, digits=2)}" for label, t in taken.items())
            print(f"{command:44} {both}", flush=True)
    return found


_CONFIG = """\
trainer: {max_epochs: 2}
model:
  algorithm: FedAvg
  clients: [{count: 10, model: lightfed.MLP}]
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
data: {dataset: Digits, partition: Iid}
"""
_SWEEP = """\
fit --config digits.yaml --model.seed 0
fit --config digits.yaml --model.seed 1
"""
_IMPORTS = "import torch, lightning.pytorch"
_COMMANDS = {
    "import torch, lightning": ["-c", _IMPORTS],
    "fit of one round": [
        "-m", "lightfed", "fit", "--config", "digits.yaml", "--trainer.max_epochs", "1",
        "--trainer.name", "oneNUMBER",
    ],
    "fit of one round, no page": [
        "-m", "lightfed", "fit", "--config", "digits.yaml", "--trainer.max_epochs", "1",
        "--trainer.name", "bareNUMBER", "--trainer.enable_page", "false",
    ],
    "sweep with nothing to do": ["-m", "lightfed", "sweep", "two.sweep"],
    "compare with nothing to do": ["-m", "lightfed", "compare", "digits.yaml", "other.yaml"],
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="folder of the older checkout")
    parser.add_argument("--rows", type=rows, default=list(ROWS), help="all by default")
    parser.add_argument("--passes", type=int, default=7, help="measurements of every side")
    parser.add_argument("--profile", type=rows, help="rows whose functions are listed instead")
    parser.add_argument("--commands", action="store_true", help="measure commands instead")
    parser.add_argument("--json", type=Path, help="a file for all that was measured")
    options = parser.parse_args(argv)
    before = str(Path(options.before).resolve())

    print(machine())
    found: dict[str, Any] = {}
    if options.profile:
        for name in options.profile:
            profile(name, before)
    elif options.commands:
        found = commands(before, options.passes)
    else:
        for name in options.rows:
            found[name] = measure(ROWS[name], before, options.passes)
            if options.json is not None:
                options.json.write_text(json.dumps(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found))
    print(f"\n{machine()}")
    return 0


def rows(text: str) -> list[str]:
    """The rows of a list of names, such as `W1,lora`.

    Raises:
        argparse.ArgumentTypeError: there is no such row.
    """
    names = text.split(",")
    for name in names:
        if name not in ROWS:
            raise argparse.ArgumentTypeError(f"no row {name!r}; choose of {', '.join(ROWS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
