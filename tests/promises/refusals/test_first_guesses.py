"""What a user of Lightning tries first from Python: it works, or one line says what to do."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import lightfed as lf
from lightfed.cli import command_line
from lightfed.utils.errors import UserError
from tests.small import quiet


def samples(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(4.0 * count).view(count, 4), torch.arange(count) % 2)


class Data(L.LightningDataModule):
    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(16), batch_size=4)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(8), batch_size=4)


class Net(nn.Linear):
    def __init__(self, lr: float = 0.1, rate: float = 1.0) -> None:
        super().__init__(4, 2)
        self.lr = lr


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    @override
    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)


def federation(model: Any = Net, **given: Any) -> lf.Federation:
    sgd = {"optimizer": partial(SGD, lr=0.1)} if model is not Module else {"evaluate": ()}
    return lf.Federation(lf.FedAvg(), [lf.ClientGroup(2, model)], **sgd | given)


def trainer(folder: Path, **given: Any) -> lf.FederatedTrainer:
    quiet()
    shown: Any = {"enable_page": False, "enable_progress_bar": False}
    given = {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": str(folder)} | given
    return lf.FederatedTrainer(**shown, **given)


def data(dataset: Any = None) -> lf.FederatedDataModule:
    return lf.FederatedDataModule(dataset or Data(), lf.Iid(), batch_size=4)


GUESSES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a data set": (lambda at: data(samples(8)), "data.dataset.init_args.test", "FromTorch(train"),
    "fit: a data set": (
        lambda at: trainer(at).fit(federation(), samples(8)), "data", "FederatedDataModule(",
    ),
    "fit: a loader": (
        lambda at: trainer(at).fit(federation(), train_dataloaders=DataLoader(samples(8))),
        "data", "FederatedDataModule(",
    ),
    "fit: a data module": (
        lambda at: trainer(at).fit(federation(), datamodule=Data()), "data", "FederatedDataModule(",
    ),
    "fit: no data": (lambda at: trainer(at).fit(federation()), "data", "FederatedDataModule("),
}  # fmt: skip


@pytest.mark.parametrize(("guess", "key", "fix"), GUESSES.values(), ids=GUESSES)
def test_a_first_guess_is_answered_by_a_line(
    guess: Callable[[Path], Any], key: str, fix: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        guess(tmp_path)
    assert refused.value.key == key
    assert fix in refused.value.fix
    assert len(str(refused.value)) < 400


def test_a_run_takes_a_data_module_and_callbacks_of_lightning(tmp_path: Path) -> None:
    watching = [
        EarlyStopping("global/loss"),
        LearningRateMonitor(),
        ModelCheckpoint(monitor="step"),
    ]
    run, model = trainer(tmp_path, callbacks=watching), federation(model=lambda: Net())
    run.fit(model, data())
    assert model.fleet.data.num_samples(0) == 8


class Numbers(lf.Dataset):
    classes = ("even", "odd")
    input_shape = (4,)
    transform = lf.Transform((0.0,), (1.0,))

    def __init__(self, count: int = 4) -> None:
        self.count = count

    @override
    def load(self, split: Any) -> lf.Samples:
        return lf.Samples(*samples(self.count).tensors)


def test_the_configuration_of_a_script_runs_again(tmp_path: Path) -> None:
    step = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    groups = [lf.ClientGroup(2, Net), lf.ClientGroup(2, partial(Net, lr=0.5), name="other")]
    sgd = partial(SGD, lr=0.1, momentum=0.9)
    model = lf.Federation(lf.FedAvg(), groups, optimizer=sgd, lr_schedule=step, local_steps=2)
    run = trainer(tmp_path, name="script", max_epochs=2)
    run.fit(model, lf.FederatedDataModule(Numbers(count=16), lf.Quantity(2.0), batch_size=4))
    config = tmp_path / "script" / "config.yaml"
    command_line.main(["fit", "--config", str(config), "--trainer.name", "again"])
    tables = [(tmp_path / name / "clients.csv").read_text() for name in ("script", "again")]
    assert tables[0] == tables[1] != ""
