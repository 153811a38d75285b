"""What happens before the first round: a run's callbacks, loggers and sessions are prepared."""

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
from lightfed.engine.evaluation import KINDS, UNSEEN_KINDS
from lightfed.engine.progress import RoundProgressBar
from lightfed.engine.run_trainer import RunTrainer
from lightfed.engine.session_setup import OptimizerFactory
from lightfed.lightning_fits.hook_table import check_datamodule, transfer_hooks_of
from lightfed.lightning_fits.session_rates import SessionRates
from lightfed.lightning_fits.session_trainer import SessionHost
from lightfed.local.group_state import GroupState
from lightfed.local.model_costs import ignore
from lightfed.models.build import blank
from lightfed.models.client_module import ClientModule, NetworkClient
from lightfed.models.evaluating import is_evaluated
from lightfed.models.image_format import channels_first, guarded, suits_channels_last
from lightfed.models.trials import on_trial
from lightfed.runs.run_logger import RunLogger
from lightfed.runs.saving import LastCheckpoint
from lightfed.utils.errors import UserError
from lightfed.utils.lightning_private import _CallbackConnector
from lightfed.utils.rng import seeded


def attach_sessions(
    fleet: Fleet,
    data: FederatedDataModule,
    trainer: RunTrainer,
    optimizer: OptimizerFactory | None,
) -> None:
    """Give every client group its sessions, with the precision and the clipping of the Trainer.

    Args:
        fleet: The clients.
        data: Their samples.
        trainer: The Trainer of the run.
        optimizer: Makes the configured optimizer; None if the clients' modules configure their own.

    Raises:
        UserError: Sessions cannot use the optimizer, or none of them does.
    """
    runtime = session_setup.runtime_of(trainer, clips=trainer.clipping)

    # A module may ask for the length of a session when it configures its optimizers. The first time
    # it does so is for the group's first client.
    first_client = 0
    for state in fleet.groups:
        if state.trainer is not None:
            batches_of_epoch = data.num_batches(first_client)
            batches_of_session = fleet.work.batches(batches_of_epoch)
            state.trainer.position.expect(batches_of_epoch, batches_of_session)
        first_client += state.group.count

    steppers = []
    for position, state in enumerate(fleet.groups):
        stepper = session_setup.client_stepper(
            state,
            position,
            optimizer,
            runtime,
            fleet.algorithm.lr_factors(state.module),
            keep=fleet.optimizers is not None,
        )
        steppers.append(stepper)

    if optimizer is not None and not any(stepper.takes_lr for stepper in steppers):
        found = "given, but the modules of all clients configure their own"
        raise UserError("model.optimizer", found, "leave it out")
    fleet.training.attach(runtime, steppers)
    if data.gives_channels_last(fleet.device):
        _choose_formats(fleet, always=data.channels_last is True)


def host_of(trainer: RunTrainer, data: FederatedDataModule) -> SessionHost:
    """Return what the sessions of clients get from a run.

    Args:
        trainer: The Trainer of the run.
        data: The data module of the run. Its data set may have been read from a LightningDataModule
            of the user's, which modules then see as `self.trainer.datamodule`.

    Raises:
        UserError: The user's data module overrides hooks that nothing would call.
    """
    users_datamodule = getattr(data.dataset, "datamodule", None)
    if users_datamodule is not None:
        check_datamodule(users_datamodule, "data.dataset.init_args.train")

    transfers = None
    for datamodule in (users_datamodule, data):
        if transfers is None and transfer_hooks_of(datamodule):
            transfers = datamodule

    return SessionHost(
        run=trainer,
        callbacks=trainer.step_callbacks,
        datamodule=data if users_datamodule is None else users_datamodule,
        transfers=transfers,
        stage=trainer.state.fn.value if trainer.state.fn else "fit",
    )


