"""The first hour on a card, with parts that take a moment."""

import os
from pathlib import Path

import pytest

from benchmarks import gpu_hour as gpu
from benchmarks.aims import Aim, write_aims
from benchmarks.gpu_hour import Part, main

SHIPPED = gpu.PARTS
_THIS = "tests/benchmarks/test_gpu_hour.py"
SLEEPER = """
import subprocess, sys
try:
    subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])
finally:
    print('found so far')
"""
PARTS = (
    Part("good", ("-c", "import sys; print('on', sys.argv[1], sys.path[1])", "DEVICE"), 0.2),
    Part("slow", ("-c", SLEEPER), 0.01),
    Part("bad", ("-c", "raise SystemExit('what was wrong')"), 0.2),
    Part("card", ("-c", "raise SystemExit(0)"), 0.2, needs_card=True),
    Part(
        "last",
        ("-c", "import sys; open(r'OUT/result', 'w').write(sys.argv[-1])"),
        0.2,
        quick=("quick",),
    ),
)


def test_all_tests_for_a_card_are_named() -> None:
    files = [*Path("tests").rglob("test_*.py")]
    marked = {str(f) for f in files if "mark.gpu" in f.read_text() and str(f) != _THIS}
    assert {file for file in marked if not file.startswith(gpu.TESTS)} == set()
    assert all(any(file.startswith(name) for file in marked) for name in gpu.TESTS)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PARTS", PARTS)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def states(out: Path) -> dict[str, str]:
    parts, _ = (out / "summary.txt").read_text().split("\n\n")
    lines = parts.splitlines()[1:]
    return {line.split()[0]: line.split(" s  ")[1] for line in lines}


def test_a_part_that_fails_or_takes_too_long_keeps_the_others_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), "--minutes", "1", "--parts", "good,slow,bad,card"]) == 1
    found = states(tmp_path)
    assert (found["good"], found["bad"]) == ("done", "exit status 1")
    assert found["card"].startswith("not run")
    assert found["slow"].startswith("cut off")
    assert (tmp_path / "good.log").read_text().splitlines()[-1] == f"on cpu {Path.cwd()}"
    assert not (tmp_path / "card.log").exists()
    printed = capsys.readouterr().out
    assert "\nfound so far\n" in printed
    assert "\nwhat was wrong\n" in printed
    assert "on cpu" not in printed


def test_its_own_files_are_in_the_folder_and_all_well_is_status_0(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "whole"), "--parts", "card,last"]) == 0
    assert (tmp_path / "whole/last/result").read_text() == "-c"
    assert main(["--out", str(tmp_path / "quick"), "--parts", "last", "--quick"]) == 0
    assert (tmp_path / "quick/last/result").read_text() == "quick"


def test_a_second_command_takes_up_where_the_first_ended(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--minutes", "1", "--parts", "last,bad"]) == 1
    (tmp_path / "last/result").unlink()
    assert main(["--out", str(tmp_path), "--minutes", "1", "--parts", "last,bad,good"]) == 1
    assert not (tmp_path / "last/result").exists()
    assert (tmp_path / "good.done").exists()
    assert not (tmp_path / "bad.done").exists()


def _named_by_another(package: str) -> Part:
    words = ("-c", "import sys; open(r'OUT/result', 'w').write('ran')")
    return Part("peer", words, 0.2, follows="last", package=package)


@pytest.mark.parametrize(
    ("package", "minutes", "state"),
    [
        ("pytest", "1", "done"),
        ("no_such_peer", "1", "not run: no_such_peer is not installed"),
        ("pytest", "0.3", "not run: no time is left"),
    ],
)
def test_a_part_that_follows_another_comes_last_where_it_can_run(
    package: str, minutes: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = _named_by_another(package)
    monkeypatch.setattr(gpu, "PARTS", (peer, *PARTS))
    limits: dict[str, float] = {}

    def noted(part: Part, *_: object, seconds: float, **__: object) -> gpu.Outcome:
        limits[part.name] = seconds
        return gpu.Outcome(part, gpu.DONE, 1.0)

    monkeypatch.setattr(gpu, "run", noted)

    assert main(["--out", str(tmp_path), "--minutes", minutes, "--parts", "last,good"]) == 0

    found = states(tmp_path)
    assert [*found] == ["last", "good", "peer"]
    assert found["peer"] == state
    # It takes nothing from what was named: both of these ask for as much.
    assert limits["last"] == 60 * float(minutes) / 2
    assert limits.get("peer") == (60 * float(minutes) - 2 if state == "done" else None)


def test_a_part_that_follows_none_of_those_named_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "PARTS", (_named_by_another("pytest"), *PARTS))
    assert main(["--out", str(tmp_path), "--parts", "good"]) == 0
    assert [*states(tmp_path)] == ["good"]


def test_the_peer_is_reached_by_the_name_of_published() -> None:
    assert [part.name for part in SHIPPED if part.follows == "published"] == ["cohort"]


def test_the_table_says_what_was_reached(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    rows = ["operation,shape,contender,dtype,copy_percent"]
    rows.append("slice_merge,10 clients,official,float32,1.0")
    rows.append("slice_merge,10 clients,ours,float32,92.5")
    rows.append("slice_merge,100 clients,ours,float32,71.0")
    (kernels / "card.csv").write_text("\n".join(rows) + "\n")
    cohort = tmp_path / "cohort"
    cohort.mkdir()
    write_aims(cohort, [Aim("over a peer", 2.0, 5.0, 3.0)])

    assert main(["--out", str(tmp_path), "--parts", "last"]) == 0

    _, table = (tmp_path / "summary.txt").read_text().split("\n\n")
    verdicts = {line.split("  ")[0]: line.rsplit(": ", 1)[-1] for line in table.splitlines()}
    assert verdicts["slice_merge, 10 clients: of a copy"] == "met"
    assert verdicts["slice_merge, 100 clients: of a copy"] == "above the floor"
    assert verdicts["over a peer"] == "MISSED"
    assert "not measured" in table


@pytest.mark.parametrize("arguments", [["--parts", "good,other"], []])
def test_wrong_arguments_are_refused(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as left:
        main([*(["--out", str(tmp_path)] if arguments else []), *arguments])
    assert left.value.code == 2


def test_another_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["--out", "results"])
    assert left.value.code == 2
    assert os.listdir(tmp_path) == []
