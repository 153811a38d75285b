"""One client's sessions, and Lightning's own Trainer on the same batches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.datamodule import LightningDataModule
from torch import Tensor
from torch.utils.data import TensorDataset

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.partition.schemes import Iid
from lightfed.data.torch_data import FromTorch
from lightfed.federation import Federation
from lightfed.lightning_fits.hook_table import CALLBACK_HOOKS, DATA_HOOKS, MODULE_HOOKS
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import SessionPlans
from lightfed.trainer import FederatedTrainer
from lightfed.utils.lightning_private import is_overridden
from lightfed.utils.rng import derive_seed
from tests.small import quiet, row_held

SEED = 3
SAMPLES, BATCH, FEATURES = 22, 8, 6
CALLS: list[str] = []  # hooks, in the order in which they were called
EPOCHS: list[dict[str, float]] = []  # what the bare Trainer has at the end of each epoch


@dataclass(frozen=True)
class Case:
    """One module, with callbacks and data, as one client.

    Attributes:
        module: Makes the client's module.
        callbacks: Make the callbacks of the Trainer.
        datamodule: Makes the user's data module; None for data sets.
        columns: Samples are a dict of tensors.
        epochs: Of a session.
        rounds: Of the run. The bare Trainer fits as often, or once if optimizers are kept.
        keep: Clients keep their optimizers.
        flags: Of both Trainers.
        hooks: Whether the order of hooks is compared.
    """

    module: Callable[..., L.LightningModule]
    callbacks: Sequence[Callable[[], Callback]] = ()
    datamodule: Callable[..., LightningDataModule] | None = None
    columns: bool = False
    epochs: int = 2
    rounds: int = 1
    keep: bool = False
    flags: dict[str, Any] = field(default_factory=dict)
    hooks: bool = True


@dataclass
class Outcome:
    """Weights by name, logged values, and the hooks in their order."""

    weights: dict[str, Tensor]
    logged: dict[str, float]
    calls: list[str]


def samples(columns: bool) -> tuple[Any, Any]:
    """A training and a test set."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES + 4, FEATURES, generator=generator)
    y = (x[:, 0] > 0).long()
    if columns:
        rows = [{"x": a, "label": b} for a, b in zip(x, y, strict=True)]
        return rows[:SAMPLES], rows[SAMPLES:]
    return TensorDataset(x[:SAMPLES], y[:SAMPLES]), TensorDataset(x[SAMPLES:], y[SAMPLES:])


