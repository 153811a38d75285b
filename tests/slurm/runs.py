"""Runs of a small federation through the shipped scripts, and what they leave."""

import csv
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.slurm.cluster import Cluster, Job, until

ROOT = Path(__file__).parents[2]
ROUNDS = 4
# Six clients of twenty in a round: three waves on two ranks.
SMALL = (
    f"--trainer.max_epochs={ROUNDS}",
    "--model.fraction=0.3",
    "--model.local_epochs=1",
    "--trainer.accelerator=cpu",
)
FIT = ("fit", "--config", "configs/quickstart.yaml", *SMALL)
GATED = (*FIT, "--trainer.callbacks=tests.slurm.gate.Gate")
ONE_NODE = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2")
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1")
OF_THE_MACHINE = ("seconds", "wire_bytes")  # columns that are no results


class Workspace:
    """A folder like the root of the repository, from which jobs are submitted.

    Args:
        root: the folder; it is made.
        cluster: that takes the jobs.
    """

    def __init__(self, root: Path, cluster: Cluster) -> None:
        self.root, self.cluster = root, cluster
        shutil.copytree(ROOT / "slurm", root / "slurm", ignore=shutil.ignore_patterns("site.sh"))
        (root / "configs").symlink_to(ROOT / "configs")
        (root / ".venv").symlink_to(sys.prefix)

    def submit(self, script: str, flags: Sequence[str], words: Sequence[str]) -> "Run":
        """`sbatch FLAGS slurm/SCRIPT.sbatch WORDS`, a CPU a task and half an hour."""
        job = self.cluster.submit(
            *("--cpus-per-task=1", "--time=30", *flags, f"slurm/{script}.sbatch", *words),
            cwd=self.root, PYTHONPATH=modules(),
        )  # fmt: skip
        return Run(self, job)

    def lightfed(self, *words: str) -> str:
        """What `lightfed WORDS` prints on the login node, which has one CPU a task to give."""
        program = str(self.root / ".venv" / "bin" / "lightfed")
        settings = {"SBATCH_TIMELIMIT": "30", "SBATCH_CPUS_PER_TASK": "1"}
        return self.cluster.command(
            program, *words, cwd=self.root, PYTHONPATH=modules(), **settings
        )

    def array(self, said: str) -> "Run":
        """The array that a command said it has submitted."""
        number = said.partition("Submitted batch job ")[2].split()[0]
        return Run(self, Job(self.cluster, number))


class Run:
    """A job, or the task of a job array, that trains.

    Args:
        workspace: where it was submitted.
        job: its job.
        name: of the job.
    """

    def __init__(self, workspace: Workspace, job: Job, name: str = "lightfed") -> None:
        self.workspace, self.job, self.name = workspace, job, name

    def task(self, number: int) -> "Run":
        """A task of this job array."""
        job = Job(self.job.cluster, f"{self.job.number}_{number}")
        return Run(self.workspace, job, "lightfed-sweep")

    @property
    def log(self) -> str:
        path = self.workspace.root / "slurm" / "logs" / f"{self.name}-{self.job.number}.log"
        return path.read_text() if path.exists() else "(there is no log)"

    @property
    def folder(self) -> Path:
        run = "array" if self.name == "lightfed-sweep" else "quickstart"
        return self.workspace.root / "runs" / f"{run}-{self.job.number}"

    def _at_gate(self, what: object) -> Path:
        return self.workspace.root / "gate" / f"{self.job.number}-{what}"

    def reach_gate(self, ranks: int = 2) -> list[int]:
        """Wait until all ranks wait during a round; their process ids."""

        def reached() -> bool:
            assert self.job.state in ("PENDING", "CONFIGURING", "RUNNING"), self.log
            return all(
                self._at_gate(r).exists() and self._at_gate(r).read_text() for r in range(ranks)
            )

        until(reached, f"run {self.job.number} is at the gate")
        return [int(self._at_gate(rank).read_text()) for rank in range(ranks)]

    def open_gate(self) -> None:
        """Let it go on."""
        self._at_gate("open").touch()

    def first_rounds(self) -> list[int]:
        """With which round, counted from 0, every start of the job began."""
        first: dict[str, int] = {}
        for line in self._at_gate("rounds").read_text().splitlines():
            start, number = line.split()
            first.setdefault(start, int(number))
        return list(first.values())

    def complete(self) -> None:
        """Wait for its good end."""
        facts = self.job.end()
        assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), self.log

    def results(self) -> dict[str, Any]:
        """All that a run finds, without what depends on the machine: comparable by ==."""
        tables = {}
        for name in ("metrics.csv", "clients.csv"):
            with (self.folder / name).open(newline="") as file:
                rows = list(csv.DictReader(file))
            tables[name] = [{k: v for k, v in r.items() if k not in OF_THE_MACHINE} for r in rows]
        state = torch.load(self.folder / "checkpoints" / "last.ckpt", weights_only=True)
        weights = {name: _bits(value) for name, value in state["state_dict"].items()}
        # What lists them names the classes of networks, which a run with a gate has others of.
        files = (self.folder / "models").rglob("*.safetensors")
        exported = {path.name: path.read_bytes() for path in files}
        return {**tables, "weights": weights, "exported": exported}


def modules() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _bits(value: Any) -> Any:
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value


def assert_same_bits(run: Run, other: Run) -> None:
    """Two runs found the same; says in what they differ, not by how much."""
    ours, theirs = run.results(), other.results()
    assert [row["round"] for row in ours["metrics.csv"]] == [str(n + 1) for n in range(ROUNDS)]
    assert ours["weights"]
    assert ours["exported"]
    for table in ("metrics.csv", "clients.csv"):
        assert ours[table] == theirs[table]
    for files in ("weights", "exported"):
        assert ours[files].keys() == theirs[files].keys()
        assert [k for k, v in ours[files].items() if v != theirs[files][k]] == []
