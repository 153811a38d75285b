"""Callbacks of the run that are about the clients' modules, or come from them."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import callbacks as stock
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from tests.promises.parity.cases import Net
from tests.small import fit, random_data


def data() -> Any:
    return random_data([8, 8, 8], features=6, classes=2, batch_size=4)


@pytest.mark.parametrize("kind", [stock.RichModelSummary, stock.ModelSummary])
def test_a_summary_shows_the_networks_of_all_groups(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = [ClientGroup(2, Net, name="small"), ClientGroup(1, Net, name="others")]
    federation = Federation(Standalone(), groups, evaluate=())
    fit(federation, data(), tmp_path, callbacks=[kind(max_depth=2)])
    shown = capsys.readouterr().out
    for name in ("small", "others", "small.a"):
        assert name in shown
    assert "148" in shown  # 2 x (6 x 8 + 8 + 8 x 2 + 2) parameters


class Stops(Net):
    """It brings a callback that ends the run, and one for its steps."""

    @override
    def configure_callbacks(self) -> list[Callback]:
        return [stock.EarlyStopping("train_loss", patience=0, min_delta=1e9), Steps()]


class Steps(Callback):
    seen: list[Any] = []

    @override
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        Steps.seen.append((trainer.round, type(pl_module).__name__))


def test_callbacks_that_a_module_configures_are_those_of_the_run(tmp_path: Path) -> None:
    Steps.seen.clear()
    federation = Federation(FedAvg(), [ClientGroup(3, Stops)], evaluate=())
    trainer = fit(federation, data(), tmp_path, rounds=5)
    assert trainer.current_epoch == 2
    assert Steps.seen == [(t, "Stops") for t in range(2) for _ in range(3 * 2)]


def test_a_module_s_callback_takes_the_place_of_one_of_its_class(tmp_path: Path) -> None:
    other = stock.EarlyStopping("train_loss", patience=50)
    federation = Federation(FedAvg(), [ClientGroup(3, Stops)], evaluate=())
    trainer = fit(federation, data(), tmp_path, rounds=5, callbacks=[other])
    assert trainer.current_epoch == 2


def test_hooks_come_once_for_each_live_module(tmp_path: Path) -> None:
    calls: list[str] = []

    class Once(Net):
        @override
        def prepare_data(self) -> None:
            calls.append("prepare_data")

        @override
        def setup(self, stage: str) -> None:
            calls.append(f"setup {TrainerFn(stage).value} {self.trainer.global_rank}")

        @override
        def configure_model(self) -> None:
            calls.append("configure_model")

        @override
        def teardown(self, stage: str) -> None:
            calls.append(f"teardown {TrainerFn(stage).value}")

    groups = [ClientGroup(2, Once), ClientGroup(1, Once)]
    fit(Federation(FedAvg(), groups, evaluate=()), data(), tmp_path, rounds=3)
    begins = ["prepare_data", "setup fit 0", "configure_model"]
    assert calls == 2 * begins + 2 * ["teardown fit"]


def test_stopping_a_session_ends_that_session_alone(tmp_path: Path) -> None:
    steps: list[int] = []

    class StopsAtOnce(Net):
        @override
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            steps.append(self.global_step)
            self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    federation = Federation(FedAvg(), [ClientGroup(3, StopsAtOnce)], evaluate=(), local_epochs=2)
    trainer = fit(federation, data(), tmp_path, rounds=2)
    assert trainer.current_epoch == 2
    assert steps == [0, 0, 0, 1, 1, 1]
