"""The run folder: names, rows and what a restart makes of them."""

import csv
import json
import os
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from lightfed.distributed.collectives import Ranks
from lightfed.runs.checkpoint import main_file
from lightfed.runs.run_logger import RunLogger
from lightfed.utils.errors import UserError
from tests.small import CPU


def logger_of(folder: Path, name: str = "run") -> RunLogger:
    logger = RunLogger(str(folder), name)
    logger.place.claim(Ranks(CPU))
    return logger


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(None not in row and None not in row.values() for row in rows), "ragged rows"
    return rows


def log_round(logger: RunLogger, number: int, **metrics: float) -> None:
    logger.log_metrics({"epoch": 9.0, **metrics}, number - 1)
    logger.end_round(number)


def checkpoint_in(folder: Path, *, age: int = 0) -> Path:
    path = folder / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    moment = 10**18 - age
    os.utime(path, ns=(moment, moment))
    return path


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    names = [logger_of(tmp_path).name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_a_folder_of_ones_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert logger_of(Path("~/runs")).folder == tmp_path / "runs" / "run"
    path = checkpoint_in(tmp_path / "runs" / "run")
    assert main_file("~/runs/run/checkpoints/last.ckpt") == path


@pytest.mark.parametrize("name", ["", "a/b", "..", "/runs"])
def test_a_name_is_a_plain_folder_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.logger\.init_args\.name"):
        RunLogger(str(tmp_path), name)


def test_a_row_holds_what_was_logged_in_its_round(tmp_path: Path) -> None:
    logger = logger_of(tmp_path)
    logger.start({"seed": 3}, finished_rounds=0)
    logger.log_metrics({"lr": 0.5}, 0)
    log_round(logger, 1, loss=2.0)
    log_round(logger, 2, loss=1.0, lr=0.25)
    assert rows_of(logger.folder / "metrics.csv") == [
        {"round": "1", "lr": "0.5", "loss": "2.0"},
        {"round": "2", "lr": "0.25", "loss": "1.0"},
    ]
    environment = json.loads((logger.folder / "environment.json").read_text())
    assert environment == {"name": "run", "seed": 3}


@pytest.mark.parametrize("name", ["round", "seconds"])
def test_a_metric_cannot_replace_a_column_of_the_table(name: str, tmp_path: Path) -> None:
    logger = logger_of(tmp_path)
    logger.start({}, finished_rounds=0)
    log_round(logger, 1, loss=2.0, seconds=3.0)
    with pytest.raises(UserError, match=rf"trainer\.logger: 7\.0 and \S+ for {name}, a column"):
        logger.log_metrics({name: 7.0}, 0)
    row = {"round": "1", "loss": "2.0", "seconds": "3.0"}
    assert rows_of(logger.folder / "metrics.csv") == [row]


def test_what_a_user_logs_as_with_other_loggers_is_kept(tmp_path: Path) -> None:
    """Without a step; as a tensor, which would be cut off; parameters beside the configuration."""
    logger, config = logger_of(tmp_path), {"trainer": {}, "model": {"seed": 3}, "data": {}}
    logger.log_hyperparams(config)
    logger.log_hyperparams({"seed": 4})
    for number in (1, 2):
        logger.log_metrics({"share": torch.tensor(number / 3, dtype=torch.float64)})
        log_round(logger, number, loss=2.0)
    logger.log_metrics({"last": 7.0})
    logger.finalize("success")
    assert rows_of(logger.folder / "metrics.csv") == [
        {"round": "1", "loss": "2.0", "share": str(1 / 3), "last": ""},
        {"round": "2", "loss": "2.0", "share": str(2 / 3), "last": "7.0"},
    ]
    assert yaml.safe_load((logger.folder / "config.yaml").read_text()) == config
    assert (logger.folder / "hparams.yaml").read_text() == "seed: 4\n"


def test_a_new_column_is_given_to_the_rows_before_it(tmp_path: Path) -> None:
    logger = logger_of(tmp_path)
    log_round(logger, 1, loss=2.0)
    log_round(logger, 2, loss=1.0)
    log_round(logger, 3, loss=0.5, accuracy=0.9)
    log_round(logger, 4, loss=0.25)
    rows = rows_of(logger.folder / "metrics.csv")
    assert [row["round"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["accuracy"] for row in rows] == ["", "", "0.9", ""]


def stopped_run(folder: Path, *, rounds: int = 4) -> RunLogger:
    """A run that was killed after so many rounds."""
    logger = logger_of(folder)
    logger.start({}, finished_rounds=0)
    for number in range(1, rounds + 1):
        logger.log_clients([{"round": number, "client": k, "accuracy": number} for k in (0, 1)])
        log_round(logger, number, loss=1.0 / number)
    return logger


def resumed(folder: Path, *, finished: int) -> RunLogger:
    logger = RunLogger(str(folder), "run")
    logger.place.resume_from(checkpoint_in(folder / "run"))
    logger.place.claim(Ranks(CPU))
    logger.start({}, finished_rounds=finished)
    return logger


@pytest.mark.parametrize("finished", [0, 2])
def test_a_resumed_run_keeps_the_rows_of_finished_rounds_and_replays_the_others(
    finished: int, tmp_path: Path
) -> None:
    stopped_run(tmp_path)
    logger = resumed(tmp_path, finished=finished)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    numbers = range(finished + 1, 6)
    for number in numbers:
        logger.log_clients([{"round": number, "client": k, "accuracy": -number} for k in (0, 1)])
        log_round(logger, number, loss=-1.0)
    rows = rows_of(logger.folder / "metrics.csv")
    assert [row["round"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row["loss"] for row in rows] == [*["1.0", "0.5"][:finished], *["-1.0"] * len(numbers)]
    clients = rows_of(logger.folder / "clients.csv")
    accuracies = [*range(1, finished + 1), *(-number for number in numbers)]
    assert [row["accuracy"] for row in clients] == [str(n) for n in accuracies for _ in (0, 1)]


@pytest.mark.parametrize("torn", ["5", "5,0.", "1", ""])
def test_a_torn_last_line_is_no_row(tmp_path: Path, torn: str) -> None:
    logger = stopped_run(tmp_path)
    for name in ("metrics.csv", "clients.csv"):
        with (logger.folder / name).open("a") as file:
            file.write(torn)
    logger = resumed(tmp_path, finished=4)
    log_round(logger, 5, loss=9.0)
    logger.log_clients([{"round": 5, "client": 0, "accuracy": 1.0}])
    rows = rows_of(logger.folder / "metrics.csv")
    assert [row["loss"] for row in rows] == ["1.0", "0.5", str(1.0 / 3), "0.25", "9.0"]
    assert [row["round"] for row in rows_of(logger.folder / "clients.csv")] == list("112233445")


def test_last_is_the_newest_run_of_the_name(tmp_path: Path) -> None:
    for age, name in ((5, "run"), (1, "run"), (3, "run"), (0, "runner"), (0, "run-x")):
        logger = logger_of(tmp_path, name)
        logger.start({}, finished_rounds=0)
        checkpoint_in(logger.folder, age=age)
    logger = RunLogger(str(tmp_path), "run")
    assert (
        logger.place.resume_newest(trains=True) == tmp_path / "run-2" / "checkpoints" / "last.ckpt"
    )
    logger.place.claim(Ranks(CPU))
    assert logger.folder == tmp_path / "run-2"


def test_last_is_not_a_run_of_a_name_that_ends_in_a_number(tmp_path: Path) -> None:
    for age, name in ((5, "run"), (1, "run-2")):
        logger = logger_of(tmp_path, name)  # run-2 is this one's own name, not the second `run`
        logger.start({}, finished_rounds=0)
        checkpoint_in(logger.folder, age=age)
    newest = RunLogger(str(tmp_path), "run").place.resume_newest(trains=True)
    assert newest == tmp_path / "run" / "checkpoints" / "last.ckpt"


def test_without_a_run_last_is_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()  # died before its first checkpoint
    logger = RunLogger(str(tmp_path), "run")
    assert logger.place.resume_newest(trains=True) is None
    logger.place.claim(Ranks(CPU))
    assert logger.name == "run-2"


def test_a_checkpoint_from_elsewhere_starts_a_run_of_its_own(tmp_path: Path) -> None:
    foreign = checkpoint_in(tmp_path / "copied" / "run")
    logger = RunLogger(str(tmp_path / "runs"), "run")
    assert logger.place.resume_from(foreign) == foreign
    logger.place.claim(Ranks(CPU))
    assert logger.folder == tmp_path / "runs" / "run"


@pytest.mark.parametrize(
    ("has", "left"),
    [("", []), ("its start", []), ("sessions", ["run"]), ("a round", ["run"])],
)
def test_a_run_that_fails_with_nothing_to_go_on_from_leaves_no_folder(
    tmp_path: Path, has: str, left: list[str]
) -> None:
    logger = logger_of(tmp_path)
    logger.start({}, finished_rounds=0)
    if has:
        start = checkpoint_in(logger.folder)
    if has == "sessions":
        start.with_name("sessions.ckpt").touch()
    elif has == "a round":
        log_round(logger, 1, loss=1.0)
    logger.finalize("failed")
    assert [p.name for p in tmp_path.iterdir()] == left


def test_a_failed_resume_leaves_the_run_it_came_from(tmp_path: Path) -> None:
    stopped_run(tmp_path)
    logger = RunLogger(str(tmp_path), "run")
    logger.place.resume_from(checkpoint_in(tmp_path / "run"))
    logger.place.claim(Ranks(CPU))
    logger.finalize("failed")
    assert len(rows_of(tmp_path / "run" / "metrics.csv")) == 4
