"""Jobs on a real SLURM: they end with the same bits, whatever the cluster does to them."""

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from typing_extensions import override

from tests.slurm.cluster import Cluster, Job, until
from tests.slurm.gate import ROUND
from tests.slurm.runs import (
    FIT,
    GATED,
    ONE_NODE,
    TWO_NODES,
    Run,
    Workspace,
    assert_same_bits,
    modules,
)

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def undisturbed(workspace: Workspace) -> Run:
    """One node, two ranks: what all other runs are compared with."""
    run = workspace.submit("train", ONE_NODE, FIT)
    run.complete()
    return run


def held(workspace: Workspace, *flags: str) -> Run:
    """A run that waits during its third round."""
    run = workspace.submit("train", flags, GATED)
    run.reach_gate()
    return run


def assert_went_on(run: Run, undisturbed: Run, *, starts: int = 2) -> None:
    """It ended well, began again during the round it was in, and found what it would have found."""
    run.complete()
    assert run.first_rounds() == [0] + [ROUND] * (starts - 1), run.log
    assert_same_bits(run, undisturbed)


def test_one_node_and_two_have_the_same_bits(workspace: Workspace, undisturbed: Run) -> None:
    run = workspace.submit("train", TWO_NODES, FIT)
    run.complete()
    assert_same_bits(run, undisturbed)
    assert ", start 1" in run.log.splitlines()[0]


def test_a_run_goes_on_after_its_time_limit(workspace: Workspace, undisturbed: Run) -> None:
    run = held(workspace, *ONE_NODE, "--signal=SIGUSR1@200")
    hours, minutes, _ = run.job.facts()["RunTime"].split(":")
    # At most three minutes are left: the signal is due, and comes within half a minute.
    run.job.update(f"TimeLimit={60 * int(hours) + int(minutes) + 3}")
    until(lambda: run.job.state == "PENDING", "the run saves and puts its job back")
    run.job.update("TimeLimit=30")
    run.job.release()
    assert_went_on(run, undisturbed)
    assert run.job.restarts == 1


def test_a_run_goes_on_after_a_preemption(workspace: Workspace, undisturbed: Run) -> None:
    run = held(workspace, *ONE_NODE)
    urgent = workspace.cluster.submit(
        *("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"),
        cwd=workspace.root,
    )
    assert urgent.end()["JobState"] == "COMPLETED"
    run.job.release()
    assert_went_on(run, undisturbed)


def test_a_run_goes_on_after_an_operators_requeue(workspace: Workspace, undisturbed: Run) -> None:
    run = held(workspace, *ONE_NODE)
    run.job.requeue()
    run.job.release()
    assert_went_on(run, undisturbed)


def test_a_run_goes_on_when_its_node_is_lost(
    cluster: Cluster, workspace: Workspace, undisturbed: Run
) -> None:
    run = held(workspace, *ONE_NODE)
    lost = run.job.facts()["NodeList"]
    cluster.power_off(lost, run.job)
    try:
        run.job.release()
        assert_went_on(run, undisturbed)
        assert run.job.facts()["NodeList"] != lost
    finally:
        cluster.power_on(lost)


def test_a_cancelled_run_goes_on_only_when_it_is_asked_to(
    workspace: Workspace, undisturbed: Run
) -> None:
    run = workspace.submit("train", ONE_NODE, GATED)
    pids = run.reach_gate()
    run.job.cancel()
    until(lambda: not any(map(alive, pids)), "the ranks have ended")
    facts = run.job.end()
    assert facts["JobState"] == "CANCELLED"
    assert facts["Restarts"] == "0"
    other = workspace.submit("train", ONE_NODE, (*FIT, "--ckpt_path=last"))
    other.complete()
    assert_same_bits(run, undisturbed)


def test_a_task_of_an_array_goes_on_with_its_own_run(
    workspace: Workspace, undisturbed: Run
) -> None:
    named = "--trainer.name=array"  # else the sweep finds the run of seed 0 that is finished
    lines = [" ".join((*GATED, f"--model.seed={seed}", named)) for seed in (0, 1)]
    (workspace.root / "seeds.sweep").write_text("\n".join(lines))
    flags = ("--array=1-2", "--ntasks-per-node=1", "--gpus-per-node=1")
    array = workspace.submit("sweep", flags, ["seeds.sweep"])
    disturbed, sibling = array.task(1), array.task(2)
    for run in (disturbed, sibling):
        run.reach_gate(ranks=1)
    disturbed.job.cancel("--signal=USR1")  # as its time limit would; it puts itself back
    disturbed.job.release()
    sibling.open_gate()
    assert_went_on(disturbed, undisturbed)  # the seed is that of the other runs
    assert_went_on(sibling, sibling, starts=1)
    assert sibling.job.restarts == 0
    assert sibling.results()["weights"] != disturbed.results()["weights"]
    folders = [path.name for path in (workspace.root / "runs").glob(f"*{array.job.number}*")]
    assert sorted(folders) == [disturbed.folder.name, sibling.folder.name]


