"""A client whose session raises is named and left out; the others do not notice."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.flexifed.strategies import MaxCommon
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.peers.my1 import My1
from lightfed.algorithms.pfedmoe.fedkd import FedKD
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.topology.topology import Ring
from lightfed.api.fleet import Fleet
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.models.client_module import ClientModule
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.core.local.test_abandoned import breaks
from tests.small import Line, data_of, fit, fleet_of, random_data, run_round

SIZES = [6, 4, 9, 5]
BROKEN = 2
MARK = 1e6
mlp = partial(MLP, hidden=(6,))


class Picky(ClientModule):
    """Raises at a batch with a marked sample, as many times as the test says."""

    error: Callable[[], Exception] = partial(ValueError, "a sample\nit cannot take")

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(mlp(num_classes, input_shape), num_classes=num_classes)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.log("seen", float(batch[0].max() >= MARK))
        if batch[0].max() >= MARK:
            raise self.error()
        return super().training_step((batch[0].clamp(max=1.0), batch[1]), batch_idx)


def broken_data(clients: tuple[int, ...] = (BROKEN,)) -> Any:
    """All samples of some clients are marked."""
    clean = random_data(SIZES)
    x, y = clean.dataset.load("train").x.clone(), clean.dataset.load("train").y
    starts = [sum(SIZES[:k]) for k in range(len(SIZES))]
    parts = [range(s, s + n) for s, n in zip(starts, SIZES, strict=True)]
    for client in clients:
        x[list(parts[client]), 0] = MARK
    return data_of(x, y, parts, batch_size=3)


def picky_fleet(algorithm: Any, **settings: Any) -> Fleet:
    broken = settings.pop("clients", (BROKEN,))
    return fleet_of(
        [ClientGroup(4, Picky)], algorithm, broken_data(broken),
        optimizer=partial(SGD, lr=0.1, momentum=0.9), **settings,
    )  # fmt: skip


def picky_run(folder: Path, data: Any, **settings: Any) -> Any:
    """The trainer of a run of four clients."""
    settings = {"optimizer": partial(SGD, lr=0.1)} | settings
    rounds = settings.pop("rounds", 1)
    groups = [ClientGroup(4, settings.pop("model", Picky))]
    return fit(Federation(FedAvg(), groups, **settings), data, folder, rounds=rounds)


def test_the_others_train_as_if_the_failing_client_had_not_been_drawn() -> None:
    found = []
    for drawn in (range(4), [0, 1, 3]):
        algorithm = FedAvg()
        fleet = picky_fleet(algorithm)
        fleet.participants = lambda t, drawn=drawn: list(drawn)  # type: ignore[method-assign,misc]
        for t in range(2):
            metrics = run_round(fleet, t)
        found.append((algorithm.model.floats.tolist(), metrics["train_loss"], metrics["seen"]))
        counted = metrics["participants"], metrics["excluded"]
        assert counted == ((4.0, 1.0) if len(drawn) == 4 else (3.0, 0.0))
    assert found[0] == found[1]
    assert found[0][2] == 0.0, "nothing of the failed session is in the next one's figures"


def test_who_fails_receives_but_sends_nothing() -> None:
    fleet = picky_fleet(FedAvg())
    run_round(fleet, 0)
    up, down, flops = fleet.ledger.totals[BROKEN]
    assert up == 0
    assert flops == 0
    assert down == fleet.ledger.totals[0, 1] > 0
    assert fleet.ledger.totals[0, 0] > 0
    assert not fleet.usable(BROKEN)


@pytest.mark.parametrize("up", [3, [1, 2, 4, 8]])
@pytest.mark.parametrize("down", [5, [10, 20, 40, 80]])
def test_who_fails_is_charged_for_what_it_receives_alone(up: Any, down: Any) -> None:
    fleet = picky_fleet(FedAvg())
    fleet.open_round()
    fleet.algorithm.round(fleet, 0)
    before = fleet.ledger.totals.copy()

    fleet.charge(range(4), up=up, down=down)

    sent, received, flops = (fleet.ledger.totals - before).T.tolist()
    each_up = [up] * 4 if isinstance(up, int) else up
    assert sent == [0 if client == BROKEN else each_up[client] for client in range(4)]
    assert received == ([down] * 4 if isinstance(down, int) else down)
    assert flops == [0] * 4


@pytest.mark.parametrize(
    "algorithm",
    [
        partial(DisPFL, Ring(), rounds=4), partial(My1, Ring(), rounds=4), MaxCommon,
        partial(FedKD, mlp, rounds=4), Standalone,
    ],
)  # fmt: skip
def test_algorithms_whose_clients_keep_rows_go_on_with_one_that_fails(algorithm: Any) -> None:
    kept = algorithm()
    if isinstance(kept, FedKD):  # takes networks: what fails is the first batch's loss
        fleet = fleet_of([ClientGroup(4, mlp)], kept, random_data(SIZES, batch_size=3))
        breaks(fleet, BROKEN)
    else:
        fleet = picky_fleet(kept)
    for t in range(3):
        metrics = run_round(fleet, t)
        assert metrics["excluded"] == 1.0
    assert all(fleet.row(k).floats.isfinite().all() for k in range(4))
    assert fleet.ledger.totals[BROKEN, 2] == 0.0


class Later(Line):
    """Fails at its third step."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise RuntimeError("out of memory")
        return super().training_step(batch, batch_idx)


