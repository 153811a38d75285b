"""Networks and modules of a user that cannot be trained: one line names group and cause."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.standalone import Standalone
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.trainer import FederatedTrainer
from lightfed.utils.errors import UserError
from tests.small import SGD_HALF, Line, fit, fleet_of, random_data


class Net(nn.Module):
    """Whatever a forward pass may return by mistake."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.answer = answer

    @override
    def forward(self, x: Tensor) -> Any:
        return self.answer(self.layer(x))


class Own(Line):
    """A module with an optimiser of its own."""

    def __init__(self, configure: Any) -> None:
        super().__init__([0.0] * 4)
        self.configure = configure

    @override
    def configure_optimizers(self) -> Any:
        return self.configure(self.parameters())


def fails(parameters: Any) -> Any:
    raise KeyError("lr")


MISTAKES = {
    "None": (lambda: Net(lambda y: None), "its forward returns a NoneType"),
    "raises": (lambda: Net(lambda y: y[:, 9]), "cannot take samples"),
    "no parameters": (nn.Identity, "no parameters|shape"),
    "no optimiser": (lambda: Own(fails), "configure_optimizers of Own: KeyError"),
}


@pytest.mark.parametrize(("model", "found"), MISTAKES.values(), ids=MISTAKES)
def test_a_model_that_cannot_train_is_one_line(model: Any, found: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.clients\.0\.model: .*({found})"):
        fleet_of([ClientGroup(1, model)], Standalone(), random_data([4]))


def test_an_optimizer_that_no_module_uses_is_refused(tmp_path: Path) -> None:
    own = [ClientGroup(1, lambda: Own(lambda p: torch.optim.SGD(p, lr=0.1)))]
    federation = Federation(Standalone(), own, optimizer=SGD_HALF, evaluate=[])
    with pytest.raises(UserError, match=r"^model\.optimizer: given, but the modules of all"):
        fit(federation, random_data([4]), tmp_path)


class Validates(L.LightningModule):
    """A module that cannot be tested on the second client."""

    tested = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        Validates.tested += 1
        if Validates.tested == 2:
            raise ValueError("a bad sample")
        self.log("loss", self.training_step(batch, batch_idx))


def test_a_client_that_cannot_be_tested_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [ClientGroup(3, Validates)]
    federation = Federation(Standalone(), groups, optimizer=SGD_HALF, evaluate=["personal"])
    with caplog.at_level("WARNING", logger="lightfed"):
        trainer = fit(federation, random_data([4, 4, 4]), tmp_path)
    assert "client 1 is skipped in the personal metrics: ValueError: a bad sample" in caplog.text
    assert [*trainer.results.clients.dropna(subset="loss")["client"]] == [0, 2]


def test_callbacks_of_a_single_loop_are_refused() -> None:
    callback = GradientAccumulationScheduler({0: 2})
    with pytest.raises(UserError, match=r"^trainer\.callbacks: GradientAccumulationScheduler"):
        FederatedTrainer(callbacks=callback, accelerator="cpu", logger=False)
