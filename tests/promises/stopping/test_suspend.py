"""A signal during a round: finished sessions are kept, the others are trained when it goes on."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.peers.my1 import My1
from lightfed.algorithms.pfedmoe.fedkd import FedKD
from lightfed.algorithms.prototypes.fd import FD
from lightfed.algorithms.topology.topology import Ring
from lightfed.distributed.collectives import Ranks
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.local.session import LocalSession, Work
from lightfed.networks.mlp import MLP
from lightfed.runs import checkpoint
from lightfed.runs.checkpoint import JOURNAL
from lightfed.runs.run_logger import RunLogger
from lightfed.state.client_state import by_client
from lightfed.state.rows import Row
from tests.core.engine.spy import lr_schedule
from tests.small import CPU, fit, random_data
from tests.tiers import by_default

SIZES = (6, 9, 3, 5)
ROUNDS = 3
mlp = partial(MLP, hidden=(6,))
ALGORITHMS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "fedavg": (FedAvg, {"lr_schedule": lr_schedule, "store": "host"}),
    "dispfl": (partial(DisPFL, Ring(), rounds=ROUNDS), {}),  # tests at the start of sessions too
    "my1": (partial(My1, Ring(), rounds=ROUNDS), {}),
    "fedkd": (partial(FedKD, mlp, rounds=ROUNDS), {}),
    "fd": (FD, {}),
    "fedbcd": (
        partial(FedBCD, 1, 4), {"optimizer": partial(ASPG, lr=0.05)},
    ),
    "fedbcd_device": (partial(FedBCD, 1, 4), {"optimizer": partial(SGD, lr=0.05, momentum=0.9)}),
    "fedbcd_shared": (
        partial(FedBCD, 1, 4, momentum="shared"),
        {"optimizer": partial(SGD, lr=0.05, momentum=0.9), "store": "host"},
    ),
}  # fmt: skip


class SignalAt(Callback):
    """The n-th session that ends is followed by a signal."""

    hears = "rounds"

    def __init__(self, n: int, number: int = signal.SIGUSR1) -> None:
        self.n, self.number, self.sessions = n, number, 0

    @override
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        self.sessions += outputs is not None
        if self.sessions == self.n:
            os.kill(os.getpid(), self.number)


class Sessions:
    """Counts the sessions that are trained."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        train = LocalSession.train

        def counted(session: LocalSession, row: Row, work: Work) -> Any:
            self.count += 1
            return train(session, row, work)

        monkeypatch.setattr(LocalSession, "train", counted)


def run(
    folder: Path, name: str = "fedavg", **flags: Any
) -> tuple[dict[str, Any], dict[str, float], str]:
    """What a run leaves: state, figures, metrics.csv without what is of this machine."""
    algorithm, settings = ALGORITHMS[name]
    settings = {"optimizer": partial(SGD, lr=0.2, momentum=0.9), "side_by_side": "off", **settings}
    federation = Federation(algorithm(), [ClientGroup(len(SIZES), mlp)], **settings)
    flags = {"rounds": ROUNDS} | flags
    trainer = fit(federation, random_data(SIZES, batch_size=2), folder, **flags)
    state = {k: v.tolist() for k, v in federation.state_dict().items()}
    for client, tensors in by_client(federation.fleet.states() or {}).items():
        state |= {f"{client} {k}": v.tolist() for k, v in tensors.items()}
    state["ledger"] = federation.fleet.ledger.totals.tolist()
    figures = {k: float(v) for k, v in trainer.callback_metrics.items()}
    return state, figures, (folder / "run" / "clients.csv").read_text()


