"""What sessions cannot honour is refused in one line that names it, and what can be done."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch import callbacks as stock
from lightning.pytorch.callbacks import Callback
from torch.optim import SGD, Adam

from lightfed.algorithms.ditto import Ditto
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.fednova import FedNova
from lightfed.algorithms.fedrep import FedRep
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.scaffold import SCAFFOLD
from lightfed.algorithms.topology.topology import TimeVarying
from lightfed.lightning_fits.hook_table import (
    CALLBACK_HOOKS,
    DATA_HOOKS,
    MODULE_HOOKS,
    acts_on_steps,
)
from lightfed.lightning_fits.session_trainer import SessionHost
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import Phase, RoundPlan
from lightfed.local.penalties import LinearTerm, Pull
from lightfed.trainer import FederatedTrainer
from lightfed.utils.errors import UserError
from tests.promises.parity.cases import CASES, EMA, GAN, Data, Manual, Net, Shrinks
from tests.promises.parity.harness import Case, ours
from tests.small import fleet_of, random_data, run_round


def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """What a hook does here."""


def data() -> Any:
    return random_data([8, 8], features=6, classes=2, batch_size=4)


REFUSED = {
    table_name: [name for name, when in table.items() if when == "refused"]
    for table_name, table in (
        ("module", MODULE_HOOKS), ("callback", CALLBACK_HOOKS), ("data", DATA_HOOKS),
    )
}  # fmt: skip


@pytest.mark.parametrize("hook", REFUSED["module"])
def test_a_hook_of_a_module_that_nothing_would_call(hook: str) -> None:
    kind = type("Has", (Net,), {hook: nothing})
    with pytest.raises(UserError, match=rf"model\.clients\.0\.model: Has overrides {hook}, .*; "):
        fleet_of([ClientGroup(2, kind)], FedAvg(), data())


@pytest.mark.parametrize("hook", REFUSED["callback"])
def test_a_hook_of_a_callback_on_steps_that_nothing_would_call(hook: str) -> None:
    kind = type("Has", (Shrinks,), {hook: nothing})
    with pytest.raises(UserError, match=rf"trainer\.callbacks: Has .*{hook}"):
        FederatedTrainer(callbacks=[kind()])


@pytest.mark.parametrize("hook", REFUSED["data"])
def test_a_hook_of_a_data_module_that_nothing_would_call(hook: str, tmp_path: Path) -> None:
    kind = type("Has", (Data,), {hook: nothing})
    with pytest.raises(UserError, match=rf"data\.dataset\.init_args\.train: Has overrides {hook}"):
        ours(Case(Net, datamodule=kind), FedAvg, tmp_path)


@pytest.mark.parametrize(
    "callback",
    [
        stock.BatchSizeFinder(),
        stock.LearningRateFinder(),
        stock.GradientAccumulationScheduler({0: 2}),
        stock.StochasticWeightAveraging(0.1),
        stock.ModelPruning("l1_unstructured", amount=0.5),
        stock.SpikeDetection(),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_a_callback_that_makes_no_sense_in_sessions(callback: Callback) -> None:
    with pytest.raises(UserError, match=rf"trainer\.callbacks: {type(callback).__name__}"):
        FederatedTrainer(callbacks=[callback])


class WatchesRounds(stock.EarlyStopping):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Rounds have no backward pass."""


def test_a_callback_of_the_run_that_acts_on_steps() -> None:
    with pytest.raises(UserError, match=r"WatchesRounds watches rounds, .*on_after_backward"):
        acts_on_steps(WatchesRounds("loss"))


@pytest.mark.parametrize(
    "callback",
    [
        stock.ModelCheckpoint(), stock.EarlyStopping("loss"), stock.LearningRateMonitor(),
        stock.Timer("00:00:01:00"), stock.RichModelSummary(), stock.TQDMProgressBar(),
        stock.DeviceStatsMonitor(), type("Rounds", (EMA,), {"hears": "rounds"})(), Callback(),
    ],
    ids=lambda callback: type(callback).__name__,
)  # fmt: skip
def test_a_callback_of_the_run_hears_rounds(callback: Callback) -> None:
    assert not acts_on_steps(callback)


@pytest.mark.parametrize(
    ("algorithm", "settings", "part"),
    [
        (SCAFFOLD, {}, "whose rate is its own"),
        (partial(Ditto, 0.1), {}, "a pull"),
        (FedAvg, {"local_penalty": Pull(0.1)}, "a pull"),
        (FedAvg, {"local_penalty": LinearTerm(0.1)}, "a change to gradients"),
        (FedNova, {}, "SGD"),
    ],
)
def test_what_does_not_go_with_manual_optimisation(
    algorithm: Any, settings: Any, part: str
) -> None:
    with pytest.raises(UserError, match=part):
        run_round(fleet_of([ClientGroup(2, GAN)], algorithm(), data(), **settings), 0)


def test_phases_do_not_go_with_manual_optimisation() -> None:
    fleet = fleet_of([ClientGroup(2, Manual)], FedAvg(), data())
    fleet.open_round()
    fleet.send(fleet.algorithm.model, [0])  # type: ignore[attr-defined, arg-type]
    with pytest.raises(UserError, match="Manual optimizes manually, and the method adds phases"):
        fleet.train([0], 0, phases=[Phase(("a.",)), Phase(("b.",))])