def test_a_row_that_is_kept_stays_as_far_as_it_came() -> None:
    whole, fails = (
        fleet_of(
            [ClientGroup(1, Later), ClientGroup(1, Line)], Standalone(),
            data_of(torch.ones(8, 2), torch.arange(8), [range(4), range(4, 8)], batch_size=1),
            optimizer=partial(SGD, lr=0.01), steps=steps,
        )
        for steps in (2, 4)
    )  # fmt: skip
    assert [run_round(fleet, 0)["excluded"] for fleet in (whole, fails)] == [0.0, 1.0]
    assert whole.row(0).floats.any()
    assert torch.equal(fails.row(0).floats, whole.row(0).floats)


@pytest.mark.parametrize("store", ["device", "host"])
def test_a_run_names_who_fails_and_why(
    store: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="lightfed"):
        picky_run(tmp_path, broken_data(), rounds=2, store=store)
    lines = [r.message for r in caplog.records if "is skipped" in r.message]
    said = f"client {BROKEN} is skipped: ValueError: a sample it cannot take"
    place = [line.rpartition(" (")[0::2] for line in lines]
    assert [line for line, _ in place] == [f"round {t}: {said}" for t in range(2)]
    assert all(f"{Path(__file__).name}:" in where for _, where in place)
    assert not [r for r in caplog.records if r.exc_info and r.levelno > logging.DEBUG]
    (log,) = tmp_path.rglob("error.log")
    assert log.read_text().count("Traceback") == 1, "one traceback a run"


def test_a_session_before_an_evaluation_may_fail_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    figures = []
    for broken in ((BROKEN,), ()):
        settings: Any = {"optimizer": partial(SGD, lr=0.0), "evaluate": ("finetuned",)}
        trainer = picky_run(tmp_path, broken_data(broken), **settings)
        figures.append(trainer.callback_metrics["finetuned/loss"])
    said = f"client {BROKEN} is skipped in the finetuned metrics: ValueError: a sample it cannot"
    assert len([r for r in caplog.records if said in r.message]) == 1
    assert figures[0].isfinite()
    assert figures[0] != figures[1]


@pytest.mark.parametrize(("allowed", "ends"), [(0, True), (1, True), (2, False), (None, False)])
def test_a_run_ends_when_more_fail_than_may(
    allowed: int | None, ends: bool, tmp_path: Path
) -> None:
    said = r"max_failed_clients: 2 of 4 sessions of round 0 failed \(client 1: ValueError: a"
    with pytest.raises(UserError, match=said) if ends else nullcontext():
        picky_run(tmp_path, broken_data((1, 2)), max_failed_clients=allowed)


@pytest.mark.usefixtures("unchecked_data")
def test_an_update_that_is_not_finite_counts_as_well(tmp_path: Path) -> None:
    data = random_data(SIZES)
    data.dataset.load("train").x[0] = float("nan")
    with pytest.raises(UserError, match=r"client 0: its update is not finite"):
        picky_run(tmp_path, data, model=mlp, max_failed_clients=0)


def test_a_lone_session_that_raises_ends_the_run_unless_it_may_fail(tmp_path: Path) -> None:
    settings: Any = {"clients_per_round": 1, "rounds": 2}
    with pytest.raises(UserError, match="1 of 1 sessions of round 0 failed") as error:
        picky_run(tmp_path, broken_data((0, 1, 2, 3)), **settings)
    assert error.value.key == "model.max_failed_clients"
    picky_run(tmp_path / "1", broken_data((0, 1, 2, 3)), max_failed_clients=1, **settings)


@pytest.mark.usefixtures("unchecked_data")
def test_a_round_without_a_usable_update_ends_the_run_whatever_may_fail(tmp_path: Path) -> None:
    data = broken_data((0, 1, 2))
    data.dataset.load("train").x[-1] = float("nan")
    with pytest.raises(UserError, match="4 of 4 sessions of round 0 failed") as error:
        picky_run(tmp_path, data, max_failed_clients=4)
    assert error.value.key == "model.max_failed_clients"


def test_a_refusal_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Picky, "error", partial(UserError, "data.root", "a file", "mend it"))
    with pytest.raises(UserError, match=r"data\.root"):
        picky_run(tmp_path, broken_data())


def test_fewer_than_none_cannot_fail() -> None:
    with pytest.raises(UserError, match=r"model.max_failed_clients: -1"):
        Federation(FedAvg(), [ClientGroup(4, Picky)], max_failed_clients=-1)