def spied(kind: type, hooks: Sequence[str], parent: type) -> type:
    """A class that notes the calls of its overridden hooks."""

    def noting(name: str) -> Callable[..., Any]:
        own = getattr(kind, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            CALLS.append(f"{parent.__name__}.{name}({described(args, kwargs)})")
            return own(self, *args, **kwargs)

        if name == "training_step":  # Lightning reads its arguments
            hook = {
                "batch": lambda self, batch: noted(self, name, own, batch),
                "batch, batch_idx": lambda self, batch, batch_idx: noted(
                    self, name, own, batch, batch_idx
                ),
                "dataloader_iter": lambda self, dataloader_iter: noted(
                    self, name, own, dataloader_iter
                ),
            }[", ".join(own.__code__.co_varnames[1 : own.__code__.co_argcount])]
        return hook

    found = {}
    for name in hooks:
        ours = getattr(kind, name, None)
        theirs = getattr(parent, name, None)
        if ours is not None and getattr(ours, "__code__", 0) != getattr(theirs, "__code__", 0):
            found[name] = noting(name)
    return type(kind.__name__, (kind,), found)


def noted(self: Any, name: str, own: Callable[..., Any], *args: Any) -> Any:
    CALLS.append(f"LightningModule.{name}({described(args, {})})")
    return own(self, *args)


def described(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Arguments as both sides give them: numbers, sizes of tensors, and classes."""

    def one(value: Any) -> str:
        if isinstance(value, L.Trainer):
            return "trainer"
        if isinstance(value, Tensor):
            return f"tensor{tuple(value.shape)}"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k}: {one(v)}" for k, v in value.items()) + "}"
        if isinstance(value, tuple | list):
            return "[" + ", ".join(map(one, value)) + "]"
        if isinstance(value, int | float | str | None):
            return str(getattr(value, "value", value))
        return type(value).__name__.removesuffix("IterDataFetcher")

    return ", ".join([*map(one, args), *(f"{k}={one(v)}" for k, v in kwargs.items())])


class _Batches:
    """The batches of a session, an epoch at a time, as a loader."""

    def __init__(self, batches: Sequence[Any], epoch: int) -> None:
        self._batches, self._epoch = batches, epoch
        self.trainer: Any = None

    def __len__(self) -> int:
        return self._epoch

    def __iter__(self) -> Iterator[Any]:
        first = self._epoch * self.trainer.current_epoch
        return iter(self._batches[first : first + self._epoch])


class _Before(Callback):
    """What the harness does in the bare Trainer."""

    def __init__(self, t: int) -> None:
        self._t = t

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        torch.manual_seed(derive_seed(SEED, "session", self._t, 0))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        torch.manual_seed(derive_seed(SEED, "session", self._t, 0))


class _After(Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        EPOCHS.append({k: float(v) for k, v in trainer.callback_metrics.items()})


class _Each(Callback):
    """Notes what an epoch has logged; the values of the last one come at the end of the fit."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch:
            EPOCHS.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def made(case: Case) -> tuple[Callable[..., L.LightningModule], list[Callback]]:
    """The module's class, and the callbacks, that note the calls of their hooks."""
    kind = case.module
    own = kind.func if isinstance(kind, partial) else kind
    named = spied(own, [*MODULE_HOOKS], L.LightningModule)  # type: ignore[arg-type]
    module = partial(named, *kind.args, **kind.keywords) if isinstance(kind, partial) else named
    callbacks = []
    for make in case.callbacks:
        callback = make()
        with suppress(TypeError):  # a class of Lightning's with slots
            callback.__class__ = spied(type(callback), [*CALLBACK_HOOKS], Callback)
        callbacks.append(callback)
    return module, callbacks


def data_module(case: Case, train: Any, test: Any) -> Any:
    if case.datamodule is None:
        return None
    kind = spied(case.datamodule, [*DATA_HOOKS], LightningDataModule)  # type: ignore[arg-type]
    return kind(train, test)


def ours(case: Case, algorithm: Any, folder: Path) -> tuple[Outcome, Any]:
    """The case as the only client of a federation; also its federation."""
    CALLS.clear()
    quiet()
    train, test = samples(case.columns)
    module, callbacks = made(case)
    source = data_module(case, train, test)
    given = FromTorch(train, test) if source is None else FromTorch(source)
    data = FederatedDataModule(given, Iid(), batch_size=BATCH)
    federation = Federation(
        algorithm(),
        [ClientGroup(1, module)],
        local_epochs=case.epochs,
        keep_optimizer=case.keep,
        evaluate=(),
        seed=SEED,
    )
    trainer = FederatedTrainer(
        max_epochs=case.rounds, accelerator="cpu", logger=False, callbacks=callbacks,
        enable_checkpointing=False, enable_progress_bar=False, enable_page=False,
        default_root_dir=str(folder), limit_val_batches=0, **case.flags,
    )  # fmt: skip
    trainer.fit(federation, data)
    layout, row = row_held(federation.fleet, 0)
    weights = {name: value.clone() for name, value in layout.floats.views(row.floats).items()}
    frozen = federation.fleet.groups[0].live.frozen
    weights |= {name: value.detach().clone() for name, value in frozen.items()}
    logged = {k: float(v) for k, v in trainer.callback_metrics.items()}
    return Outcome(weights, logged, list(CALLS)), federation


def theirs(case: Case, federation: Federation) -> Outcome:
    """The case in Lightning's own Trainer, on the batches of the federation's sessions."""
    CALLS.clear()
    EPOCHS.clear()
    train, test = samples(case.columns)
    kind, _ = made(case)
    fleet = federation.fleet
    plans = SessionPlans(fleet.data, fleet.work, SEED, fleet.ranks.timings)
    per_epoch = fleet.data.num_batches(0)
    batches = [list(plans.batches(0, t, case.epochs * per_epoch, "")) for t in range(case.rounds)]
    fits = [[b for part in batches for b in part]] if case.keep else batches
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(SEED, "init", client=0))
        module = kind()
    calls: list[str] = []
    for t, part in enumerate(fits):
        CALLS.clear()
        _, callbacks = made(case)
        source = data_module(case, train, test)
        loader = _Batches(part, per_epoch)
        if source is not None:
            source.train_dataloader = lambda loader=loader: loader
        trainer = L.Trainer(
            max_epochs=len(part) // per_epoch, accelerator="cpu", logger=False,
            callbacks=[_Before(t), *callbacks, _Each(), _After()], enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
            num_sanity_val_steps=0, use_distributed_sampler=False, **case.flags,
        )  # fmt: skip
        loader.trainer = trainer
        torch.manual_seed(derive_seed(SEED, "setup", client=0))
        trainer.fit(module, loader) if source is None else trainer.fit(module, datamodule=source)
        calls += CALLS
    weights = {k: v.detach().clone() for k, v in module.state_dict().items()}
    values: dict[str, list[float]] = {}
    for epoch in EPOCHS[-case.epochs :]:
        for name, value in epoch.items():
            values.setdefault(name, []).append(value)
    logged = {name: sum(each) / len(each) for name, each in values.items()}
    return Outcome(weights, logged, calls)


ALGORITHMS = {"Standalone": Standalone, "FedAvg": FedAvg}


def plain(calls: Sequence[str]) -> list[str]:
    """The calls without those by which samples are read and a step's cost is measured."""
    found = list(calls)
    starts = [i for i, call in enumerate(found) if "configure_optimizers" in call]
    first = starts[0] if starts else 0
    skipped = ("LightningDataModule.", "LightningModule.training_step")
    head = [call for call in found[:first] if not call.startswith(skipped)]
    return head + found[first:]


__all__ = ["ALGORITHMS", "Case", "Outcome", "is_overridden", "ours", "plain", "theirs"]
