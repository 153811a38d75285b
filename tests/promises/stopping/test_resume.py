"""A run resumed from any moment has the bits, rows and hooks of one that never stopped."""

import csv
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.runs.checkpoint import load
from lightfed.utils.errors import UserError
from tests.core.engine.spy import Spy, data, federation, lr_schedule, state_of
from tests.small import fit

ROUNDS = 4
ALGORITHMS: dict[str, Callable[[], Any]] = {
    "fedavg": FedAvg,
    "local_statistics": partial(FedAvg, buffers="local"),
    "standalone": Standalone,
}
# The step is a figure of every checkpoint: this monitor keeps them all.
EVERY: dict[str, Any] = {
    "monitor": "step", "mode": "max", "save_top_k": -1, "filename": "{epoch}",
}  # fmt: skip
# When a checkpoint is asked for, and the flags of such a run.
MOMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "round_end": ({"save_on_train_epoch_end": True}, {}),
    "mid_round": ({"every_n_train_steps": 1}, {}),
    "validation_end": ({"save_on_train_epoch_end": False}, {}),
    "validation_end_of_two": (
        {"save_on_train_epoch_end": False}, {"check_val_every_n_epoch": 2},
    ),
}  # fmt: skip


def checkpoints_of(folder: Path) -> dict[int, Path]:
    """By the round during which they were asked for, 0 being the first."""
    found = (folder / "run" / "checkpoints").glob("epoch=*.ckpt")
    return {int(path.stem.removeprefix("epoch=")): path for path in found}


def metrics_of(folder: Path) -> list[dict[str, str]]:
    """Rows of metrics.csv but for what is of this machine."""
    with (folder / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in r.items() if k not in ("seconds", "wire_bytes")} for r in rows]


def text_of(folder: Path, name: str) -> str:
    return (folder / "run" / name).read_text()


# Every algorithm at the moment that keeps most, and one of them at every moment.
RESUMED = [(name, "mid_round") for name in ALGORITHMS]
RESUMED += [(min(ALGORITHMS), moment) for moment in MOMENTS if moment != "mid_round"]


@pytest.mark.parametrize(("name", "moment"), RESUMED)
def test_any_checkpoint_resumes_to_the_bits_rows_and_hooks_of_the_whole_run(
    name: str, moment: str, tmp_path: Path
) -> None:
    """Hooks of every round that it trains, in order: start, waves, validation, end."""
    algorithm, (asked, flags) = ALGORITHMS[name], MOMENTS[moment]

    def run(*callbacks: Callback, **more: Any) -> tuple[Any, ...]:
        model, spy = federation(algorithm=algorithm()), Spy()
        trainer = fit(
            model, data(), tmp_path, rounds=ROUNDS, callbacks=[*callbacks, spy], **flags, **more
        )
        tables = text_of(tmp_path, "clients.csv"), metrics_of(tmp_path)
        return (state_of(model), trainer.callback_metrics, *tables), _rounds_of(spy)

    expected, straight = run(ModelCheckpoint(**EVERY, **asked))
    paths = checkpoints_of(tmp_path)
    assert len(paths) >= 2
    for path in (paths[max(k for k in paths if k < ROUNDS - 1)], paths[min(paths)]):
        trained = load(path)["loops"]["fit_loop"]["epoch_loop.state_dict"]["server_steps"]
        found, rounds = run(ckpt_path=path)
        assert found == expected
        resumed = [calls for calls in rounds if "on_train_batch_start" in calls]
        assert resumed == straight[trained:]


def _rounds_of(spy: Spy) -> list[list[str]]:
    """The hooks of training and validation, a list a round."""
    rounds: list[list[str]] = [[]]
    for name in spy.calls:
        if name.startswith(("on_train_epoch", "on_train_batch", "on_validation")):
            rounds[-1].append(name)
        if name == "on_train_epoch_end":
            rounds.append([])
    return rounds[:-1]


def test_a_resumed_run_may_watch_the_training_loss(tmp_path: Path) -> None:
    """Also in the round whose training had ended when its checkpoint was written."""
    keep = ModelCheckpoint(**EVERY, save_on_train_epoch_end=False)
    fit(federation(), data(), tmp_path, rounds=2, callbacks=[keep])
    stop = EarlyStopping("train_loss", patience=100, check_on_train_epoch_end=True)
    path = checkpoints_of(tmp_path)[1]
    trainer = fit(federation(), data(), tmp_path, rounds=ROUNDS, ckpt_path=path, callbacks=[stop])
    assert trainer.current_epoch == ROUNDS