def stopped(folder: Path, n: int, name: str = "fedavg", **flags: Any) -> int:
    """Run until a signal stops it; the exit status."""
    callbacks = [*flags.pop("callbacks", []), SignalAt(n)]
    with pytest.raises(SystemExit) as left:
        run(folder, name, callbacks=callbacks, **flags)
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run of FedAvg leaves that nothing has stopped."""
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("name", by_default(ALGORITHMS, "fedavg", "dispfl", "fedbcd_shared"))
def test_a_suspended_round_goes_on_to_the_same_bits_and_trains_nobody_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = Sessions(monkeypatch)
    straight = run(tmp_path / "whole", name)
    all_of_them = sessions.count
    sessions.count = 0
    for n in (2, 1, 3):  # in round 0 twice, and in another one
        assert stopped(tmp_path / "other", n, name, ckpt_path="last") == 128 + signal.SIGUSR1
    assert (tmp_path / "other/run/checkpoints" / JOURNAL).is_file()
    assert run(tmp_path / "other", name, ckpt_path="last") == straight
    assert sessions.count == all_of_them
    assert not (tmp_path / "other/run/checkpoints" / JOURNAL).exists()


def test_a_journal_of_another_round_or_learning_rate_is_not_read(tmp_path: Path) -> None:
    stopped(tmp_path, 2)
    path = tmp_path / "run/checkpoints" / JOURNAL
    found = checkpoint.load(path)
    identity, alone = found["identity"], Ranks(CPU)
    assert checkpoint.load_journal(path, alone, t=0, identity=identity) is not None
    assert checkpoint.load_journal(path, alone, t=1, identity=identity) is None
    assert checkpoint.load_journal(path, alone, t=0, identity=identity | {"lr": 0.3}) is None
    assert checkpoint.load_journal(path.with_name("none"), alone, t=0, identity=identity) is None


@pytest.mark.parametrize(("config", "kept"), [("this", 2), ("another", 0)])
def test_a_journal_of_another_configuration_is_not_read(
    config: str, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logger(stated: str) -> RunLogger:
        made = RunLogger(str(tmp_path), "run")
        made.place.config = stated
        return made

    stopped(tmp_path, 2, logger=logger("this"))
    sessions, path = Sessions(monkeypatch), tmp_path / "run/checkpoints/last.ckpt"
    run(tmp_path, logger=logger(config), ckpt_path=path)
    assert sessions.count == ROUNDS * len(SIZES) - kept


def test_a_run_that_goes_back_forgets_what_was_in_the_journal(tmp_path: Path) -> None:
    """Else it would be put in place when the new course comes to that round, and dies in it."""
    keep = ModelCheckpoint(filename="{epoch}", save_top_k=-1)
    stopped(tmp_path, 2 * len(SIZES) + 2, callbacks=[keep])
    folder = tmp_path / "run/checkpoints"
    assert (folder / JOURNAL).is_file()
    stopped(tmp_path, len(SIZES), ckpt_path=folder / "epoch=0.ckpt")
    assert not (folder / JOURNAL).exists()


def test_a_journal_of_another_runs_folder_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path, 2)
    sessions, folder = Sessions(monkeypatch), tmp_path / "run/checkpoints"
    for number in range(2):
        sessions.count = 0
        run(tmp_path / f"other-{number}", ckpt_path=folder / "last.ckpt")
        assert sessions.count == ROUNDS * len(SIZES) - 2


def test_a_broken_journal_costs_its_sessions_only(
    whole: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stopped(tmp_path, 2)
    path = tmp_path / "run/checkpoints" / JOURNAL
    path.write_bytes(path.read_bytes()[:100])
    sessions = Sessions(monkeypatch)
    assert run(tmp_path, ckpt_path="last") == whole
    assert sessions.count == ROUNDS * len(SIZES)
    assert "the sessions of round 0 are trained again" in caplog.text


@pytest.mark.parametrize(("place", "last"), [("run", False), ("mine", True), ("mine", False)])
def test_a_run_goes_on_whatever_checkpoints_and_loggers_a_user_has(
    place: str, last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`last`, and a requeued job, look into the run folder."""
    dirpath = str(tmp_path / "mine") if place == "mine" else None

    def flags() -> dict[str, Any]:
        loggers = [RunLogger(str(tmp_path), "run"), CSVLogger(tmp_path, name="csv", version=0)]
        keep = ModelCheckpoint(dirpath, "{epoch}", save_last=last)
        return {"logger": loggers if place == "mine" else loggers[::-1], "callbacks": [keep]}

    stopped(tmp_path, len(SIZES) + 2, **flags())
    sessions = Sessions(monkeypatch)
    run(tmp_path, ckpt_path="last", **flags())
    assert sessions.count == (ROUNDS - 1) * len(SIZES) - 2


def test_without_a_checkpoint_of_every_round_the_round_is_finished_and_written(
    whole: Any, tmp_path: Path
) -> None:
    keep = {"every_n_epochs": 2, "save_last": True, "filename": "{epoch}"}
    stopped(tmp_path, 1, callbacks=[ModelCheckpoint(**keep)])
    folder = tmp_path / "run/checkpoints"
    assert sorted(path.name for path in folder.glob("*.ckpt")) == ["last.ckpt"]
    assert checkpoint.load(folder / "last.ckpt")["global_step"] == 1
    assert run(tmp_path, ckpt_path="last") == whole


def test_a_run_without_checkpoints_stops_after_its_round(tmp_path: Path) -> None:
    assert stopped(tmp_path, 1, enable_checkpointing=False) == 128 + signal.SIGUSR1
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_signal_in_the_last_round_changes_nothing(whole: Any, tmp_path: Path) -> None:
    assert run(tmp_path, callbacks=[SignalAt(ROUNDS * len(SIZES))]) == whole


@pytest.mark.parametrize("n", [len(SIZES) + 1, 2 * len(SIZES)])  # during the last round, and after
def test_a_run_that_stops_early_in_the_round_of_a_signal_has_come_to_its_end(
    n: int, tmp_path: Path
) -> None:
    def early() -> list[Callback]:
        return [EarlyStopping("train_loss", stopping_threshold=100.0)]

    limit = {"min_epochs": 2}
    whole = run(tmp_path / "whole", callbacks=early(), **limit)
    folder = tmp_path / "other"
    if n % len(SIZES):
        stopped(folder, n, callbacks=early(), **limit)
        assert run(folder, callbacks=early(), ckpt_path="last", **limit) == whole
    else:
        assert run(folder, callbacks=[*early(), SignalAt(n)], **limit) == whole
    assert len(whole[2].splitlines()) == 1 + 2 * len(SIZES)


def test_a_run_without_a_limit_of_rounds_tells_how_many_are_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(tmp_path, len(SIZES) + 1, rounds=-1, max_steps=9)
    assert "after 1 rounds and 1 session of the next" in capsys.readouterr().err


def test_a_finished_sessions_failure_is_not_kept(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that raised is tried again when the round goes on."""
    train = LocalSession.train

    def failing(session: LocalSession, row: Row, work: Work) -> Any:
        if work.client == 0:
            raise OSError("the disk is away")
        return train(session, row, work)

    with monkeypatch.context() as patch:
        patch.setattr(LocalSession, "train", failing)
        stopped(tmp_path, 2)
    assert run(tmp_path, ckpt_path="last") == whole


def test_a_run_that_died_after_its_last_round_comes_to_its_end(whole: Any, tmp_path: Path) -> None:
    class Dies(Callback):
        @override
        def on_train_end(self, *_: Any) -> None:
            raise KeyError("the node is gone")

    with pytest.raises(KeyError):
        run(tmp_path, callbacks=[Dies()])
    models = tmp_path / "run" / "models"
    assert not models.exists()
    assert run(tmp_path, ckpt_path="last")[2] == whole[2]
    assert [path.name for path in models.iterdir()]