def attach_configured(trainer: RunTrainer, fleet: Fleet, root: Any, stage: str) -> None:
    """Give the run the callbacks that the clients' modules configure, as Lightning does.

    They take the place of callbacks of the same class. If several groups configure callbacks of one
    class, those of the first group count.

    Args:
        trainer: The Trainer of the run.
        fleet: The clients, whose modules have been asked for their callbacks.
        root: The root module.
        stage: What runs: fit, validate, test or predict.
    """
    configured: dict[type, Callback] = {}
    for state in fleet.groups:
        if state.trainer is None:
            continue
        for callback in state.trainer.for_the_run:
            configured.setdefault(type(callback), callback)
    if not configured:
        return

    for kind, callback in configured.items():
        if isinstance(callback, stock.ModelSummary):
            configured[kind] = ClientsSummary(callback)

    kept = []
    for callback in trainer.callbacks:
        is_replaced = any(issubclass(kind, type(callback)) for kind in configured)
        if not is_replaced:
            kept.append(callback)
    trainer.callbacks = _CallbackConnector._reorder_callbacks([*kept, *configured.values()])

    # Lightning does this for the callbacks that it knows when a run starts.
    for callback in configured.values():
        vars(callback).update(log=root.log, log_dict=root.log_dict)
        callback.setup(trainer, root, stage)


def watch_rates(trainer: RunTrainer, fleet: Fleet) -> None:
    """Let sessions log the rates of their modules' own optimizers, if a callback monitors rates.

    The monitor itself sees only the optimizer of the run.
    """
    monitors = [c for c in trainer.callbacks if isinstance(c, stock.LearningRateMonitor)]
    if not monitors:
        return

    has_several_groups = len(fleet.groups) > 1
    for position, state in enumerate(fleet.groups):
        if not state.takes_lr:
            rates = SessionRates(monitors[0], state.name if has_several_groups else "")
            fleet.training.watch(position, rates)


def warn_of_test_monitors(trainer: RunTrainer, fleet: Fleet) -> None:
    """Say if a callback chooses by test samples although clients keep validation samples."""
    if "validation" not in fleet.data.tested:
        return
    for callback in trainer.callbacks:
        monitor = getattr(callback, "monitor", None)
        kinds = (*KINDS, *UNSEEN_KINDS)
        if isinstance(monitor, str) and monitor.partition("/")[0] in kinds:
            fleet.warn(
                f"{type(callback).__name__} chooses by {monitor}, which is measured on test "
                f"samples; monitor validation/{monitor} instead"
            )