def test_an_optimizer_that_steps_by_itself_does_not_go_with_hooks() -> None:
    class Own(Net):
        configure_optimizers = L.LightningModule.configure_optimizers

        def on_after_backward(self) -> None:
            """A fit would be of another optimizer."""

    optimizer: Any = partial(ASPG, lr=0.1)
    with pytest.raises(UserError, match=r"model\.optimizer: ASPG, .*overrides on_after_backward"):
        fleet_of([ClientGroup(2, Own)], FedAvg(), data(), optimizer=optimizer)


class Opens(Net):
    """An attribute that belongs to a client, and cannot be given to another one."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.seen = (x for x in range(3))

    def on_train_start(self) -> None:
        next(self.seen)


def test_an_attribute_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(UserError, match="seen of Opens, a generator"):
        run_round(fleet_of([ClientGroup(2, Opens)], FedAvg(), data()), 0)


class KeepsObject(Net):
    def on_train_start(self) -> None:
        self.own = Path("x")


def test_an_attribute_that_cannot_be_saved_is_named() -> None:
    fleet = fleet_of([ClientGroup(2, KeepsObject)], FedAvg(), data(), keep_optimizer=True)
    with pytest.raises(UserError, match=r"own.* holds more than tensors"):
        run_round(fleet, 0)


class Raises(Net):
    def setup(self, stage: str) -> None:
        raise LookupError("no such file")


def test_a_hook_that_raises_before_the_run_is_one_line() -> None:
    with pytest.raises(UserError, match=r"model\.clients\.0\.model: setup of Raises .*LookupError"):
        fleet_of([ClientGroup(2, Raises)], FedAvg(), data())


def test_packs_say_why_they_are_none() -> None:
    for kind, reason in {
        CASES["AfterBackward"].module: "AfterBackward overrides on_after_backward",
        GAN: "GAN optimizes manually",
        CASES["NoIndex"].module: "training_step of NoIndex takes no batch_idx",
        CASES["NumberOfBatches"].module: "asks for the session's length",
    }.items():
        host = SessionHost(run=L.Trainer(logger=False, enable_checkpointing=False))
        groups = [ClientGroup(2, kind, name="g")]
        fleet = fleet_of(groups, FedAvg(), data(), side_by_side=2, host=host)
        assert reason in str(fleet.training.side_by_side["g"])


def test_a_step_that_asks_for_counts_trains_alone() -> None:
    for name in ("RateBySteps", "CountsBatches", "KeptSteps", "LogsToLoggers"):
        fleet = fleet_of([ClientGroup(2, CASES[name].module)], FedAvg(), data(), side_by_side=2)  # type: ignore[arg-type]
        assert "its step asks the Trainer for" in str(fleet.training.side_by_side)


class ReadsLoop(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + self.trainer.fit_loop.epoch_loop.batch_idx)


class CountsLoader(Net):
    def configure_optimizers(self) -> Any:
        self.trainer.fit_loop.setup_data()
        return SGD(self.parameters(), lr=1 / len(self.trainer.train_dataloader))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ReadsLoop, CountsLoader])
def test_what_the_loops_would_say_is_refused_where_there_are_none(kind: Any) -> None:
    host = SessionHost(run=L.Trainer(logger=False, enable_checkpointing=False))
    with pytest.raises(UserError, match=r"reads the loops .*; use global_step"):
        run_round(fleet_of([ClientGroup(2, kind)], FedAvg(), data(), host=host), 0)


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [SGD(self.a.parameters(), lr=0.1), Adam(self.b.parameters(), lr=0.1)]


def test_two_optimizers_need_manual_optimisation() -> None:
    with pytest.raises(UserError, match=r"2 optimizers .*manually"):
        fleet_of([ClientGroup(2, TwoOptimizers)], FedAvg(), data())


METHODS = {
    "SCAFFOLD": SCAFFOLD,
    "FedRep": partial(FedRep, "b.", 1),
    "Ditto": partial(Ditto, 0.1),
    "DisPFL": partial(DisPFL, TimeVarying(1), rounds=4),
}


@pytest.mark.parametrize("algorithm", METHODS.values(), ids=METHODS)
def test_methods_train_modules_with_hooks(algorithm: Any) -> None:
    """Masks, phases, pulls and changes to gradients reach the steps of a fit."""
    plain = {"configure_optimizers": L.LightningModule.configure_optimizers}
    found = []
    for hooks in ({}, {"on_train_start": nothing}):
        made: Any = type("Own", (Net,), plain | hooks)
        optimizer: Any = partial(SGD, lr=0.1)
        fleet = fleet_of(
            [ClientGroup(2, made)], algorithm(), data(), optimizer=optimizer,
            side_by_side="off", epochs=2, clip=0.5,
        )  # fmt: skip
        fleet.plan = RoundPlan(lr=0.1)
        for t in range(2):
            run_round(fleet, t)
        found.append(torch.stack([fleet.deployed(k).row(k).floats for k in range(2)]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)
