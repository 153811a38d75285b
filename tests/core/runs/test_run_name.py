"""A run without a name is named by its algorithm, data set and seed."""

from functools import partial
from pathlib import Path

import pytest
import torch

import lightfed as lf
from lightfed.lab.report.comparison import provisos
from lightfed.lab.report.tables import headline
from lightfed.lab.results.run import read
from lightfed.runs.run_logger import RunLogger
from tests.small import quiet


def _federation(seed: int, lr: float = 0.1) -> lf.Federation:
    sgd = partial(torch.optim.SGD, lr=lr)
    groups = [lf.ClientGroup(2, lf.MLP)]
    return lf.Federation(lf.FedAvg(), clients=groups, optimizer=sgd, local_steps=1, seed=seed)


def _trainer(rounds: int, name: str | None = None) -> lf.FederatedTrainer:
    return lf.FederatedTrainer(
        max_epochs=rounds, accelerator="cpu", name=name, enable_page=False, limit_val_batches=1
    )


def test_a_run_says_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet()
    monkeypatch.chdir(tmp_path)
    data = lf.FederatedDataModule(lf.Digits(), lf.Iid())
    for name in (None, "mine"):
        _trainer(1, name).fit(_federation(3), datamodule=data)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"FedAvg-Digits-s3", "mine"}
    _trainer(2).fit(_federation(3), data, ckpt_path="last")
    rows = (tmp_path / "runs" / "FedAvg-Digits-s3" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3


def test_last_is_of_the_same_arguments_in_a_script_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quiet()
    monkeypatch.chdir(tmp_path)
    data = lf.FederatedDataModule(lf.Digits(), lf.Iid())
    for lr in (0.1, 0.2):
        trainer = _trainer(1, "mine")
        trainer.fit(_federation(3, lr), data, ckpt_path="last")
        assert len(trainer.results.rounds) == 1
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"mine", "mine-2"}
    with caplog.at_level("WARNING", logger="lightfed"):
        _trainer(2).fit(_federation(3, 0.3), data, ckpt_path="runs/mine/checkpoints/last.ckpt")
    assert "mine was trained with another configuration so far" in caplog.text
    _trainer(3).fit(_federation(3, 0.3), data, ckpt_path="runs/mine/checkpoints/last.ckpt")
    mixed = {name: headline(read(Path("runs", name))) for name in ("mine", "mine-2")}
    assert [name for name, line in mixed.items() if "other settings" in line] == ["mine"]
    runs = [read(Path("runs", name)) for name in mixed]
    assert provisos(runs, runs) == ["other settings in some rounds: mine"]


def test_a_name_is_a_plain_folder_name(tmp_path: Path) -> None:
    logger = RunLogger(str(tmp_path))
    logger.name_run("FedAvg", "flowers & more.csv", "s0")
    assert logger.name == "FedAvg-flowers-more.csv-s0"
