"""What several ranks say, and leave with, when one of them fails or all are refused; none hangs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lightfed.cli.federation_cli  # noqa: F401  (before ranks are forked)
from lightfed.cli.command_line import USAGE_ERROR, main
from tests.forked import in_new_process
from tests.promises.ranks import faults
from tests.promises.refusals.mistakes import PARTITION, Case, edit

TWO_RANKS = ["--trainer.devices", "2"]
IMPOSSIBLE = edit(f"{PARTITION}.min_size", 1000, "")
SECONDS = 120  # for what takes about ten
RATES = {"class_path": "StepLR", "init_args": {"step_size": 2, "gamma": 1e30}}
REFUSED = {
    "by the parser": edit("model.fractoin", 0.5, "model.fractoin: no such key"),
    "by every rank": edit(
        "model.clients", [{"count": 1, "model": {"class_path": "Conv"}}],
        "trainer.devices: 2 ranks for 1 clients; use at most one rank a client",
    ),
    # Only the first rank makes folders: the second one has to hear of it.
    "by one rank": edit(
        "trainer.default_root_dir", "bad.yaml", "trainer.default_root_dir: bad.yaml/bad"
    ),
}  # fmt: skip
ENDS = "; the run ends, and --ckpt_path last continues from its last checkpoint\n"
Faults = dict[str, dict[str, Any]]
DIVERGES = Case("", "", {"model.lr_schedule": RATES, "trainer.max_epochs": 4})


def command(words: list[str], folder: Path) -> int:
    """The command `lightfed` in a folder; its status."""
    os.chdir(folder)
    sys.argv = ["lightfed", *words, *TWO_RANKS]
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def play(folder: Path) -> None:
    """Every fault and command on two ranks; writes their statuses and what they said."""
    faults.main(folder)
    pids = {}
    for name, case in (REFUSED | {"diverges": DIVERGES}).items():
        place = folder / name / "work"
        place.mkdir(parents=True)
        pids[name] = faults.start(place.parent, partial(command, case.write(place), place))
    found = {}
    for name, both in pids.items():
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in both]
        found[name] = {"statuses": statuses, "said": faults.said_in(folder / name)}
    (folder / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    in_new_process(play, made)
    return made


@pytest.fixture
def struck(folder: Path) -> Faults:
    return json.loads((folder / "faults.json").read_text())  # type: ignore[no-any-return]


def line(said: str) -> str:
    """The last line, without the number of the process."""
    return re.sub(r" \(pid \d+\)", "", said.splitlines(keepends=True)[-1])


def test_a_rank_that_dies_ends_the_other_during_a_long_session(struck: Faults) -> None:
    assert struck["dies"]["statuses"] == [1, -signal.SIGKILL]
    said = struck["dies"]["said"]
    assert len(said[0].splitlines()) == 1
    assert line(said[0]) == f"lightfed: error: rank 1 on n1 died{ENDS}"
    assert said[1] == ""


def test_a_rank_that_hangs_ends_the_run_at_the_timeout(struck: Faults) -> None:
    """At the barrier after the sessions."""
    assert struck["hangs"]["statuses"] == [1]
    said = struck["hangs"]["said"]
    what = "rank 0 on n0: the end of the sessions of round 1 failed ("
    assert line(said[0]).startswith(f"lightfed: error: {what}")
    assert "Traceback" not in said[0]


@pytest.mark.parametrize("when", ["raises", "fit end", "teardown"])
def test_an_exception_of_one_rank_is_seen_and_the_other_says_whose_it_is(
    when: str, struck: Faults
) -> None:
    assert struck[when]["statuses"] == [1, 3]
    assert struck[when]["finished"] is False
    said = struck[when]["said"]
    assert "\nZeroDivisionError: of rank 1\n" in said[1]
    what = r"rank 1 on n1 ended with an error \((trainer.callbacks: )?ZeroDivisionError: of rank 1"
    assert re.match(rf"lightfed: error: {what}.*{ENDS}", line(said[0]))
    assert "Traceback" not in said[0]


def test_an_exception_of_all_ranks_is_each_rank_s_own(struck: Faults) -> None:
    assert struck["all raise"]["statuses"] == [3, 3]
    for rank, said in enumerate(struck["all raise"]["said"]):
        assert f"\nZeroDivisionError: of rank {rank}\nits traceback is in " in said
        assert "lightfed: error" not in said


@pytest.mark.parametrize(
    ("name", "statuses", "kind"),
    [
        ("exits", [1, 3], "SystemExit: 0"),
        ("exits first", [3, 1], "SystemExit: 0"),
        ("interrupts", [1, 3], "KeyboardInterrupt"),
    ],
)
def test_no_rank_that_exits_in_the_middle_leaves_with_status_0(
    name: str, statuses: list[int], kind: str, struck: Faults
) -> None:
    """A script raises it as an error; the command prints the line of it, with status 2."""
    assert struck[name]["statuses"] == statuses
    assert struck[name]["finished"] is False
    exits = statuses.index(3)
    raised = f"lightfed.utils.errors.Exited: trainer.callbacks: {kind}"
    assert raised in struck[name]["said"][exits]
    assert ", after 1 of 3 rounds; " in struck[name]["said"][exits]
    if exits == 1:
        what = f"rank 1 on n1 ended with an error (trainer.callbacks: {kind}"
        assert line(struck[name]["said"][0]).startswith(f"lightfed: error: {what}")


@pytest.mark.parametrize(("name", "rank"), [("exits at once", 1), ("exits at once first", 0)])
def test_a_rank_that_ends_its_process_at_once_is_named_by_another(
    name: str, rank: int, struck: Faults
) -> None:
    """Its own status is what it asked for: nothing runs in it any more."""
    statuses = struck[name]["statuses"]
    assert (statuses[rank], statuses[1 - rank]) == (0, 1)
    said = struck[name]["said"]
    assert line(said[1 - rank]) == f"lightfed: error: rank {rank} on n{rank} died{ENDS}"
    assert said[rank] == ""
    assert struck[name]["finished"] is False


def test_runs_that_follow_each_other_in_a_process_end_well(struck: Faults) -> None:
    assert struck["twice"] == {"statuses": [0, 0], "said": ["", ""], "finished": True}


def said(folder: Path, name: str) -> Any:
    """What both ranks of a command said; all of them left with the status of a user's mistake."""
    found = json.loads((folder / "found.json").read_text())[name]
    assert found["statuses"] == [USAGE_ERROR, USAGE_ERROR], found["said"]
    return found["said"]


