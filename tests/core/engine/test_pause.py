"""`fit --pause_after N`: a run stops for now, and goes on as if it had never stopped."""

import csv
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lightfed.cli.command_line import main
from lightfed.cli.wanted import Wanted
from tests.promises.refusals.mistakes import edited

OF_THE_CLOCK = ("seconds", "wire_bytes")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        edited({"trainer.max_epochs": 4, "trainer.enable_page": False})
    )
    return tmp_path


def fit(*words: str) -> None:
    main(["fit", "--config=run.yaml", *words])


def rounds_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: row[key] for key in row if key not in OF_THE_CLOCK} for row in rows]


def test_a_run_that_pauses_goes_on_with_the_same_bits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit("--trainer.default_root_dir=whole")
    capsys.readouterr()

    fit("--pause_after=2")
    (run,) = (folder / "runs").iterdir()
    assert len(rounds_of(run)) == 2
    assert not (run / "models").exists()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "paused" in line]
    assert line == (
        "lightfed: paused after 2 of 4 rounds; "
        "the same command without --pause_after, with --ckpt_path last, goes on"
    )
    assert "pause_after" not in (run / "config.yaml").read_text()

    # It has these rounds already, so none is added.
    fit("--pause_after=2", "--ckpt_path=last")
    assert len(rounds_of(run)) == 2

    fit("--ckpt_path=last")
    assert [path.name for path in (folder / "runs").iterdir()] == [run.name]
    (whole,) = (folder / "whole").iterdir()
    assert rounds_of(run) == rounds_of(whole)
    (weights,) = (run / "models").glob("*.safetensors")
    (expected,) = (whole / "models").glob("*.safetensors")
    state = load_file(weights)
    assert state
    for name, tensor in load_file(expected).items():
        assert state[name].equal(tensor)


def test_a_run_has_finished_for_now_once_it_has_the_rounds_of_its_pause(folder: Path) -> None:
    wanted = Wanted.of(["fit", "--config=run.yaml"])
    paused = wanted.up_to(2)
    assert paused.digest == wanted.digest
    assert Wanted.of(list(paused.words)) == paused
    assert paused.finished() is None

    fit("--pause_after=2")
    (run,) = (folder / "runs").iterdir()
    assert paused.finished() is not None
    assert wanted.up_to(1).finished() is not None
    assert wanted.up_to(3).finished() is None
    assert wanted.finished() is None
    assert wanted.resumed()[-2:] == [
        "--ckpt_path",
        str(Path("runs") / run.name / "checkpoints/last.ckpt"),
    ]

    # A line without its end is not counted: the row may be half-written.
    table = run / "metrics.csv"
    table.write_text(table.read_text() + "3,0.5")
    assert wanted.up_to(3).finished() is None

    fit("--ckpt_path=last")
    assert wanted.finished() == paused.finished()


def test_a_pause_before_the_first_round_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        fit("--pause_after=0")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "lightfed: error: pause_after: 0; give at least 1"
    assert not (folder / "runs").exists()
