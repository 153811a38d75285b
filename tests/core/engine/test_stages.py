"""Validation, test and prediction of a client are those of Lightning: steps, hooks, their order."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.models import evaluating
from lightfed.trainer import FederatedTrainer
from lightfed.utils.errors import UserError
from tests.small import fit, quiet, random_data

SIZE, BATCH = 7, 3
PLAIN: dict[str, Any] = {"evaluate": ("global",), "optimizer": partial(SGD, lr=0.1)}


class Own(L.LightningModule):
    """Notes its calls; its steps and hooks log, and its hooks change the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        nn.init.constant_(self.layer.weight, 0.1)
        nn.init.constant_(self.layer.bias, 0.2)
        self.calls: list[tuple[Any, ...]] = []

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    @override
    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)

    def evaluated(self, name: str, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        assert not self.training
        self.calls.append((name, len(batch[0]), batch_idx))
        self.log(f"{name}_mean", self(batch[0]).mean())
        return {"seen": batch[0].sum()}

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.evaluated("validation", batch, batch_idx)

    @override
    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.evaluated("test", batch, batch_idx)

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append(("predict", len(batch[0]), batch_idx))
        return self(batch[0])

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("before", len(batch[0])))
        return batch[0] + 1, *batch[1:]

    @override
    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        self.calls.append(("transfer", len(batch[0]), device.type))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("after", len(batch[0])))
        return batch[0] * 2, *batch[1:]


def noted(name: str, logs: bool) -> Any:
    def hook(self: Any, *args: Any) -> None:
        kinds = [len(a[0]) if isinstance(a, list | tuple) else type(a).__name__ for a in args]
        self.calls.append((name, *kinds))
        if logs:
            self.log(name, float(len(self.calls)))

    return hook


for stage in ("validation", "test", "predict"):
    for moment in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end"):
        logs = moment == "epoch_end" and stage != "predict"
        name = f"on_{stage}_{moment}"
        setattr(Own, name, noted(name, logs))
for name in ("on_validation_model_eval", "on_test_model_eval", "on_predict_model_eval"):

    def evaluate(self: Any, name: str = name) -> None:
        self.calls.append((name,))
        self.eval()

    setattr(Own, name, evaluate)
for name in ("on_validation_model_train", "on_test_model_train"):
    setattr(Own, name, noted(name, False))


def lightnings(stage: str) -> tuple[list[Any], dict[str, float], Any]:
    """The calls, what is logged, and the outputs, by Lightning's own Trainer."""
    quiet()
    module, data = Own(), random_data([SIZE])
    data.prepare(clients=1, seed=0, device=torch.device("cpu"))
    x, y = data.test.batch(torch.arange(SIZE))
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    if stage == "predict":
        outputs = trainer.predict(module, loader)
        return module.calls, {}, outputs
    run = trainer.validate if stage == "validation" else trainer.test
    (logged,) = run(module, loader, verbose=False)
    return module.calls, dict(logged), None


@pytest.fixture(scope="module", params=["validation", "test", "predict"])
def stages(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of one stage: Lightning's and ours."""
    quiet()
    federation = Federation(FedAvg(), [ClientGroup(1, Own)], evaluate=("global",))
    data = random_data([SIZE], eval_batch_size=BATCH)
    trainer = FederatedTrainer(
        accelerator="cpu", enable_progress_bar=False, enable_page=False, logger=False,
        default_root_dir=str(tmp_path_factory.mktemp("stages")),
    )  # fmt: skip
    logged, outputs = {}, None
    if request.param == "predict":
        outputs = trainer.predict(federation, data)
    else:
        run = trainer.validate if request.param == "validation" else trainer.test
        (logged,) = run(federation, data, verbose=False)
    module: Any = federation.fleet.groups[0].module
    return lightnings(request.param), (module.calls, logged, outputs)


def test_hooks_are_called_where_lightning_calls_them(stages: Any) -> None:
    (theirs, _, _), (ours, _, _) = stages
    assert ours == theirs


def test_what_is_logged_is_what_lightning_logs(stages: Any) -> None:
    (_, theirs, _), (_, ours, _) = stages
    assert {f"global/{name}": pytest.approx(v, abs=1e-6) for name, v in theirs.items()} == ours


def test_predictions_are_lightnings(stages: Any) -> None:
    (_, _, theirs), (_, _, ours) = stages
    if theirs is not None:
        assert all(map(torch.allclose, theirs, ours))


class Tested(L.LightningModule):
    """It has a test_step alone."""

    __test__ = False  # pytest takes the name for a test

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_metric", torch.tensor(1.5))


class Validated(Tested):
    test_step = L.LightningModule.test_step

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_metric", torch.tensor(2.5))


def run_of(model: Any, folder: Path, **flags: Any) -> tuple[FederatedTrainer, Federation, Any]:
    federation = Federation(
        Standalone(), [ClientGroup(2, model)], **PLAIN | {"evaluate": ("personal",)}
    )
    data = random_data([6, 5])
    return fit(federation, data, folder, **flags), federation, data


def test_a_module_may_have_a_test_step_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Tested has no validation_step; define one"):
        run_of(Tested, tmp_path / "a")
    trainer, federation, data = run_of(Tested, tmp_path / "b", limit_val_batches=0)
    (found,) = trainer.test(federation, data, verbose=False)
    assert found["personal/test_metric"] == 1.5


def test_a_validation_step_tests_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, federation, data = run_of(Validated, tmp_path)
    assert not [r for r in caplog.records if r.name == evaluating.__name__]
    (found,) = trainer.test(federation, data, verbose=False)
    assert found["personal/val_metric"] == 2.5
    (said,) = [r.getMessage() for r in caplog.records if r.name == evaluating.__name__]
    assert said.startswith("Validated has no test_step")


class Both(Tested):
    """A mode of its own in validation, where a round tests sessions, and none in test."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.modes: list[bool] = []

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.modes.append(self.drop.training)
        self.log("val_metric", torch.tensor(2.5))

    @override
    def on_validation_model_eval(self) -> None:
        self.eval()
        self.drop.train()

    @override
    def on_validation_epoch_end(self) -> None:
        self.log("end", 3.0)


@pytest.mark.parametrize("moment", ["trained", "aggregated"])
def test_a_session_s_test_is_a_validation(moment: Any, tmp_path: Path) -> None:
    federation = Federation(
        FedAvg(), [ClientGroup(2, Both)], **PLAIN | {"evaluate": ("personal",)}, evaluate_at=moment
    )
    trainer = fit(federation, random_data([6, 5]), tmp_path, rounds=2)
    module: Any = federation.fleet.groups[0].module
    assert module.modes == [True] * 4
    assert float(trainer.callback_metrics["personal/end"]) == 3.0
