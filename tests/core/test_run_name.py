"""A run without a name is named by its algorithm, data set and seed."""

from functools import partial
from pathlib import Path

import pytest
import torch

import lightfed as lf
from lightfed.runs.run_logger import RunLogger
from tests.small import quiet


def _federation(seed: int) -> lf.Federation:
    sgd = partial(torch.optim.SGD, lr=0.1)
    groups = [lf.ClientGroup(2, lf.MLP)]
    return lf.Federation(lf.FedAvg(), clients=groups, optimizer=sgd, local_steps=1, seed=seed)


def test_a_run_says_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet()
    monkeypatch.chdir(tmp_path)
    data = lf.FederatedDataModule(lf.Digits(), lf.Iid())
    for name in (None, "mine"):
        trainer = lf.FederatedTrainer(
            max_epochs=1, accelerator="cpu", name=name, enable_page=False, limit_val_batches=1
        )
        trainer.fit(_federation(3), datamodule=data)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"FedAvg-Digits-s3", "mine"}
    again = lf.FederatedTrainer(max_epochs=2, accelerator="cpu", enable_page=False)
    again.fit(_federation(3), data, ckpt_path="last")
    rows = (tmp_path / "runs" / "FedAvg-Digits-s3" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3


def test_a_name_is_a_plain_folder_name(tmp_path: Path) -> None:
    logger = RunLogger(str(tmp_path))
    logger.name_run("FedAvg", "flowers & more.csv", "s0")
    assert logger.name == "FedAvg-flowers-more.csv-s0"
