"""Folders beside the runs that other programs, or broken disks, have written: skipped and named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightfed.cli.command_line import main as lightfed
from lightfed.lab.compare import main
from lightfed.lab.report import page
from lightfed.lab.report.command import main as report
from lightfed.lab.results.run import read
from lightfed.runs import run_lock
from lightfed.utils import record
from lightfed.utils.errors import UserError
from tests.lab.report.make_run import ENVIRONMENT, write_run
from tests.promises.refusals.mistakes import edited

# What environment.json may hold that is not of this program.
RECORDS: dict[str, Any] = {
    "a list": [1, 2],
    "a number": 3,
    "nothing": None,
    "a name that is a list": {"name": ["x"]},
    "groups in a list": {"groups": [2, 2]},
    "groups that are no numbers": {"groups": {"a": "two"}},
    "groups of less than nobody": {"groups": {"a": -1}},
    "rounds in words": {"rounds": "many"},
    "rounds without end": {"rounds": 10**40},
    "a seed with a fraction": {"seed": 0.5},
    "clients in a list": {"clients": [3]},
    "an experiment that is a text": {"experiment": "x"},
    "settings that are numbers": {"experiment": {"digest": "x", "settings": {"a": 1}}},
    "finished with true": {"finished": True},
    "finished without limits": {"finished": {"rounds": 3}},
    "parameters in a list": {"parameters": [1]},
    "parts that are texts": {"parts": ["x"]},
    "an evaluation that is an object": {"evaluate_at": {"x": 1}},
}


def half_written(folder: Path) -> None:
    (folder / "environment.json").write_text('{"name": "kno')


def no_text(folder: Path) -> None:
    (folder / "environment.json").write_bytes(b"\xff\xfe\x00")


def nested(folder: Path) -> None:
    (folder / "environment.json").write_text("[" * 100_000)


def words_for_rounds(folder: Path) -> None:
    (folder / "metrics.csv").write_text("round,loss\none,1\n")


def rounds_backwards(folder: Path) -> None:
    (folder / "metrics.csv").write_text("round,train_loss\n2,1\n1,1\n")


def half_rounds(folder: Path) -> None:
    (folder / "metrics.csv").write_text("round,train_loss\n1.5,1\n")


def no_clients(folder: Path) -> None:
    (folder / "clients.csv").write_text("round,client\n1,x\n")


def other_costs(folder: Path) -> None:
    np.savez(folder / "costs.npz", sums=np.zeros((2, 3)))


def costs_of_other_groups(folder: Path) -> None:
    np.savez(folder / "costs.npz", round=np.array(3), sums=np.zeros((5, 3)))


def other_partition(folder: Path) -> None:
    np.savez(folder / "partition.npz", rows=np.zeros(3))


def no_archive(folder: Path) -> None:
    (folder / "costs.npz").write_text("no archive")


DAMAGE = (
    half_written, no_text, nested, words_for_rounds, rounds_backwards, half_rounds, no_clients,
    other_costs, costs_of_other_groups, other_partition, no_archive,
)  # fmt: skip


def recorded(found: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "environment.json").write_text(json.dumps(found)) and None


EVERY = {function.__name__: function for function in DAMAGE} | {
    name: recorded(found) for name, found in RECORDS.items()
}


def good_runs(root: Path) -> None:
    for seed, name in enumerate("pq"):
        write_run(root / name, environment={**ENVIRONMENT, "name": name, "seed": seed})


@pytest.mark.parametrize("name", EVERY)
def test_a_report_skips_and_names_what_it_cannot_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good_runs(tmp_path)
    EVERY[name](write_run(tmp_path / "foreign"))
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    (line,) = printed.replace("\n", " ").split("skipped ")[1:]
    assert line.startswith(f"{tmp_path}/foreign: ")
    assert "Comparison of 2 runs" in (tmp_path / "comparison" / "comparison.html").read_text()


@pytest.mark.parametrize("name", EVERY)
def test_the_list_of_runs_names_what_it_cannot_read(name: str, tmp_path: Path) -> None:
    good_runs(tmp_path)
    EVERY[name](write_run(tmp_path / "foreign"))
    page.build(tmp_path / "p")
    assert "foreign" in (tmp_path / "index.html").read_text()


def test_a_fit_beside_all_of_them_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have the names that its own folder would have, so that it looks into all of them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(edited({}))
    for number, damage in enumerate(EVERY.values(), 2):
        folder = write_run(tmp_path / "runs" / f"run-{number}")
        damage(folder)
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "last.ckpt").touch()
    lightfed(["fit", "--config", "run.yaml", "--ckpt_path", "last"])
    assert capsys.readouterr().err == ""
    assert (tmp_path / "runs" / "run" / "index.html").is_file()
    listed = (tmp_path / "runs" / "index.html").read_text()
    assert all(f"run-{number}" in listed for number in range(2, len(EVERY) + 2))


@pytest.mark.parametrize("name", RECORDS)
def test_a_foreign_record_is_none(name: str, tmp_path: Path) -> None:
    EVERY[name](tmp_path)
    assert record.read_record(tmp_path) == {}
    with pytest.raises(UserError, match=r"environment\.json cannot be read"):
        read(tmp_path)


def test_a_run_that_is_gone_is_not_listed(tmp_path: Path) -> None:
    good_runs(tmp_path)
    page.build(tmp_path / "p")
    assert ">q<" in (tmp_path / "index.html").read_text().replace("</a>", "<")


def test_a_line_about_an_older_run_names_its_version_and_commit(tmp_path: Path) -> None:
    stated = {**ENVIRONMENT, "lightfed": "0.1.0", "commit": "abc123"}
    folder = write_run(tmp_path / "old", environment=stated)
    words_for_rounds(folder)
    with pytest.raises(UserError, match=r"written by lightfed 0\.1\.0 \(commit abc123\), this is"):
        read(folder)


def test_runs_of_several_versions_are_said_to_be_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, name in enumerate("pqr"):
        commit = "a" if name == "p" else "b"
        more = {"name": name, "seed": seed, "lightfed": "0.2.0", "commit": commit}
        write_run(tmp_path / name, environment=ENVIRONMENT | more)
    main([str(tmp_path)])
    printed = " ".join(capsys.readouterr().out.split())
    said = "lightfed 0.2.0 (commit b): 2 runs, lightfed 0.2.0 (commit a): 1 run"
    assert f"written by several versions: {said}" in printed


def test_an_option_of_comparisons_is_refused_for_one_run(tmp_path: Path) -> None:
    write_run(tmp_path / "p")
    for words in (["--output", "x"], ["--target", "0.5"], ["--std"], ["--no-group"]):
        with pytest.raises(UserError, match="unrecognized arguments"):
            report([str(tmp_path / "p"), *words])


def test_a_run_without_its_record_has_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "p", environment=None)
    assert report([str(folder)]) == 0
    assert read(folder).costs == {}


@pytest.mark.parametrize(
    "text", ['{"token": "x"}', '{"token": 3, "pid": 1, "host": "h"}', "[" * 100_000, '"x"']
)
def test_a_foreign_owner_of_a_folder_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / run_lock.OWNER).write_text(text)
    run_lock.take(tmp_path, None)
    (tmp_path / run_lock.OWNER).write_text(text)
    run_lock.check(tmp_path)