class ClientsSummary(stock.ModelSummary):
    """Lightning's summary of the networks of the clients, which the root module does not hold.

    Args:
        replaced: The callback of the user's whose place it takes, and as which it prints.
    """

    def __init__(self, replaced: stock.ModelSummary) -> None:
        super().__init__(replaced._max_depth, **replaced._summarize_kwargs)
        self._replaced = replaced

    @override
    def _summary(self, trainer: Any, pl_module: Any) -> Any:
        networks = L.LightningModule()
        for state in pl_module.fleet.groups:
            # A module's name has no dots, but that of a group may.
            networks.add_module(state.name.replace(".", "_"), state.module)
        return summarize(networks, max_depth=self._max_depth)

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if type(self._replaced) is not stock.ModelSummary:
            super().on_fit_start(trainer, pl_module)
        elif self._max_depth and trainer.is_global_zero:
            # Lightning's own summary goes to a logger of messages, which a run silences.
            print(self._summary(trainer, pl_module))

    @override
    def summarize(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Print as the user's callback does."""
        self._replaced.summarize(*args, **kwargs)


def _choose_formats(fleet: Fleet, *, always: bool) -> None:
    """Give networks their images in torch's own format where channels_last does not suit them.

    Clients side by side are not concerned: the convolutions of packs take any format.

    Args:
        fleet: The clients.
        always: Whether the user wants such images for all networks.
    """
    for state in fleet.groups:
        module = state.module
        guarded_layers = guarded(module) if fleet.device.type == "cpu" else {}
        if always and guarded_layers:
            layer_name = next(iter(guarded_layers))
            raise UserError(
                key="data.channels_last",
                found=f"true, but the strided 1x1 convolution {layer_name} has few channels",
                fix="set it to auto: runs with such layers ended without a message under torch "
                "2.12.1",
            )

        if not isinstance(module, NetworkClient):
            # What the steps of a user's module do with images and weights of other formats is
            # unknown. Only the layers that must not get them are guarded.
            for layer in guarded_layers.values():
                layer.register_forward_pre_hook(channels_first)
        elif not always and not suits_channels_last(module.net):
            module.net.register_forward_pre_hook(channels_first)


def check_built(
    kinds: Collection[str], fleet: Fleet, data: FederatedDataModule, *, tests: bool = False
) -> None:
    """Refuse models that cannot be evaluated, and data on which clients cannot train.

    Args:
        kinds: The kinds of evaluation; empty for none.
        fleet: The clients.
        data: Their samples.
        tests: Whether the run tests, for which a module's test_step is enough.

    Raises:
        UserError: A module has no step for evaluations, the ranks have drawn different samples, or
            a batch of one sample would stop the training of a client.
    """
    if kinds:
        for position, state in enumerate(fleet.groups):
            if not is_evaluated(state.module, tests=tests):
                found = f"{type(state.module).__name__} has no validation_step"
                fix = "define one, or set model.evaluate: []"
                raise UserError(f"model.clients.{position}.model", found, fix)
    _check_same_samples(fleet, data)
    _check_single_samples(fleet, data)


def _check_same_samples(fleet: Fleet, data: FederatedDataModule) -> None:
    """Refuse a data set or a partition that ranks have not drawn alike."""
    samples = (data.partition_.meta["labels_digest"], data.contents.samples)
    samples_of_ranks = []
    partitions_of_ranks = []
    for samples_of_rank, partition in fleet.ranks.gather([(samples, data.partition_.digest)]):
        samples_of_ranks.append(samples_of_rank)
        partitions_of_ranks.append(partition)

    found = "not the same on all ranks"
    if len(set(samples_of_ranks)) > 1:
        raise UserError("data.dataset", found, "draw its samples by a generator with a seed")
    if len(set(partitions_of_ranks)) > 1:
        raise UserError("data.partition", found, "draw from its `rng` alone")


def _check_single_samples(fleet: Fleet, data: FederatedDataModule) -> None:
    """Refuse batches of one sample for models that cannot train on them, before they stop a round.

    BatchNorm cannot, for example, if its feature map is a single pixel.
    """
    first = 0
    for group, state in enumerate(fleet.groups):
        end = first + state.group.count
        # Clients of one size have batches of the same sizes, so one of each is enough to look at.
        clients = data.first_of_each_size(slice(first, end))
        first = end

        client = next((k for k in clients if _has_single_sample_batch(fleet, data, k)), None)
        if client is not None and not _takes_one_sample(state, data):
            raise UserError(
                key="data.last_batch" if data.batch_size > 1 else "data.batch_size",
                found=f"client {client} trains on a single sample, but group {group} normalizes",
                fix="set data.last_batch to join; give batches and clients at least 2 samples",
            )


def _has_single_sample_batch(fleet: Fleet, data: FederatedDataModule, client: int) -> bool:
    """Whether a client trains on a batch of one sample in any of its epochs."""
    for t in range(data.chunks):
        sizes = data.batch_sizes(client, t)
        if 1 in sizes[: fleet.work.batches(len(sizes))]:
            return True
    return False


def _takes_one_sample(state: GroupState, data: FederatedDataModule) -> bool:
    """Whether a group's module can train on a batch of one sample; True if that is unknown."""
    module = state.module
    if not isinstance(module, NetworkClient) or data.task == "columns":
        # A step that fails with two samples as well fails for another reason.
        takes_one = _step_succeeds(state, data, samples=1)
        return takes_one or not _step_succeeds(state, data, samples=2)

    sample = blank(data, samples=1).to(state.store.device)
    try:
        with on_trial(module, sample.device) as trial, torch.enable_grad():
            trial.train()
            if isinstance(trial, ClientModule) and hasattr(trial.net, "losses"):
                # Parts of such a network are trained but not evaluated. They must accept it, too.
                net: Any = trial.net
                net.losses(sample, torch.zeros(1, dtype=torch.int64, device=sample.device))
            else:
                trial(sample)
    except NotImplementedError:
        return True  # a user's module may have no forward
    except ValueError:
        return False
    return True


def _step_succeeds(state: GroupState, data: FederatedDataModule, *, samples: int) -> bool:
    """Whether a module's own step takes a batch of so many samples; True if that is unknown."""
    device = state.store.device
    try:
        with on_trial(state.module, device) as trial, torch.enable_grad(), seeded(0, device):
            vars(trial).update(log=ignore, log_dict=ignore)
            trial.train()
            trial.training_step(data.train_batch(0, samples), 0)
    except ValueError:
        return False
    except Exception:  # raised by the user's step; the first session reports it
        return True
    return True


def with_folder(given: Logger | Iterable[Logger] | bool, folder: RunLogger | None) -> list[Logger]:
    """Return the loggers of a run: those of the user, and before them that of the run folder.

    Args:
        given: The user's loggers; True and False stand for none.
        folder: The logger of the run folder, which is not added if the user has given such a one;
            None if the run has no folder.
    """
    if isinstance(given, bool):
        loggers = []
    elif isinstance(given, Logger):
        loggers = [given]
    else:
        loggers = list(given)

    has_folder = any(isinstance(logger, RunLogger) for logger in loggers)
    if folder is not None and not has_folder:
        loggers.insert(0, folder)
    return loggers


def with_defaults(
    callbacks: list[Callback] | Callback | None,
    loggers: Sequence[Logger],
    *,
    progress: bool,
    checkpoint: LastCheckpoint | None,
    max_time: str | timedelta | dict[str, int] | None,
) -> list[Callback]:
    """Return the callbacks of a run: those of the user, and defaults that are not among them.

    Args:
        callbacks: The user's callbacks.
        loggers: The loggers of the run.
        progress: Whether a progress bar is shown.
        checkpoint: The default checkpoint; None if the run keeps none.
        max_time: The limit on the time of the run, if there is one.

    Raises:
        UserError: A callback writes the checkpoint whose interval is configured as well.
    """
    if callbacks is None:
        given = []
    elif isinstance(callbacks, Callback):
        given = [callbacks]
    else:
        given = list(callbacks)

    for position, callback in enumerate(given):
        if isinstance(callback, stock.ModelSummary):
            given[position] = ClientsSummary(callback)

    if progress and not any(isinstance(callback, ProgressBar) for callback in given):
        given.append(RoundProgressBar())

    if checkpoint is not None:
        writers_of_last = [callback for callback in given if _is_found(callback, loggers)]
        if not writers_of_last:
            given.append(checkpoint)
        elif checkpoint.is_configured:
            name = type(writers_of_last[0]).__name__
            found = f"{name} of trainer.callbacks writes last.ckpt"
            raise UserError("trainer.checkpoint_every", found, "give one of the two")

    if max_time is not None and not any(isinstance(callback, Timer) for callback in given):
        # Lightning's default timer synchronizes the ranks after every batch, here after every wave
        # of sessions, so that fast ranks would wait.
        given.append(Timer(max_time, interval="epoch"))
    return given


def _is_found(callback: Callback, loggers: Sequence[Logger]) -> bool:
    """Whether a user's callback keeps a last.ckpt where resuming looks for it."""
    if not isinstance(callback, ModelCheckpoint) or not callback.save_last:
        return False
    if not any(isinstance(logger, RunLogger) for logger in loggers):
        return True  # Lightning looks into the folders of callbacks
    return callback.dirpath is None and isinstance(loggers[0], RunLogger)
