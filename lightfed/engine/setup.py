"""What happens before the first round: a run's callbacks, loggers, sessions and packs are made."""

from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch import callbacks as stock
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_summary import summarize
from typing_extensions import override

from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.engine import session_setup
from lightfed.engine.progress import RoundProgressBar
from lightfed.engine.run_trainer import RunTrainer
from lightfed.engine.session_setup import OptimizerFactory
from lightfed.lightning_fits.hook_table import check_datamodule, vars_of
from lightfed.lightning_fits.session_rates import SessionRates
from lightfed.lightning_fits.session_trainer import SessionHost
from lightfed.local.client_group import GroupState, ignore
from lightfed.models.build import blank
from lightfed.models.client_module import ClientModule, NetworkClient
from lightfed.models.evaluating import is_evaluated
from lightfed.models.image_format import channels_first, guarded, suits_channels_last
from lightfed.models.trials import on_trial
from lightfed.runs.run_logger import RunLogger
from lightfed.runs.saving import LastCheckpoint
from lightfed.utils.errors import UserError, require
from lightfed.utils.lightning_private import _CallbackConnector
from lightfed.utils.rng import seeded


def attach_sessions(
    fleet: Fleet,
    data: FederatedDataModule,
    trainer: RunTrainer,
    optimizer: OptimizerFactory | None,
) -> None:
    """Give every client group the steppers of its sessions.

    Precision, clipping and callbacks are those of the trainer. `optimizer` is None if the clients'
    modules define it.
    """
    runtime = session_setup.runtime_of(trainer, clips=trainer.clipping)
    first = 0  # client of a group: its session is what optimizers are first configured for
    for state in fleet.groups:
        if state.trainer is not None:
            epoch = data.num_batches(first)
            state.trainer.position.expect(epoch, fleet.work.batches(epoch))
        first += state.group.count
    steppers = [
        session_setup.client_stepper(
            state,
            i,
            optimizer,
            runtime,
            fleet.algorithm.lr_factors(state.module),
            keep=fleet.optimizers is not None,
        )
        for i, state in enumerate(fleet.groups)
    ]
    used = optimizer is None or any(steps.takes_lr for steps in steppers)
    found, fix = "given, but the modules of all clients configure their own", "leave it out"
    require(used, "model.optimizer", found, fix)
    fleet.training.attach(runtime, steppers)
    if data.gives_channels_last(fleet.device):
        _choose_formats(fleet, always=data.channels_last is True)


def host_of(trainer: RunTrainer, data: FederatedDataModule) -> SessionHost:
    """What the sessions of clients get from a run."""
    given = getattr(data.dataset, "datamodule", None)
    if given is not None:
        check_datamodule(given, "data.dataset.init_args.train")
    transfers = next((m for m in (given, data) if m is not None and vars_of(m)), None)
    return SessionHost(
        run=trainer,
        callbacks=trainer.step_callbacks,
        datamodule=data if given is None else given,
        transfers=transfers,
        stage=trainer.state.fn.value if trainer.state.fn else "fit",
    )


def attach_configured(trainer: RunTrainer, fleet: Fleet, root: Any, stage: str) -> None:
    """Give the run the callbacks that the clients' modules configure, as Lightning does.

    Of several groups with callbacks of one class, the first group's is taken.
    """
    found: dict[type, Callback] = {}  # by class
    for state in fleet.groups:
        for callback in state.trainer.for_the_run if state.trainer is not None else ():
            found.setdefault(type(callback), callback)
    if not found:
        return
    for kind, callback in found.items():
        if isinstance(callback, stock.ModelSummary):
            found[kind] = ClientsSummary(callback)
    others = [c for c in trainer.callbacks if not any(issubclass(k, type(c)) for k in found)]
    trainer.callbacks = _CallbackConnector._reorder_callbacks([*others, *found.values()])
    for callback in found.values():
        vars(callback).update(log=root.log, log_dict=root.log_dict)
        callback.setup(trainer, root, stage)


