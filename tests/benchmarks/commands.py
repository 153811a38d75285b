"""What whole commands cost, from the start of the process to its end.

    python tests/benchmarks/commands.py [--only help,start,quickstart] [--passes 3] [--rounds 24]

CPU seconds of the process tree, one torch thread; commands take turns, and the first pass, which
writes byte code, does not count. `start` ends with the first session of a small run, over the
imports of torch and lightning; `help` is over them too; `quickstart` is over the same run with
`model.side_by_side: off`.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from figures import Figure, machine, spread
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

FOLDER = Path(__file__).parent
QUICKSTART = FOLDER.parents[1] / "configs" / "quickstart.yaml"
START_GOAL = 1.3
IMPORTS = "import os, torch, lightning; os._exit(0)"
START = """\
trainer: {max_epochs: 1, accelerator: cpu, limit_val_batches: 0, callbacks: commands.Leave}
model:
  algorithm: FedAvg
  clients: [{count: 10, model: lightfed.models.MLP}]
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.05}}
data: {dataset: Digits, partition: Iid}
"""


class Leave(Callback):
    """Ends the process, without its tidying up, when the first session is over."""

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        os._exit(0)


def commands(name: str, folder: str, rounds: int) -> tuple[list[str], list[str]]:
    """The arguments of Python for the baseline and for what is measured."""
    fit = ["-m", "lightfed", "fit", "--trainer.default_root_dir", folder, "--config"]
    if name == "quickstart":
        ours = [*fit, str(QUICKSTART), "--trainer.max_epochs", str(rounds)]
        return [*ours, "--model.side_by_side", "off"], ours
    config = Path(folder, "start.yaml")
    config.write_text(START)
    ours = ["-m", "lightfed", "--help"] if name == "help" else [*fit, str(config)]
    return ["-c", IMPORTS], ours


def compare(name: str, *, passes: int, rounds: int) -> bool:
    """Let a command and its baseline take turns; whether the goal is met."""
    baseline: list[float] = []
    measured: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        pair = commands(name, folder, rounds)
        for number in range(passes + 1):
            for arguments, taken in zip(pair, (baseline, measured), strict=True):
                seconds = cpu_of(arguments, folder)
                if number:
                    taken.append(seconds)
    figure = Figure(baseline, measured, START_GOAL if name == "start" else None)
    old, new = spread(baseline, digits=2), spread(measured, digits=2)
    print(f"{name:10} {old:19} -> {new:19} CPU s, ratio {figure.text()}", flush=True)
    return figure.met


def cpu_of(arguments: list[str], folder: str) -> float:
    """CPU seconds of a Python process and its children.

    Raises:
        RuntimeError: it failed.
    """
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{arguments} failed:\n{done.stderr.decode()}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = ["help", "start", "quickstart"]
    parser.add_argument("--only", type=lambda text: text.split(","), default=every)
    parser.add_argument("--passes", type=int, default=3, help="that count")
    parser.add_argument("--rounds", type=int, default=24, help="of the quickstart")
    options = parser.parse_args(argv)
    if not set(options.only) <= set(every) or options.passes < 1:
        parser.error(f"--only: some of {','.join(every)}; --passes: at least 1")
    print(machine())
    met = [compare(name, passes=options.passes, rounds=options.rounds) for name in options.only]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
