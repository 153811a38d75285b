"""`lightfed sweep`: what is refused, what is skipped, and the bits of runs of one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import load_file

from lightfed.cli.command_line import main
from lightfed.cli.wanted import LOGS, Wanted
from lightfed.lab import sweep
from lightfed.lab.runner import Outcome
from tests.forked import run_script
from tests.lab.reading import check_once
from tests.promises.refusals.mistakes import edited

FIT = "fit --config run.yaml"
OF_RANKS = ["seconds", "wire_bytes"]
SECONDS = 120.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(edited({"trainer.max_epochs": 2}))
    return tmp_path


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sweep, "check", check_once)
    return folder


def status_of(*words: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *words])
    return ended.value.code


def process(folder: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "lightfed", "sweep", *words],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Makes a process that has been forked `lightfed sweep list`.
AS_A_PROGRAM = """
import sys
from lightfed.cli.command_line import main
sys.argv = ["lightfed", "sweep", "list"]
main()
"""


def results(run: Path) -> dict[str, object]:
    """All of a run that must not depend on how it was started."""
    tables = {
        name: pd.read_csv(run / f"{name}.csv").drop(columns=OF_RANKS, errors="ignore").to_dict()
        for name in ("metrics", "clients")
    }
    (file,) = (run / "models").glob("*.safetensors")
    weights = load_file(file)
    return tables | {name: value.numpy().tobytes() for name, value in weights.items()}


def test_all_lines_at_fault_are_named_before_the_first_run(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "# a comment",
        f"{FIT} --model.seed 1",
        f"{FIT} --model.optimizer.init_args.lr fast",
        "",
        "plan --config run.yaml",
        f"{FIT} --model.seed 1 --trainer.enable_page false",
        f"{FIT} --trainer.logger false --trainer.enable_checkpointing false",
    ]
    (here / "list").write_text("\n".join(lines))
    monkeypatch.setattr(sweep, "run_all", None)
    assert status_of("list") == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2:4] for line in errors] == [
        ["list, line 3", "model.optimizer.init_args.lr"],
        ["list, line 5", "plan"],
        ["list, line 6", "trainer.name"],
        ["list, line 7", "trainer.logger"],
    ]
    assert "list, line 2" in errors[2]
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("text", "words", "key"),
    [
        (None, ["list"], "sweep"),
        ("# no line", ["list"], "sweep"),
        (FIT, ["list", "--line", "2"], "--line"),
        (FIT, ["list", "--jobs", "0"], "sweep"),
        (f"{FIT}\n{FIT} 'open", ["list"], "list, line 2"),
        (FIT, ["list", "--slurm"], "--slurm"),
    ],
)
def test_a_list_that_cannot_be_run_is_refused(
    text: str | None, words: list[str], key: str, here: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", "")
    if text is not None:
        (here / "list").write_text(text)
    assert status_of(*words) == 2
    assert capsys.readouterr().err.startswith(f"lightfed: error: {key}: ")


def test_the_worst_status_is_that_of_the_sweep(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "list").write_text("\n".join(f"{FIT} --model.seed {seed}" for seed in range(3)))
    (runs,) = [check_once([[*FIT.split(), f"--model.seed={s}"] for s in range(3)])]
    ends = [Outcome(w, s, 1.0, "x") for w, s in zip(runs, (1, 2, 0), strict=True)]  # type: ignore[arg-type]
    monkeypatch.setattr(sweep, "run_all", lambda runs, jobs: iter(ends[:2]))
    assert status_of("list", "--jobs", "2") == 128 + signal.SIGINT
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["1/3", "2/3", "stopped:"]
    assert "status 2" in lines[1]


def test_a_line_of_a_comment_trains_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "list").write_text(f"# nothing\n{FIT}\n")
    assert status_of("list", "--line", "1") == 0
    assert "line 1 of list" in capsys.readouterr().out


def test_missing_lines_are_submitted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "list").write_text("\n".join(f"{FIT} --model.seed {seed}" for seed in range(4)))
    (here / "slurm").mkdir()
    (here / "slurm" / "sweep.sbatch").touch()
    (here / "sbatch").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\" > words\nexit 3\n")
    (here / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    done = here / "runs" / "run"
    done.mkdir(parents=True)
    (wanted,) = check_once([[*FIT.split(), "--model.seed", "2"]])
    assert isinstance(wanted, Wanted)
    stated = {
        "name": "run",
        "config": wanted.digest,
        "finished": {"rounds": 2, "limits": wanted.limits},
    }
    (done / "environment.json").write_text(json.dumps(stated))
    more = ["--trainer.precision", "32"]
    assert status_of("list", "--slurm", "--jobs", "8", *more) == 3
    words = (here / "words").read_text().splitlines()
    assert words == ["--array=1,2,4%8", "slurm/sweep.sbatch", "list", *more]


def test_a_task_of_an_array_says_that_its_run_has_diverged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"{FIT} --model.optimizer.init_args.lr 1e30 --model.max_failed_clients 0"
    (folder / "list").write_text(words)
    monkeypatch.setattr(sys, "argv", ["lightfed"])
    assert status_of("list", "--line", "1") == 2
    assert Wanted.of(words.split()).diverged.exists()


def test_other_limits_are_another_run(folder: Path) -> None:
    main(FIT.split())
    short, long, other = (
        Wanted.of([*FIT.split(), *more])
        for more in ([], ["--trainer.max_epochs", "3"], ["--model.seed", "1"])
    )
    assert short.finished() == Path("runs/run")
    assert long.finished() is other.finished() is None
    assert long.resumed()[-1] == "3", "a finished run of other limits is left as it is"


def test_runs_of_a_sweep_have_the_bits_of_the_same_runs_alone(folder: Path) -> None:
    """The sweep is a process of its own, which has computed nothing before."""
    lines = [f"{FIT} --model.seed {seed}" for seed in (0, 1)]
    failing = f"{FIT} --model.optimizer.init_args.lr 1e30 --model.max_failed_clients 0"
    (folder / "list").write_text("\n".join([*lines, failing]))
    (folder / "sweep.py").write_text(AS_A_PROGRAM)
    swept = run_script(folder / "sweep.py", folder)
    assert swept.returncode == 2, swept.stderr
    assert not swept.stderr
    begins = [line.split(" ")[:2] for line in swept.stdout.splitlines()]
    assert begins == [["1/3", "runs/run:"], ["2/3", "runs/run-2:"], ["3/3", "run:"]]
    (log,) = (folder / "runs" / LOGS).iterdir()
    assert log.name == Wanted.of(failing.split()).diverged.name
    main([*lines[1].split(), "--trainer.name", "alone"])
    assert results(folder / "runs" / "run-2") == results(folder / "runs" / "alone")
    command = json.loads((folder / "runs" / "run-2" / "environment.json").read_text())["command"]
    assert command.endswith(lines[1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_stopped_sweep_goes_on_with_the_same_bits(folder: Path) -> None:
    rounds = f"{FIT} --trainer.max_epochs 12"
    (folder / "list").write_text(
        f"{rounds}\n{FIT} --trainer.devices 2 --trainer.name two\n{FIT} --trainer.name three"
    )
    with process(folder, "list", "--jobs", "2") as stopped:
        limit = time.monotonic() + SECONDS
        while not (folder / "runs/run/checkpoints/last.ckpt").exists():  # the first round is over
            assert time.monotonic() < limit
            time.sleep(0.05)
        stopped.send_signal(signal.SIGTERM)
        out = stopped.communicate(timeout=SECONDS)[0]
    assert stopped.returncode == 128 + signal.SIGTERM, out
    assert "not begun" in out
    with process(folder, "list", "--jobs", "2") as again:
        out, errors = again.communicate(timeout=5 * SECONDS)
    assert again.returncode == 0, out + errors
    assert sorted(p.name for p in (folder / "runs").glob("[!.i]*")) == ["run", "three", "two"]
    main([*rounds.split(), "--trainer.name", "alone"])
    assert results(folder / "runs" / "run") == results(folder / "runs" / "alone")
    assert results(folder / "runs" / "two") == results(folder / "runs" / "three")


def test_a_finished_list_is_found_without_torch_until_its_configuration_changes(
    folder: Path,
) -> None:
    """What a command does that has nothing to do is not worth the seconds of an import."""
    (folder / "list").write_text(f"{FIT} --trainer.max_epochs 1 --trainer.name a\n")
    program = """
import sys
if sys.argv[1] == "without torch":
    sys.modules["torch"] = None  # its import raises an ImportError
from lightfed.lab.sweep_command import main
status = main(sys.argv[2:])
print(status, [m for m in ("torch", "lightning", "jsonargparse") if sys.modules.get(m)])
"""

    def swept(how: str, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", program, how, "list", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    trained = swept("with torch")
    of_training, status = trained.stdout.splitlines()
    assert "finished in" in of_training
    assert status.startswith("0 ['torch', ")

    again = swept("without torch")
    assert again.stdout.splitlines()[-1] == "0 []", again.stderr
    line, status = swept("without torch", "--line", "1").stdout.splitlines()
    assert (line, status) == ("runs/a is finished", "0 []")

    # The list is read anew, for which it needs torch.
    (folder / "run.yaml").write_text(edited({"trainer.max_epochs": 2, "model.seed": 7}))
    refused = swept("without torch")
    assert refused.returncode != 0
    assert "import of torch halted" in refused.stderr