def watch_rates(trainer: RunTrainer, fleet: Fleet) -> None:
    """Let sessions log the rates of their modules' own optimizers, if a callback monitors rates.

    The monitor itself sees the optimizer of the run alone.
    """
    monitors = [c for c in trainer.callbacks if isinstance(c, stock.LearningRateMonitor)]
    if not monitors:
        return
    several = len(fleet.groups) > 1
    for position, state in enumerate(fleet.groups):
        if not state.takes_lr:
            rates = SessionRates(monitors[0], state.name if several else "")
            fleet.training.watch(position, rates)


class ClientsSummary(stock.ModelSummary):
    """Lightning's summary of the networks of the clients, which the root module does not hold.

    It prints as the callback whose place it takes.
    """

    def __init__(self, asked: stock.ModelSummary) -> None:
        super().__init__(asked._max_depth, **asked._summarize_kwargs)
        self._asked = asked

    @override
    def _summary(self, trainer: Any, pl_module: Any) -> Any:
        networks = L.LightningModule()
        for state in pl_module.fleet.groups:
            networks.add_module(state.name.replace(".", "_"), state.module)
        return summarize(networks, max_depth=self._max_depth)

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        plain = type(self._asked) is stock.ModelSummary
        if not plain:
            super().on_fit_start(trainer, pl_module)
        elif self._max_depth and trainer.is_global_zero:
            print(self._summary(trainer, pl_module))  # Lightning logs it, which a run silences

    @override
    def summarize(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Print as the asked callback does."""
        self._asked.summarize(*args, **kwargs)


def _choose_formats(fleet: Fleet, *, always: bool) -> None:
    """Give networks their images in torch's own format where channels_last does not suit them.

    `always` if all networks get such images. Clients side by side are not concerned: convolutions
    of packs take any format.
    """
    for state in fleet.groups:
        module = state.module
        layers = guarded(module) if fleet.device.type == "cpu" else {}
        found = f"true, but the strided 1x1 convolution {next(iter(layers), '')} has few channels"
        fix = "set it to auto: runs with such layers ended without a message under torch 2.12.1"
        require(not (always and layers), "data.channels_last", found, fix)
        if not isinstance(module, NetworkClient):
            # Of the user's: what its steps do with other images and weights is unknown.
            for layer in layers.values():
                layer.register_forward_pre_hook(channels_first)
        elif not (always or suits_channels_last(module.net)):
            module.net.register_forward_pre_hook(channels_first)


def check_built(
    kinds: Collection[str], fleet: Fleet, data: FederatedDataModule, *, tests: bool = False
) -> None:
    """Reject what clients or evaluations cannot run on; names the evaluation or a client.

    With `tests` a module's test_step will do.
    """
    for position, state in enumerate(fleet.groups if kinds else ()):
        fits = is_evaluated(state.module, tests=tests)
        found = f"{type(state.module).__name__} has no validation_step"
        fix = "define one, or set model.evaluate: []"
        require(fits, f"model.clients.{position}.model", found, fix)
    samples = (data.partition_.meta["labels_digest"], data.contents.samples)
    every = fleet.ranks.gather([(samples, data.partition_.digest)])
    for position, key, fix in (
        (0, "data.dataset", "draw its samples by a generator with a seed"),
        (1, "data.partition", "draw from its `rng` alone"),
    ):
        alike = len({rank[position] for rank in every}) == 1
        require(alike, key, "not the same on all ranks", fix)
    _check_single_samples(fleet, data)


def _check_single_samples(fleet: Fleet, data: FederatedDataModule) -> None:
    """Reject batches of one sample for models that cannot train on them, before they stop a round.

    BatchNorm cannot, for example, if its feature map is a single pixel.
    """
    end = 0
    for group, state in enumerate(fleet.groups):
        first, end = end, end + state.group.count
        clients = data.first_of_each_size(slice(first, end))
        client = next((k for k in clients if _trains_on_single(fleet, data, k)), None)
        if client is not None and not _takes_one(state, data):
            found = f"client {client} trains on a single sample, and group {group} normalises"
            fix = "set data.last_batch to join; give batches and clients at least 2 samples"
            key = "data.last_batch" if data.batch_size > 1 else "data.batch_size"
            raise UserError(key, found, fix)


def _trains_on_single(fleet: Fleet, data: FederatedDataModule, client: int) -> bool:
    """Whether an epoch of a client has a batch of one sample."""
    epochs = (data.batch_sizes(client, t) for t in range(data.chunks))
    return any(1 in sizes[: fleet.work.batches(len(sizes))] for sizes in epochs)


def _takes_one(state: GroupState, data: FederatedDataModule) -> bool:
    """Whether a group's module can train on a batch of one sample."""
    module = state.module
    if not isinstance(module, NetworkClient) or data.task == "columns":
        return _steps(state, data, samples=1) or not _steps(state, data, samples=2)
    sample = blank(data, samples=1).to(state.store.device)
    try:
        with on_trial(state.module, sample.device) as trial, torch.enable_grad():
            trial.train()
            if isinstance(trial, ClientModule) and hasattr(trial.net, "losses"):
                # A network that is trained but not evaluated must accept it, too.
                net: Any = trial.net
                net.losses(sample, torch.zeros(1, dtype=torch.int64, device=sample.device))
            else:
                trial(sample)
    except NotImplementedError:
        return True  # a user's module may have no forward: unknown
    except ValueError:
        return False
    return True


def _steps(state: GroupState, data: FederatedDataModule, *, samples: int) -> bool:
    """Whether a module's own step takes a batch of so many samples; True if that is unknown."""
    device = state.store.device
    try:
        with on_trial(state.module, device) as trial, torch.enable_grad(), seeded(0, device):
            vars(trial).update(log=ignore, log_dict=ignore)
            trial.train()
            trial.training_step(data.train_batch(0, samples), 0)
    except ValueError:
        return False
    except Exception:  # of the user's step, which the first session names
        return True
    return True


def with_folder(given: Logger | Iterable[Logger] | bool, folder: RunLogger | None) -> list[Logger]:
    """A user's loggers, and that of the run folder first unless it is among them.

    `folder` is None if the run has none.
    """
    loggers: list[Logger] = []
    if not isinstance(given, bool):
        loggers = [given] if isinstance(given, Logger) else list(given)
    own = any(isinstance(logger, RunLogger) for logger in loggers)
    return loggers if own or folder is None else [folder, *loggers]


def with_defaults(
    callbacks: list[Callback] | Callback | None,
    loggers: Sequence[Logger],
    *,
    progress: bool,
    checkpoint: LastCheckpoint | None,
    max_time: str | timedelta | dict[str, int] | None,
) -> list[Callback]:
    """A user's callbacks, and those that a run has by default unless they are among them."""
    given = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
    given = [ClientsSummary(c) if isinstance(c, stock.ModelSummary) else c for c in given]
    if progress and not any(isinstance(c, ProgressBar) for c in given):
        given.append(RoundProgressBar())
    own = next((c for c in given if _is_found(c, loggers)), None)
    if checkpoint is not None and own is None:
        given.append(checkpoint)
    elif checkpoint is not None and checkpoint.is_configured:
        found = f"{type(own).__name__} of trainer.callbacks writes last.ckpt"
        raise UserError("trainer.checkpoint_every", found, "give one of the two")
    if max_time is not None and not any(isinstance(c, Timer) for c in given):
        # Lightning's version synchronises the ranks after every wave, so fast ranks would wait.
        given.append(Timer(max_time, interval="epoch"))
    return given


def _is_found(callback: Callback, loggers: Sequence[Logger]) -> bool:
    """Whether a user's callback keeps a last.ckpt where resuming looks for it."""
    if not (isinstance(callback, ModelCheckpoint) and callback.save_last):
        return False
    if not any(isinstance(logger, RunLogger) for logger in loggers):
        return True  # Lightning looks into the folders of callbacks
    return callback.dirpath is None and isinstance(loggers[0], RunLogger)
