"""The one long-lived Trainer of a federation."""

import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightfed.distributed import requeue
from lightfed.distributed.slurm import check_variables
from lightfed.distributed.step_environment import with_environment
from lightfed.engine import checks
from lightfed.engine.checks import Clips
from lightfed.engine.loop import FederatedLoop
from lightfed.engine.round_module import federation_of
from lightfed.engine.run_trainer import RunTrainer
from lightfed.engine.setup import with_defaults, with_folder
from lightfed.engine.strategy import FederatedStrategy
from lightfed.federation import Federation
from lightfed.lab.results.run import Run, read
from lightfed.lightning_fits.hook_table import split
from lightfed.runs import federation_state
from lightfed.runs.run_folder import check_name
from lightfed.runs.run_logger import RunLogger
from lightfed.utils.determinism import ask_for_same_bits
from lightfed.utils.errors import PAUSED, Interrupted, UserError
from lightfed.utils.json_output import print_json
from lightfed.utils.lightning_private import _PATH, _CheckpointConnector, _SignalConnector
from lightfed.utils.memory import keep_heap
from lightfed.utils.process import silenced
from lightfed.utils.signals import listening

# What callbacks of Lightning say of a monitor that nobody measures.
_NO_METRIC = ("Early stopping conditioned on metric", "`ModelCheckpoint(monitor=")

Precision = Literal["32", "32-true", "bf16-mixed", 32]


