"""What the batch scripts make of an allocation and their arguments; srun is a stand-in."""

import os
import re
import shlex
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ALLOCATION = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NAME": "lightfed",
    "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_CPUS_PER_TASK": "3",
}
RANKS = ["--trainer.num_nodes=2", "--trainer.devices=4"]
# A word a line, and what the ranks have to know.
STAND_IN = """#!/bin/sh
echo $$ > srun.pid
printf '%s\\n' "$SRUN_CPUS_PER_TASK" "$FROM_SITE" "$@" > srun.words
exit 7
"""
SITE = """
export FROM_SITE=$A_VARIABLE_THAT_IS_NOT_SET.
container=(run --in 'a box')
srun_flags=(--image=box)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the scripts, with a srun that takes its words down."""
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm", ignore=shutil.ignore_patterns("site.sh"))
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("srun", STAND_IN), ("python3", "#!/bin/sh\necho versions")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return tmp_path


def run(
    folder: Path, script: str, *words: str, **variables: str | None
) -> "subprocess.CompletedProcess[str]":
    """A script in an allocation of 2 x 4 tasks; None takes a variable away."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SRUN"))}
    changed = inherited | ALLOCATION | variables
    return subprocess.run(
        ["bash", "-c", 'echo $$ > batch.pid; exec bash "$@"', "", f"slurm/{script}.sbatch", *words],
        cwd=folder,
        env={name: value for name, value in changed.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def passed_on(folder: Path) -> list[str]:
    """What lightfed was given, less the numbers of nodes and ranks."""
    words = (folder / "srun.words").read_text().splitlines()
    words = words[words.index("lightfed") + 1 :]
    assert words[-2:] == RANKS
    return words[:-2]


def test_arguments_and_allocation_reach_every_rank(repository: Path) -> None:
    done = run(repository, "train", "fit", "--config", "a file.yaml", "--x=$HOME '*'")
    words = (repository / "srun.words").read_text().splitlines()
    assert words[:5] == ["3", "", "--kill-on-bad-exit=1", "--mpi=none", "lightfed"]
    assert passed_on(repository) == ["fit", "--config", "a file.yaml", "--x=$HOME '*'"]
    assert done.returncode == 7, "the status of the job is that of its ranks"


def test_signals_for_the_batch_script_reach_srun(repository: Path) -> None:
    """A shell that waits for srun would die of them, and the job with it."""
    (repository / "list").write_text("fit")
    run(repository, "sweep", "list", SLURM_ARRAY_TASK_ID="1")
    assert (repository / "srun.pid").read_text() == (repository / "batch.pid").read_text()


def test_the_log_begins_with_what_runs_where(repository: Path) -> None:
    (repository / "list").write_text("fit")
    done = run(
        *(repository, "sweep", "list", "--x", "a b"),
        SLURM_ARRAY_JOB_ID="16", SLURM_ARRAY_TASK_ID="1", SLURM_RESTART_COUNT="2",
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0].endswith(" job 17 = 16_1 (lightfed), start 3")
    assert lines[1] == "   nodes n[0-1]; ranks a node: 4, GPUs: 4; CPUs a rank: 3"
    assert re.fullmatch(r"   commit \S+, versions", lines[2])
    words = ["lightfed", "sweep", "list", "--line", "1", "--x", "a b", *RANKS]
    assert shlex.split(lines[3]) == words


def test_the_site_has_its_say(repository: Path) -> None:
    (repository / "slurm" / "site.sh").write_text(SITE)
    run(repository, "train", "fit", PATH=f"{repository}/.venv/bin:{os.environ['PATH']}")
    words = (repository / "srun.words").read_text().splitlines()
    assert words[1:7] == [".", "--kill-on-bad-exit=1", "--mpi=none", "--image=box", "run", "--in"]
    assert words[7:10] == ["a box", "lightfed", "fit"]


@pytest.mark.parametrize("own", [True, False])
def test_the_environment_is_found_beside_a_site_unless_that_names_another(
    own: bool, repository: Path
) -> None:
    """Modules come first in PATH, and have a Python."""
    for place, names in (
        (".venv/bin", ["lightfed"]),
        ("module", ["python3", "lightfed"][: 2 - own]),
    ):
        (repository / place).mkdir(exist_ok=True)
        for name in names:
            (repository / place / name).write_text(f"#!/bin/sh\necho {place}")
            (repository / place / name).chmod(0o755)
    (repository / "slurm" / "site.sh").write_text("PATH=$PWD/module:$PATH\n")
    printed = run(repository, "train", "fit").stdout
    assert ("versions" in printed) is own
    assert ("module" in printed) is not own


def test_the_example_of_a_site_changes_nothing(repository: Path) -> None:
    example = ROOT / "slurm" / "site.example.sh"
    assert all(not line or line.startswith("#") for line in example.read_text().splitlines())
    flags = [line[2:] for line in example.read_text().splitlines() if "=(" in line]
    (repository / "slurm" / "site.sh").write_text("\n".join(flags))
    run(repository, "train", "fit", PATH=f"{repository}/.venv/bin:{os.environ['PATH']}")
    words = (repository / "srun.words").read_text().splitlines()
    assert f"--container-workdir={repository}" in words
    assert words[words.index("apptainer") :][:3] == ["apptainer", "exec", "--nv"]


@pytest.mark.parametrize(
    ("tasks", "gpus", "flags"),
    [
        ("4", "4", ["--trainer.devices=4"]),
        ("4", None, ["--trainer.devices=4"]),
        ("4", "2", ["--trainer.devices=2", "--trainer.ranks_per_device=2"]),
    ],
    ids=["a task a GPU", "no GPUs", "two tasks a GPU"],
)
def test_ranks_are_the_tasks(
    tasks: str, gpus: str | None, flags: list[str], repository: Path
) -> None:
    run(repository, "train", "fit", SLURM_NTASKS_PER_NODE=tasks, SLURM_GPUS_ON_NODE=gpus)
    words = (repository / "srun.words").read_text().splitlines()
    assert words[words.index("fit") :] == ["fit", "--trainer.num_nodes=2", *flags]


@pytest.mark.parametrize(
    ("words", "variables", "line"),
    [
        (["fit"], {"SLURM_JOB_ID": None}, "there is no job; submit it: sbatch slurm/train.sbatch"),
        ([], {}, "there are no arguments; "),
        (
            ["fit"],
            {"SLURM_NTASKS_PER_NODE": None},
            "8 tasks on 2 nodes, no number for each; give --nodes and --ntasks-per-node, and no",
        ),
        (["fit"], {"SLURM_NTASKS": "7"}, "7 tasks on 2 nodes, 4 for each; give --nodes and"),
        (
            ["fit"],
            {"SLURM_GPUS_ON_NODE": "8"},
            "4 tasks and 8 GPUs on a node; give --ntasks-per-node=8",
        ),
        (["fit"], {"SLURM_GPUS_ON_NODE": "3"}, "4 tasks and 3 GPUs on a node; give --ntasks-per"),
    ],
)
def test_what_cannot_run_is_refused(
    words: list[str], variables: dict[str, str | None], line: str, repository: Path
) -> None:
    done = run(repository, "train", *words, **variables)
    assert done.returncode == 2
    assert done.stderr.startswith(f"train.sbatch: {line}")
    assert len(done.stderr.splitlines()) == 1
    assert not (repository / "srun.words").exists()


def test_a_task_of_an_array_runs_its_line(repository: Path) -> None:
    run(repository, "sweep", "a list", "--more", "words ", SLURM_ARRAY_TASK_ID="12")
    assert passed_on(repository) == ["sweep", "a list", "--line", "12", "--more", "words "]


@pytest.mark.parametrize(
    ("words", "number", "line"),
    [([], "1", "no list given; "), (["list"], None, "this is not an array task; submit with ")],
)
def test_a_missing_line_is_refused(
    words: list[str], number: str | None, line: str, repository: Path
) -> None:
    done = run(repository, "sweep", *words, SLURM_ARRAY_TASK_ID=number)
    assert done.returncode == 2
    assert f"sweep.sbatch: {line}" in done.stderr
    assert not (repository / "srun.words").exists()


def test_scripts_say_where_to_submit_from(repository: Path) -> None:
    (repository / "slurm" / "train.sbatch").unlink()
    (repository / "list").write_text("fit\n")
    done = run(repository, "sweep", "list", SLURM_ARRAY_TASK_ID="1")
    assert done.returncode == 2
    assert "submit from the repository" in done.stderr
    for name in ("kernels", "gpu"):
        done = run(repository, name)
        assert done.returncode == 2
        assert "submit from the root of the repository" in done.stderr


def test_the_first_example_trains_on_the_gpu_that_it_reserves() -> None:
    assert "#SBATCH --gpus-per-node=1\n" in (ROOT / "slurm" / "train.sbatch").read_text()
    lines = (ROOT / "slurm" / "README.md").read_text().splitlines()
    first = shlex.split(next(line for line in lines if line.startswith("sbatch ")), comments=True)
    config = yaml.safe_load((ROOT / first[first.index("--config") + 1]).read_text())
    given = dict(pairwise(first))
    used = given.get("--trainer.accelerator", config["trainer"].get("accelerator", "auto"))
    assert used in ("gpu", "auto")


def test_jobs_can_be_put_back_and_their_logs_have_a_folder() -> None:
    for name in ("train", "sweep", "kernels", "gpu"):
        text = (ROOT / "slurm" / f"{name}.sbatch").read_text()
        assert "#SBATCH --output=slurm/logs/" in text
        if name in ("train", "sweep"):
            for flag in ("--requeue", "--open-mode=append", "--signal=SIGUSR1@300"):
                assert f"#SBATCH {flag}\n" in text
    assert (ROOT / "slurm" / "logs" / ".gitignore").is_file()  # git keeps no empty folder