@pytest.mark.parametrize("name", REFUSED)
def test_ranks_of_a_launcher_leave_with_the_same_status(name: str, folder: Path) -> None:
    first, second = said(folder, name)
    assert len(first.splitlines()) == 1, first
    assert first.startswith(f"lightfed: error: {REFUSED[name].fragment}")
    assert second == ""
    assert [path.name for path in (folder / name / "work").iterdir()] == ["bad.yaml"]


def test_a_run_that_diverges_ends_all_ranks_and_leaves_what_it_has(folder: Path) -> None:
    first, second = said(folder, "diverges")
    (line,) = [line for line in first.splitlines() if line.startswith("lightfed: error")]
    assert line.startswith("lightfed: error: model.optimizer: 3 of 3 sessions of round 2 failed")
    assert "learning rate" in line
    assert "lightfed: error" not in second
    run = folder / "diverges" / "work" / "runs" / "bad"
    assert len((run / "metrics.csv").read_text().splitlines()) == 3
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == 1


def gone(group: int) -> bool:
    """Whether a process group has ended, or ends soon."""
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.matrix
def test_ranks_that_lightning_launches_leave_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("MASTER_", "LOCAL_", "NODE_"))]:
        monkeypatch.delenv(name)  # Lightning leaves them even after a run of one rank
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = [sys.executable, "-m", "lightfed", *IMPOSSIBLE.write(tmp_path), *TWO_RANKS]
    process = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == USAGE_ERROR, errors
    assert len(errors.splitlines()) == 1, errors
    assert errors.startswith(f"lightfed: error: {PARTITION}.min_size: 1000 samples for each")
    assert gone(process.pid)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID", "NODE_RANK", "LOCAL_RANK"])
def test_other_ranks_are_silent(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as left:
        main(["report", "nowhere"])
    assert left.value.code == USAGE_ERROR
    assert capsys.readouterr().err == ""