class FederatedTrainer(RunTrainer):
    """A Trainer whose epochs are rounds.

    It has only those of Lightning's flags that affect a federation. The others concern one
    optimizer step per batch and one model under DDP; here they would silently do nothing.
    """

    fit_loop: FederatedLoop

    @silenced()
    def __init__(
        self,
        *,
        name: str | None = None,
        max_epochs: int = 100,
        min_epochs: int | None = None,
        max_steps: int = -1,
        max_time: str | timedelta | dict[str, int] | None = None,
        accelerator: str = "auto",
        devices: int | str | list[int] = 1,
        num_nodes: int = 1,
        precision: Precision = "32",
        strategy: FederatedStrategy | Literal["federated"] = "federated",
        logger: Logger | Iterable[Logger] | bool = True,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: bool = False,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        check_val_every_n_epoch: int = 1,
        enable_checkpointing: bool = True,
        checkpoint_every: int | None = None,
        enable_progress_bar: bool = True,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Clips = "norm",
        deterministic: bool | Literal["warn", "auto"] = "auto",
        benchmark: bool | None = None,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        plugins: Any = None,
        default_root_dir: str = "runs",
        num_threads: int = 1,
        ranks_per_device: int = 1,
        enable_page: bool = True,
    ) -> None:
        """Flags of the run.

        Args:
            name: Name of the run: its folder is <default_root_dir>/<name>, numbered if that exists.
                The default is that of the configuration file (fedavg-digits for
                configs/digits/fedavg.yaml), or <algorithm>-<dataset>-s<seed>.
            max_epochs: Rounds.
            min_epochs: Rounds before a callback may stop the run.
            max_steps: Server updates; -1 for no limit.
            max_time: Wall-clock limit, such as 00:12:00:00.
            accelerator: cpu, gpu or auto.
            devices: Ranks on this node, one per device.
            num_nodes: Nodes.
            precision: Precision of local training.
            strategy: How ranks are started; only `federated` works here.
            logger: Lightning's loggers, besides the run folder. False for none: the run folder
                stays, because checkpoints and resuming need it, unless enable_checkpointing is
                False too.
            callbacks: Lightning callbacks. A callback that overrides hooks of steps is called in
                each session, as in a fit. For all others, an epoch is a round, and a batch is a
                wave of sessions. A class can choose by hears = "steps" or hears = "rounds".
            fast_dev_run: One round of one batch per client, no files.
            limit_train_batches: Batches (int) or share of the batches (float) per session.
            limit_val_batches: Evaluation jobs per rank; 0 for no validation. A limit makes metrics
                depend on the number of ranks. To test fewer clients, set model.eval_clients.
            limit_test_batches: The same as limit_val_batches, for `test`.
            check_val_every_n_epoch: Rounds between evaluations; the last round is always evaluated.
            enable_checkpointing: Write checkpoints/last.ckpt while the next round trains.
            checkpoint_every: Rounds between two checkpoints; 1 by default. A killed run can lose
                that many. A signal and the last round always write one.
            enable_progress_bar: Show rounds, sessions and time left.
            gradient_clip_val: Limit on the gradients of a local step.
            gradient_clip_algorithm: By norm of all parameters of a client; by value; or by norm of
                each of its networks (PFedMoE, FML, FedKD, FedAPEN), as in their authors' code.
            deterministic: Ask torch for deterministic operations. True ends the run at an operation
                that has no such form; warn names it and goes on. auto is warn on a GPU, where two
                runs would have different bits, and False on a CPU, where they have the same bits
                anyway.
            benchmark: cudnn.benchmark.
            profiler: Lightning profiler.
            detect_anomaly: Check every backward for nan.
            plugins: Lightning plugins.
            default_root_dir: Parent folder of the run folders.
            num_threads: Torch threads per rank on the CPU; more than one is slower if ranks share
                cores.
            ranks_per_device: Ranks that share each GPU, for clients too small to fill one. They
                communicate over gloo, since NCCL rejects two ranks on a GPU. Under SLURM, a node
                needs this many tasks per GPU.
            enable_page: Make the run folder's page and print the summary at the end.
        """
        check_variables(os.environ)
        self._deferred_checkpoints = []
        self._makes_page = enable_page
        self.limits = {
            "max_epochs": max_epochs,
            "max_steps": max_steps,
            "max_time": None if max_time is None else str(max_time),
        }
        if name is not None:
            check_name("trainer.name", name)
        checks.check_rounds(max_epochs=max_epochs, max_steps=max_steps, max_time=max_time)
        checks.check_least("trainer.num_threads", num_threads)
        checks.check_least("trainer.num_nodes", num_nodes)
        checks.check_least("trainer.ranks_per_device", ranks_per_device)
        checks.check_least("trainer.check_val_every_n_epoch", check_val_every_n_epoch)
        checks.check_limit("limit_train_batches", limit_train_batches, least=1)
        checks.check_limit("limit_val_batches", limit_val_batches, least=0)
        checks.check_limit("limit_test_batches", limit_test_batches, least=0)
        checks.check_clipping(gradient_clip_val, gradient_clip_algorithm)
        self.clipping = gradient_clip_algorithm
        strategy = checks.federated(strategy)
        checks.check_devices(accelerator, devices, ranks_per_device=ranks_per_device)
        strategy.ranks_per_device = ranks_per_device
        torch.set_num_threads(num_threads)
        # Otherwise Lightning's launcher sets another value.
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
        keep_heap()

        all_callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
        callbacks_of_rounds, self.step_callbacks = split(all_callbacks)

        # A user who wants neither loggers nor checkpoints wants a run that leaves nothing.
        leaves_nothing = fast_dev_run or (logger is False and not enable_checkpointing)
        folder = None if leaves_nothing else RunLogger(default_root_dir, name)
        loggers = with_folder(logger, folder)
        writes_checkpoints = enable_checkpointing and not fast_dev_run
        last = checks.last_checkpoint(checkpoint_every, enabled=writes_checkpoints)
        super().__init__(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            logger=loggers,
            callbacks=with_defaults(
                callbacks_of_rounds,
                loggers,
                checkpoint=last,
                max_time=max_time,
                progress=enable_progress_bar,
            ),
            fast_dev_run=fast_dev_run,
            max_epochs=max_epochs,
            min_epochs=min_epochs,
            max_steps=max_steps,
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            limit_test_batches=limit_test_batches,
            check_val_every_n_epoch=check_val_every_n_epoch,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            enable_checkpointing=writes_checkpoints,
            enable_progress_bar=enable_progress_bar,
            enable_model_summary=False,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm="value" if gradient_clip_algorithm == "value" else "norm",
            deterministic=None if deterministic == "auto" else deterministic,
            benchmark=benchmark,
            use_distributed_sampler=False,
            profiler=profiler,
            detect_anomaly=detect_anomaly,
            plugins=with_environment(plugins),
            default_root_dir=default_root_dir,
            enable_autolog_hparams=False,
        )
        if deterministic == "auto" and isinstance(self.accelerator, CUDAAccelerator):
            ask_for_same_bits(choose_fastest=bool(benchmark))
        self.fit_loop = FederatedLoop(self)
        self._signal_connector = FlagSignals(self)
        self._checkpoint_connector = Restores(self)

    @property
    def federation(self) -> Federation:
        """The root module."""
        module = federation_of(self)
        assert isinstance(module, Federation)
        return module

    @property
    def results(self) -> Run:
        """The tables of the run: `rounds`, and `clients` with a row for each client and evaluation.

        Raises:
            UserError: There is no run folder.
        """
        logger = self.run_logger
        if logger is None or not logger.claimed:
            raise UserError(
                "trainer.logger", "no run folder to read", "call fit, without fast_dev_run"
            )
        return read(logger.folder)

    @override
    def summarize(self, folder: Path) -> None:
        if not self._makes_page:
            return
        from lightfed.lab.report.page import build, print_summary  # pandas takes half a second

        build(folder)
        print_summary(folder)
        sys.stdout.flush()

    @override
    @silenced()
    def fit(
        self,
        *args: Any,
        ckpt_path: _PATH | None = None,
        json: bool = False,
        pause_after: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Run the rounds.

        Args:
            *args: The Federation and the FederatedDataModule, as for Lightning's Trainer.
            ckpt_path: A checkpoint to resume from; `last` for the newest run of this name and
                configuration, or a new run if there is none. A SLURM job resumes its own run
                without it.
            json: Print the final values for a program (docs/scripts.md), not a table. What would
                be on standard output besides goes to standard error.
            pause_after: Round after which the run stops for now, with its state on disk. Without
                it, and with ckpt_path last, the run goes on and gets the bits of one that never
                stopped.
            **kwargs: Likewise; checkpoints are always loaded as tensors and primitives.

        Raises:
            SystemExit: A signal has stopped the run; its state is on disk.
            UserError: A setting or file of the user cannot be used.
        """
        if pause_after is not None:
            checks.check_least("pause_after", pause_after)
        self.pause_after = pause_after
        if not json:
            self._fit(args, kwargs, ckpt_path)
            return

        logger = self.run_logger
        if logger is None:
            raise UserError(
                "--json",
                "no run folder to read",
                "leave out fast_dev_run, and logger: false with enable_checkpointing: false",
            )
        with redirect_stdout(sys.stderr):
            self._fit(args, kwargs, ckpt_path)
        if self.is_global_zero:
            from lightfed.lab.report.page import numbers  # pandas takes half a second

            print_json(numbers(read(logger.folder)))

    def _fit(self, args: Any, kwargs: Any, ckpt_path: _PATH | None) -> None:
        """Run the rounds; the arguments are those of `fit`."""
        self._check_launch(args, kwargs)
        self._check_first(args, kwargs)
        path = self._resolve(ckpt_path, fresh=True)
        self.resumes_from = path
        if self._is_finished():
            return

        logger = self.run_logger
        with listening(), nullcontext() if logger is None else logger.writing():
            try:
                with self.no_exit():
                    super().fit(*args, ckpt_path=path, **kwargs)  # type: ignore[misc]
            except Interrupted as ended:
                if ended.signal_number != PAUSED:
                    requeue.leave(ended, first=self.is_global_zero)
                if self.is_global_zero:
                    requeue.say_pause(ended)
                return
            except (MisconfigurationException, RuntimeError) as error:
                # Lightning finds out after the first round that nobody measures a monitor. Such a
                # run has not begun, and leaves no folder.
                is_new = path is None and self.current_epoch == 0
                if logger is not None and is_new and str(error).startswith(_NO_METRIC):
                    logger.place.give_up()
                raise

            self.strategy.barrier()  # a rank may have failed in its last hook
            if logger is not None and self.is_global_zero:
                self._conclude(logger)

    @override
    @silenced()
    def validate(self, *args: Any, ckpt_path: _PATH | None = None, **kwargs: Any) -> Any:
        """Evaluate the server's and the clients' models on their test splits.

        Args:
            *args: The Federation and the FederatedDataModule, as for Lightning's Trainer.
            ckpt_path: A checkpoint; `last` for the newest run of this name and configuration.
            **kwargs: Likewise.
        """
        path = self._prepare(args, kwargs, ckpt_path)
        with self.no_exit():
            return super().validate(*args, ckpt_path=path, **kwargs)  # type: ignore[misc]

    @override
    @silenced()
    def test(self, *args: Any, ckpt_path: _PATH | None = None, **kwargs: Any) -> Any:
        """Evaluate a checkpoint on the test splits; as validate, with Lightning's test hooks.

        Args:
            *args: The Federation and the FederatedDataModule, as for Lightning's Trainer.
            ckpt_path: A checkpoint; `last` for the newest run of this name and configuration.
            **kwargs: Likewise.
        """
        path = self._prepare(args, kwargs, ckpt_path)
        with self.no_exit():
            return super().test(*args, ckpt_path=path, **kwargs)  # type: ignore[misc]

    @override
    @silenced()
    def predict(
        self, *args: Any, client: int | None = None, ckpt_path: _PATH | None = None, **kwargs: Any
    ) -> list[Any]:
        """Predict with a client's deployed model, on its test samples or on given batches.

        Args:
            *args: The Federation and the FederatedDataModule, or a loader of batches.
            client: Number of the client whose model predicts; the server's model by default.
            ckpt_path: A checkpoint; `last` for the newest run of this name and configuration.
            **kwargs: Likewise.

        Returns:
            The outputs of each batch, on every rank.

        Raises:
            UserError: The client does not exist, or the algorithm has no such model.
        """
        federation = args[0] if args else kwargs.get("model") or self.federation
        if client is not None and not 0 <= client < federation.num_clients:
            found = f"client {client} of {federation.num_clients}"
            raise UserError("predict", found, "give a number from 0")
        federation.predicts = client
        path = self._prepare(args, kwargs, ckpt_path)
        with self.no_exit():
            outputs = super().predict(*args, ckpt_path=path, **kwargs)  # type: ignore[misc]

        # One rank has the model, and predicts; the others have lists of None.
        for outputs_of_a_rank in self.strategy.ranks.gather([outputs]):
            if outputs_of_a_rank and outputs_of_a_rank[0] is not None:
                predicted: list[Any] = outputs_of_a_rank
                return predicted
        raise AssertionError("no rank has predicted")

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], ckpt_path: _PATH | None
    ) -> _PATH | None:
        """Check what a user has given before an evaluation, and return the checkpoint's path."""
        self._check_launch(args, kwargs)
        return self._resolve(ckpt_path)


class FlagSignals(_SignalConnector):
    """Leaves signals to lightfed.utils.signals, which only records them.

    Lightning's handlers save and broadcast, which deadlocks if the signal interrupts a collective.
    Here the loop checks between sessions, all ranks stop at the same one and save, and `fit`
    requeues the job.
    """

    @override
    def register_signal_handlers(self) -> None:
        self.received_sigterm = False

    @override
    def teardown(self) -> None:
        pass


class Restores(_CheckpointConnector):
    """Restores a checkpoint; what cannot be restored is refused in one line.

    The server has no optimizer of Lightning's to restore.
    """

    @override
    def restore_model(self) -> None:
        with federation_state.restoring(self.trainer.ckpt_path):
            super().restore_model()

    @override
    def restore_callbacks(self) -> None:
        with federation_state.restoring(self.trainer.ckpt_path):
            super().restore_callbacks()

    @override
    def restore_loops(self) -> None:
        checkpoint = self._loaded_checkpoint
        is_resuming = self.trainer.state.fn == TrainerFn.FITTING and bool(checkpoint)
        if is_resuming and not isinstance(checkpoint.get("loops"), dict):
            raise UserError(
                "ckpt_path",
                f"{self.trainer.ckpt_path} has only weights, and no state of the training",
                "give a full checkpoint to go on training; weights alone can be tested",
            )
        with federation_state.restoring(self.trainer.ckpt_path):
            super().restore_loops()

    @override
    def restore_optimizers_and_schedulers(self) -> None:
        """Do nothing: the rate is a function of the round, by the configuration of this run."""
