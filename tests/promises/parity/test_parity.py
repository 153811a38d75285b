"""What a user's module, callbacks and data module do under Lightning, they do as a client."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core import hooks

from lightfed.lightning_fits.hook_table import CALLBACK_HOOKS, DATA_HOOKS, MODULE_HOOKS
from tests.promises.parity.cases import CASES
from tests.promises.parity.harness import ALGORITHMS, Case, ours, plain, theirs


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_client_is_a_fit_of_lightning(case: Case, tmp_path: Path) -> None:
    for algorithm in ALGORITHMS.values():
        found, federation = ours(case, algorithm, tmp_path)
        bare = theirs(case, federation)
        assert found.weights.keys() <= bare.weights.keys()
        for name, value in found.weights.items():
            torch.testing.assert_close(value, bare.weights[name], rtol=0, atol=1e-6, msg=name)
        for name, number in bare.logged.items():
            assert found.logged[name] == pytest.approx(number, abs=1e-5), name
        if case.hooks:
            assert_same_order(case, plain(found.calls), plain(bare.calls))


def assert_same_order(case: Case, found: list[str], bare: list[str]) -> None:
    """The calls are the same; but hooks of a live module come once, however many rounds it has."""
    if case.rounds > 1:
        once = [call for call in found if name_of(call) in ONCE]
        assert len(once) == len(set(once))
        assert {name_of(call) for call in once} == {name_of(c) for c in bare} & ONCE
        found, bare = ([c for c in calls if name_of(c) not in ONCE] for calls in (found, bare))
    assert found == bare


ONCE = {name for name, when in MODULE_HOOKS.items() if when == "module"}


def name_of(call: str) -> str:
    return call.partition("(")[0].partition(".")[2]


def test_there_are_seventy() -> None:
    assert len(CASES) >= 70


def hooks_of(kind: Any) -> set[str]:
    """The methods of a class of Lightning that a user may override for the Trainer to call."""
    named = {name for name in vars(kind) if name.startswith(("on_", "configure_"))}
    return {name for name in named if callable(getattr(kind, name))}


OTHERS = {
    # Lightning calls these by name, and no pattern tells them from other methods.
    L.LightningModule: {
        "training_step", "validation_step", "test_step", "predict_step", "backward",
        "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step",
    },
    hooks.DataHooks: {
        "prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader",
        "test_dataloader", "predict_dataloader", "transfer_batch_to_device",
    },
    hooks.ModelHooks: set(),
    hooks.CheckpointHooks: set(),
    Callback: {"setup", "teardown", "state_dict", "load_state_dict"},
    L.LightningDataModule: {"state_dict", "load_state_dict"},
}  # fmt: skip
# What users call, and do not override.
NO_HOOKS = {
    L.LightningModule: {
        "log", "log_dict", "print", "all_gather", "forward", "optimizers", "lr_schedulers",
        "manual_backward", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer",
        "clip_gradients", "freeze", "unfreeze", "to_onnx", "to_torchscript", "to_tensorrt",
        "load_from_checkpoint",
    },
    Callback: set(),
    L.LightningDataModule: {"from_datasets", "load_from_checkpoint"},
    hooks.DataHooks: set(), hooks.ModelHooks: set(), hooks.CheckpointHooks: set(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("table", "kinds"),
    [
        (
            MODULE_HOOKS,
            (L.LightningModule, hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks),
        ),
        (CALLBACK_HOOKS, (Callback,)),
        (DATA_HOOKS, (L.LightningDataModule, hooks.DataHooks)),
    ],
)
def test_every_hook_of_lightning_has_its_line(table: Any, kinds: Any) -> None:
    """A new hook of Lightning is called, or refused by name, before it can be overlooked."""
    known: set[str] = set()
    for kind in kinds:
        methods = {
            name
            for name, value in vars(kind).items()
            if not name.startswith("_") and callable(value) and not isinstance(value, type)
        }
        strange = methods - hooks_of(kind) - OTHERS[kind] - NO_HOOKS[kind]
        assert not strange, f"{kind.__name__} has new methods: a hook, or not?"
        known |= hooks_of(kind) | OTHERS[kind]
    assert known == set(table)


def test_the_page_on_sessions_names_every_hook() -> None:
    page = (Path(__file__).parents[3] / "docs" / "sessions.md").read_text()
    for name in {*MODULE_HOOKS, *CALLBACK_HOOKS, *DATA_HOOKS}:
        pattern = re.sub(r"_(validation|test|predict)_.*", r"_\1_*", name)
        assert f"`{name}`" in page or f"`{pattern}`" in page, name


def test_every_hook_of_a_session_has_a_case() -> None:
    """The spy: each hook that sessions call is overridden by a case, and so compared."""
    session = {name for name, when in MODULE_HOOKS.items() if when in ("session", "module")}
    overridden = {
        name
        for case in CASES.values()
        for name in session
        if any(name in vars(k) for k in getattr(case.module, "__mro__", ())[:-8])
    }
    assert overridden >= session