def test_a_run_limited_by_steps_resumes_its_count(tmp_path: Path) -> None:
    flags = {"check_val_every_n_epoch": 2}
    whole = federation()
    fit(whole, data(), tmp_path / "whole", rounds=100, max_steps=4, **flags)
    keep = ModelCheckpoint(**EVERY, save_on_train_epoch_end=True)
    fit(federation(), data(), tmp_path, rounds=100, max_steps=3, callbacks=[keep], **flags)
    for stopped_at, path in sorted(checkpoints_of(tmp_path).items()):
        again = federation()
        trainer = fit(again, data(), tmp_path, rounds=100, max_steps=4, ckpt_path=path, **flags)
        assert (trainer.current_epoch, trainer.global_step) == (4, 4), stopped_at
        assert state_of(again) == state_of(whole)
        assert metrics_of(tmp_path) == metrics_of(tmp_path / "whole")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The state and the folder of a run of three rounds."""
    model, folder = federation(), tmp_path_factory.mktemp("whole")
    fit(model, data(), folder, rounds=3)
    return state_of(model), folder


def test_last_goes_on_with_the_run_of_that_name(whole: tuple[Any, Path], tmp_path: Path) -> None:
    again = federation()
    fit(federation(), data(), tmp_path, rounds=1)
    trainer = fit(again, data(), tmp_path, rounds=3, ckpt_path="last")
    assert trainer.run_logger is not None
    assert trainer.run_logger.folder == tmp_path / "run"
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert state_of(again) == whole[0]
    assert metrics_of(tmp_path) == metrics_of(whole[1])


def test_a_linked_last_checkpoint_resumes(whole: tuple[Any, Path], tmp_path: Path) -> None:
    again = federation()
    keep = ModelCheckpoint(save_last="link", save_top_k=1, monitor="global/accuracy", mode="max")
    fit(federation(), data(), tmp_path, rounds=2, callbacks=[keep])
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_symlink()
    fit(again, data(), tmp_path, rounds=3, ckpt_path="last")
    assert state_of(again) == whole[0]


@pytest.mark.parametrize("schedule", [None, lr_schedule])
def test_a_run_that_goes_on_with_another_rate_trains_with_it(schedule: Any, tmp_path: Path) -> None:
    """Also with another schedule, as if it had always been that."""

    def rates(t: int) -> float:
        return (1.0 if t < 2 else 0.125) * (0.5**t if schedule else 1.0)

    def run(folder: Path, rate: float, rounds: int, schedule: Any, **settings: Any) -> Any:
        model = federation(optimizer=partial(SGD, lr=rate), lr_schedule=schedule)
        fit(model, data(), folder, rounds=rounds, **settings)
        return state_of(model)

    expected = run(tmp_path / "whole", 0.25, 4, partial(LambdaLR, lr_lambda=rates))
    run(tmp_path, 0.25, 2, schedule)
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    found = run(tmp_path, 0.03125, 4, schedule, ckpt_path=path)
    assert found == expected


def test_the_server_of_a_checkpoint_is_what_validate_tests(tmp_path: Path) -> None:
    trainer = fit(federation(local_epochs=3), data(), tmp_path, rounds=3)
    expected = {k: float(v) for k, v in trainer.callback_metrics.items() if "/" in k}
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    fresh = fit(federation(), data(), tmp_path / "other", rounds=1)
    for run in (fresh.validate, fresh.test):
        (found,) = run(federation(), ckpt_path=path, datamodule=data(), verbose=False)
        assert {k: found[k] for k in expected} == expected


@pytest.mark.parametrize("name", ["metrics.csv", "clients.csv"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: bytes(range(128, 256)),
        lambda text: text.partition(b"\n")[2],
        lambda text: text.replace(b"\n1,", b"\nx,"),
    ],
    ids=["binary", "no header", "text"],
)
def test_a_damaged_table_is_named(
    name: str, damage: Callable[[bytes], bytes], whole: tuple[Any, Path], tmp_path: Path
) -> None:
    shutil.copytree(whole[1] / "run", tmp_path / "run")
    path = tmp_path / "run" / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError) as refused:
        fit(federation(), data(), tmp_path, rounds=4, ckpt_path="last")
    assert refused.value.key == str(path)
