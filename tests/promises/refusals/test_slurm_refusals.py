"""Ranks that SLURM would not start, or start wrongly, are refused before any waits for another."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

from lightfed.cli.command_line import main
from lightfed.distributed.slurm import (
    check_launch,
    check_tasks,
    check_variables,
    is_interactive,
    port_of,
)
from lightfed.distributed.step_environment import StepEnvironment, with_environment
from lightfed.trainer import FederatedTrainer
from lightfed.utils.errors import UserError
from tests.promises.refusals.mistakes import edited

BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}
BATCH |= {"SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = BATCH | {"SLURM_STEP_ID": "0"}
JOB, ONE_TASK = {"SLURM_JOB_ID": "7"}, {"SLURM_NTASKS": "1", "SLURM_NNODES": "1"}
Launch = tuple[dict[str, str], int, int]  # the environment, ranks on a node, nodes


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize("accelerator", ["gpu", "auto"])
@pytest.mark.parametrize("local", ["0", "1"])
def test_one_visible_gpu_a_task(accelerator: str, local: str) -> None:
    """Rank 0 refuses as the others do, though it has its GPU: the others are not heard."""
    with pytest.raises(UserError) as refused:
        check_tasks(STEP | {"SLURM_LOCALID": local}, accelerator=accelerator, gpus=1)
    assert refused.value.key == "--gpus-per-node"
    assert "--gpus-per-node=2" in refused.value.fix


def test_enough_gpus_are_accepted() -> None:
    check_tasks(STEP, accelerator="gpu", gpus=2)
    check_tasks(STEP, accelerator="gpu", gpus=1, ranks_per_device=2)
    check_tasks(STEP, accelerator="cpu", gpus=1)
    check_tasks(STEP, accelerator="auto", gpus=0)  # on the CPU
    check_tasks(STEP | {"TORCHELASTIC_RUN_ID": "x"}, accelerator="gpu", gpus=1)
    wide = STEP | {"SLURM_NTASKS_PER_NODE": "6"}
    with pytest.raises(UserError, match="--gpus-per-node=3"):
        check_tasks(wide, accelerator="gpu", gpus=2, ranks_per_device=2)


def test_tasks_have_to_be_given_by_node() -> None:
    environ = without(STEP, "SLURM_NTASKS_PER_NODE")
    with pytest.raises(UserError) as refused:
        check_tasks(environ, accelerator="cpu", gpus=0)
    assert refused.value.key == "--ntasks"
    assert "--nodes=2 --ntasks-per-node=2" in refused.value.fix
    check_tasks(environ | {"SLURM_NTASKS": "1"}, accelerator="cpu", gpus=0)
    shell = without(environ, "SLURM_STEP_ID") | {"SLURM_JOB_NAME": "bash"}
    check_tasks(shell, accelerator="cpu", gpus=0)


@pytest.mark.parametrize(
    ("launch", "key"),
    [
        ((BATCH, 2, 2), "srun"),
        ((BATCH, 3, 1), "srun"),
        ((STEP, 1, 2), "trainer.devices"),
        ((STEP, 2, 1), "trainer.num_nodes"),
        ((STEP | {"SLURM_NTASKS": "2"}, 2, 2), "trainer.devices"),
        ((JOB | ONE_TASK, 4, 1), "trainer.devices"),
        ((JOB, 4, 2), "trainer.num_nodes"),
    ],
)
def test_ranks_that_nobody_starts(launch: Launch, key: str) -> None:
    environ, processes, nodes = launch
    with pytest.raises(UserError) as refused:
        check_launch(environ, processes=processes, nodes=nodes)
    assert refused.value.key == key


@pytest.mark.parametrize(
    "launch",
    [
        (STEP, 2, 2),
        ({}, 4, 2),
        (JOB, 4, 1),  # a batch job of one task: Lightning starts the others
        (JOB | {"NODE_RANK": "1"}, 4, 2),
        (BATCH | {"SLURM_JOB_NAME": "interactive"}, 3, 1),  # `salloc` without srun
        (BATCH | {"TORCHELASTIC_RUN_ID": "x"}, 3, 1),
        (JOB | ONE_TASK, 1, 1),
    ],
)
def test_what_is_nearly_the_same_and_starts_is_let_through(launch: Launch) -> None:
    environ, processes, nodes = launch
    check_launch(environ, processes=processes, nodes=nodes)


def test_the_fix_counts_ranks_that_share_a_device() -> None:
    with pytest.raises(UserError, match="set it to 1, or submit with --ntasks-per-node=4"):
        check_launch(STEP, processes=4, nodes=2, ranks_per_device=2)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder in a batch job, as the batch script sees it."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "a.yaml").write_text(edited({"trainer.devices": 2, "trainer.num_nodes": 2}))
    return tmp_path


@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_command_without_srun_is_one_line(
    command: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(), pytest.raises(SystemExit) as left:
        main([command, "--config", "a.yaml"])
    assert left.value.code == 2
    said = "lightfed: error: srun: the job has 4 tasks, and this process is not one of them; "
    assert capsys.readouterr().err == f"{said}write srun before the command\n"
    assert [path.name for path in job.iterdir()] == ["a.yaml"]


def test_what_needs_no_ranks_needs_no_srun(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        main(["partition", "--config", "a.yaml"])
    assert "client" in capsys.readouterr().out


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_tasks_without_tasks_per_node_are_refused_before_lightning_raises(
    rank: str,
    lines: int,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", rank)
    with warnings.catch_warnings(), pytest.raises(SystemExit) as left:
        main(["fit", "--config", "a.yaml"])
    assert left.value.code == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == lines
    assert all(line.startswith("lightfed: error: --ntasks: 4 tasks") for line in errors)


def test_a_strategy_that_is_not_federated_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"trainer\.strategy: ddp; use strategy: federated"):
        FederatedTrainer(accelerator="cpu", devices=2, strategy="ddp")  # type: ignore[arg-type]


# Variables of launchers that are wrong, and what the line is about.
WRONG: dict[str, dict[str, str]] = {
    "MASTER_PORT": {"MASTER_PORT": "x"},
    "MASTER_PORT ": {"MASTER_PORT": "70000"},
    "MASTER_PORT  ": {"MASTER_PORT": "0"},
    "MASTER_PORT   ": {"MASTER_PORT": "-1"},
    "LOCAL_RANK": {"LOCAL_RANK": "x"},
    "RANK": {"RANK": "1.5"},
    "WORLD_SIZE": {"WORLD_SIZE": "0", "LOCAL_RANK": "0"},
    "NODE_RANK": {"NODE_RANK": ""},
    "NODE_RANK ": {"NODE_RANK": "99999999999"},
    "SLURM_NTASKS": STEP | {"SLURM_NTASKS": "x"},
    "SLURM_NTASKS ": STEP | {"SLURM_NTASKS": "0"},
    "SLURM_NNODES": STEP | {"SLURM_NNODES": "two"},
    "SLURM_PROCID": STEP | {"SLURM_PROCID": "-1"},
    "SLURM_JOB_ID": STEP | {"SLURM_JOB_ID": "job"},
    "SLURM_RESTART_COUNT": JOB | {"SLURM_RESTART_COUNT": "x"},
    "SLURM_STEP_ID": STEP | {"SLURM_STEP_ID": "batch"},
    "LOCAL_RANK ": {"TORCHELASTIC_RUN_ID": "x", "RANK": "0"},
    "MASTER_ADDR": {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                    "GROUP_RANK": "0"},
    "SLURM_PROCID ": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"},  # `salloc -J name`, without srun
    "SLURM_NODEID": without(STEP, "SLURM_NODEID"),
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG)
def test_a_launcher_s_variable_that_is_wrong_is_one_line(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(edited({}))
    others = ("RANK", "LOCAL_", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_", "TORCHELASTIC")
    for name in [n for n in os.environ if n.startswith(("SLURM_", *others))]:
        monkeypatch.delenv(name)
    for name, value in WRONG[key].items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(), pytest.raises(SystemExit) as left:
        main(["fit", "--config", "a.yaml"])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lightfed: error: {key.strip()}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]


def test_good_variables_are_let_through() -> None:
    for environ in ({}, BATCH, STEP, {"MASTER_PORT": "29500", "LOCAL_RANK": "0"}):
        check_variables(environ)


def test_a_step_of_several_tasks_wins_over_the_name_of_its_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each task would else train the whole federation, in a folder of its own."""
    step = {**STEP, "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_NAME": "interactive"}
    with pytest.raises(UserError, match=r"trainer\.devices: 1 ranks a node, but the job has 2"):
        check_launch(step, processes=1, nodes=1)
    check_launch(step, processes=2, nodes=1)
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    (environment,) = with_environment(None)
    assert (environment.world_size(), environment.global_rank()) == (2, 0)
    trainer = FederatedTrainer(accelerator="cpu", devices=2, logger=False)
    assert isinstance(trainer.strategy.cluster_environment, StepEnvironment)
    assert trainer.world_size == 2


def test_a_shell_in_a_job_is_no_step_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = {**JOB, **ONE_TASK, "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "bash"}
    assert is_interactive(shell)
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    assert with_environment(None) is None


def test_two_steps_of_a_job_meet_at_two_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = {port_of(STEP | {"SLURM_STEP_ID": str(step)}) for step in range(200)}
    assert len(ports) == 200
    assert all(15_000 <= port < 25_000 for port in ports)
    assert port_of(STEP) == 15_007, "Lightning's, for the first step"
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in (STEP | {"SLURM_STEP_ID": "3"}).items():
        monkeypatch.setenv(name, value)
    (environment,) = with_environment([])
    assert environment.main_port == port_of(STEP | {"SLURM_STEP_ID": "3"})
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert environment.main_port == 29500
