"""What a script does around a fit: prints its data, reads hyper-parameters, changes its folder."""

import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

import lightfed as lf
from lightfed.distributed.slurm import check_tasks
from lightfed.utils.errors import UserError
from tests.small import fit, random_data

SGD_TENTH = partial(SGD, lr=0.1)
# As `salloc --ntasks=1 -J work` leaves it in a shell of the login node.
SALLOC = {
    "SLURM_JOB_ID": "77", "SLURM_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "work",
}  # fmt: skip


def test_a_shell_of_salloc_is_refused_in_one_line() -> None:
    with pytest.raises(UserError) as refused:
        check_tasks(SALLOC, accelerator="cpu", gpus=0)
    assert refused.value.key == "srun"
    batch = SALLOC | {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}
    check_tasks(batch, accelerator="cpu", gpus=0)
    check_tasks(SALLOC | {"SLURM_JOB_NAME": "interactive"}, accelerator="cpu", gpus=0)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(self.body(x)))


@pytest.mark.parametrize("method", [lf.FedPer, lf.FedRep])
def test_a_head_may_be_several_layers(method: Any, tmp_path: Path) -> None:
    algorithm = method(head=["net.head", "net.last"])
    federation = lf.Federation(algorithm, [lf.ClientGroup(2, TwoLayers)], optimizer=SGD_TENTH)
    fit(federation, random_data([6, 6]), tmp_path, rounds=1)
    rows = [federation.fleet.row(client).floats for client in (0, 1)]
    layout = federation.fleet.groups[0].layout.floats
    own = [layout.views(row)["net.head.weight"] for row in rows]
    assert not own[0].equal(own[1])


class Reads(L.LightningModule):
    """Reads its hyper-parameters in a step; without `save_hyperparameters` there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert not self.hparams
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])


def test_reading_hyper_parameters_is_no_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = lf.Federation(
        lf.FedAvg(), [lf.ClientGroup(2, Reads)], optimizer=SGD_TENTH, evaluate=[]
    )
    with caplog.at_level(logging.WARNING):
        fit(federation, random_data([6, 6]), tmp_path, rounds=1)
    assert "its steps change" not in caplog.text


def test_the_data_print_after_a_fit(tmp_path: Path) -> None:
    federation = lf.Federation(lf.FedAvg(), [lf.ClientGroup(2, TwoLayers)], optimizer=SGD_TENTH)
    data = random_data([6, 6])
    fit(federation, data, tmp_path, rounds=1)
    assert "Tensors" in str(data)


SCRIPT = """
import os
from functools import partial
import lightfed as lf
from torch.optim import SGD

os.chdir("work")
clients = [lf.ClientGroup(3, lf.SimpleCNN)]
federation = lf.Federation(lf.FedAvg(), clients, optimizer=partial(SGD, lr=0.1), evaluate=[])
trainer = lf.FederatedTrainer(
    max_epochs=1, devices=2, accelerator="cpu", enable_page=False, limit_train_batches=1
)
trainer.fit(federation, lf.FederatedDataModule(lf.Digits(), lf.Iid()))
if trainer.is_global_zero:
    print("ranks:", trainer.strategy.ranks.world)
"""


def test_a_script_that_changes_its_folder_trains_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    # Where Lightning's ranks met in an earlier test of this process; these meet elsewhere.
    met = {"MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"}
    environment = {name: value for name, value in os.environ.items() if name not in met}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**environment, "PWD": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    assert "ranks: 2" in done.stdout, done.stderr[-2000:]
    assert (tmp_path / "work" / "runs").is_dir()