def test_what_is_missing_of_a_list_is_submitted(workspace: Workspace) -> None:
    short = (*FIT, "--trainer.name=listed", "--trainer.max_epochs=1")
    lines = [" ".join((*short, f"--model.seed={seed}")) for seed in (0, 1)]
    (workspace.root / "listed.sweep").write_text("\n".join(["# a comment", *lines]))
    workspace.lightfed("sweep", "listed.sweep", "--line", "2")
    array = workspace.array(workspace.lightfed("sweep", "listed.sweep", "--slurm"))
    array.task(3).complete()
    said = workspace.lightfed("sweep", "listed.sweep", "--slurm")
    assert said == "all runs of listed.sweep are finished"


def test_a_comparison_is_submitted_and_then_shown(workspace: Workspace) -> None:
    short = ("--set", "trainer.max_epochs=1", "trainer.accelerator=cpu", "model.fraction=0.3")
    files = [f"configs/digits/{name}.yaml" for name in ("fedavg", "fedprox")]
    words = ("compare", *files, *short, "--seeds", "0-1")
    said = workspace.lightfed(*words, "--slurm")
    array = workspace.array(said)
    for number in range(1, 5):
        array.task(number).complete()
    table = workspace.lightfed(*words)
    assert "global accuracy" in table
    assert "Submitted" not in workspace.lightfed(*words, "--slurm")


class StepOf(Run):
    """The run of a step of a job, in the folder that it says."""

    def __init__(self, workspace: Workspace, job: Job, folder: str) -> None:
        super().__init__(workspace, job)
        self._folder = folder

    @property
    @override
    def folder(self) -> Path:
        return self.workspace.root / "runs" / self._folder


TWO_STEPS = """\
echo $SLURM_JOB_ID > job
srun --ntasks=2 --overlap --mpi=none --kill-on-bad-exit=1 {words} 2> first &
srun --ntasks=2 --overlap --mpi=none --kill-on-bad-exit=1 {words} 2> second &
wait %1; one=$?
wait %2; exit $((one + $?))
"""


def test_two_steps_of_a_shell_have_a_folder_each(
    cluster: Cluster, workspace: Workspace, undisturbed: Run
) -> None:
    """They run at the same time, in a job that has the name of a shell, and of the same words."""
    words = [".venv/bin/lightfed", *GATED, "--trainer.devices=2", "--trainer.name=steps"]
    (workspace.root / "two.sh").write_text(TWO_STEPS.format(words=shlex.join(words)))
    allocation = ["salloc", *ONE_NODE, "--cpus-per-task=1", "--time=30", "bash", "two.sh"]
    with subprocess.Popen(
        allocation, env=cluster.environment | {"PYTHONPATH": modules()}, cwd=workspace.root,
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as shell:  # fmt: skip

        def said() -> str:
            texts = [workspace.root / name for name in ("first", "second")]
            return "".join(path.read_text() for path in texts if path.exists())

        def both_at_the_gate() -> bool:
            assert shell.poll() is None, said()
            rounds = [*(workspace.root / "gate").glob(f"{number()}-rounds")]
            return bool(rounds) and rounds[0].read_text().count(f"0 {ROUND}\n") == 2

        def number() -> str:
            path = workspace.root / "job"
            return path.read_text().strip() if path.exists() else "none"

        until(both_at_the_gate, "both steps are in their third round", seconds=300)
        job = Job(cluster, number())
        Run(workspace, job).open_gate()
        assert shell.wait(300) == 0, said()
    names = [f"steps-{job.number}", f"steps-{job.number}-2"]
    assert sorted(path.name for path in (workspace.root / "runs").glob("steps*")) == names
    for name in names:
        assert_same_bits(StepOf(workspace, job, name), undisturbed)


def test_a_dead_rank_ends_the_job(workspace: Workspace) -> None:
    run = workspace.submit("train", TWO_NODES, GATED)
    pids = run.reach_gate()
    os.kill(pids[1], signal.SIGKILL)
    facts = run.job.end(seconds=60)
    assert facts["JobState"] == "FAILED"
    assert facts["ExitCode"] != "0:0"
    assert facts["Restarts"] == "0"
    assert re.search(r"^lightfed: error: rank 1 on \S+ .*died", run.log, re.MULTILINE), run.log
    until(lambda: not any(map(alive, pids)), "the ranks have ended")


def test_the_commands_of_the_documentation_are_accepted(workspace: Workspace) -> None:
    text = (workspace.root / "slurm" / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [line for line in lines if line.startswith(("sbatch ", "list="))]
    assert len(commands) >= 8
    script = ["set -e", 'sbatch() { command sbatch --test-only "$@"; }', *commands]
    (workspace.root / "commands.sh").write_text("\n".join(script).replace("FILE", "x.yaml"))
    workspace.cluster.command("bash", "commands.sh", cwd=workspace.root)


def alive(pid: int) -> bool:
    """Whether a process runs."""
    return Path(f"/proc/{pid}").exists()
