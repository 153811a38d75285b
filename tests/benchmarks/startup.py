"""From the start of the process to the end of the first session, against the bare imports."""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import Figure

LIMIT = 1.3
# Left like the runs below, without tidying up.
IMPORTS = "import os, torch, lightning; os._exit(0)"
FOLDER = Path(__file__).parent
CONFIG = """\
trainer:
  max_epochs: 1
  accelerator: cpu
  enable_checkpointing: false
  limit_val_batches: 0
  callbacks:
    - class_path: first_session.Leave
model:
  algorithm: {class_path: lightfed.algorithms.fedavg.FedAvg}
  clients:
    - {count: 10, model: {class_path: lightfed.models.networks.mlp.MLP}}
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.05}}
data:
  dataset: {class_path: lightfed.data.datasets.vision.Digits}
  partition: {class_path: lightfed.data.Iid}
"""


def startup(*, passes: int) -> list[Figure]:
    """Compare the time of the imports, of a script and of the command line; byte code is warm."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "startup.yaml")
        config.write_text(CONFIG)
        commands = {
            "imports": ["-c", IMPORTS],
            "script": [str(FOLDER / "first_session.py"), folder],
            "lightfed fit": ["-m", "lightfed", "fit", "--config", str(config)],
        }
        commands["lightfed fit"] += ["--trainer.default_root_dir", folder]
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for number in range(passes + 1):
            for name, arguments in commands.items():
                figures = _run(arguments, folder)
                if number:  # the first one writes byte code
                    taken[name].append(figures)
    print("start-up to the end of the first session, over that of torch and lightning")
    return [
        _figure(name, unit, position, taken)
        for name in ("script", "lightfed fit")
        for position, unit in enumerate(("CPU", "wall"))
    ]


def _figure(
    name: str, unit: str, position: int, taken: dict[str, list[tuple[float, float]]]
) -> Figure:
    baseline = [figures[position] for figures in taken["imports"]]
    measured = [figures[position] for figures in taken[name]]
    # Wall time on a shared machine decides nothing.
    limit = LIMIT if unit == "CPU" else None
    title = f"start-up by {name}, {unit} time"
    figure = Figure.of(title, baseline=baseline, measured=measured, target=limit)
    old, new = statistics.median(baseline), statistics.median(measured)
    print(f"    {name:12} {unit:4} {old:.2f} -> {new:.2f} s: {figure.text()}", flush=True)
    return figure


def _run(arguments: list[str], folder: str) -> tuple[float, float]:
    """CPU and wall seconds of a Python process."""
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, check=False
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{arguments} failed:\n{done.stderr.decode()}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, wall
