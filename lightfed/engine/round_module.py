"""The root LightningModule of a run, whose hooks do in a federation what they do for one model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.distributed.steps import step_under_way
from lightfed.engine.evaluation import Evaluation
from lightfed.engine.round_report import RoundReport, exact
from lightfed.engine.run_trainer import RunTrainer
from lightfed.local.local_work import RoundPlan
from lightfed.local.rank_sessions import Waves
from lightfed.models.evaluating import StageHooks, warn_of_missing_test_step
from lightfed.runs import federation_state
from lightfed.runs.export import Exported, check, export, export_masks
from lightfed.runs.federation_state import FINGERPRINT, METRICS
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import NoEnd, UserError
from lightfed.utils.lightning_private import is_overridden
from lightfed.utils.memory import trim_heap


class RoundModule(L.LightningModule):
    """A root module whose epochs are rounds of an algorithm.

    Its registered sub-modules hold only the state of the server, which every rank has. The clients'
    modules and rows are in the `Fleet`, which `setup` makes when the ranks are connected and the
    data is split.

    A subclass sets `algorithm` and `exports`, and defines `assemble` and `prepare`.

    Attributes:
        algorithm: Runs the rounds.
        exports: Which weights are written at the end.
        fleet: The clients; there from `setup` on.
        evaluation: Tests the clients' models and the server's; there from `setup` on.
        predicts: The client whose model `predict` uses; None for the server's model.
    """

    algorithm: Algorithm
    exports: Sequence[Exported]
    fleet: Fleet
    evaluation: Evaluation

    def __init__(self) -> None:
        super().__init__()
        self.predicts: int | None = None
        self._report = RoundReport()

    def assemble(self, stage: str) -> Fleet:
        """Make the clients, when the ranks are connected and the data is split.

        Args:
            stage: What runs: fit, validate, test or predict.
        """
        raise NotImplementedError

    def prepare(self, stage: str) -> Evaluation:
        """Set up what belongs to the run and needs the clients, and make their tests.

        Users' callbacks are set up here, and may ask for `fleet`.

        Args:
            stage: What runs: fit, validate, test or predict.
        """
        raise NotImplementedError

    @override
    def setup(self, stage: str) -> None:
        if hasattr(self, "evaluation"):
            return  # `test` after `fit` in one process: it is the same federation
        self.fleet = self.assemble(stage)
        self.evaluation = self.prepare(stage)

    @override
    def teardown(self, stage: str) -> None:
        """Tell the clients' modules that the run is over; Lightning knows only the root module."""
        if not hasattr(self, "fleet"):
            return  # the run has failed before there were clients
        for state in self.fleet.groups:
            if state.trainer is not None:
                state.trainer.close()

    @property
    def federated_trainer(self) -> RunTrainer:
        """The Trainer of the run.

        Raises:
            UserError: It is a Trainer of another class.
        """
        if not isinstance(self.trainer, RunTrainer):
            found = type(self.trainer).__name__
            raise UserError("trainer", found, "use lightfed's FederatedTrainer")
        return self.trainer

    @override
    def on_fit_start(self) -> None:
        trainer = self.federated_trainer
        logger = trainer.run_logger
        if logger is None:
            return

        # Taking the folder ends any other process that still writes to it. So it is taken only now,
        # when the checkpoint is loaded and the run is known to be able to resume.
        self.fleet.ranks.first(logger.check)
        logger.place.own()
        if trainer.is_global_zero:
            trainer.datamodule.partition_.save(logger.folder / "partition.npz")

    @override
    def on_train_start(self) -> None:
        trim_heap()  # what was needed only to build the clients goes back to the system
        check(self.fleet, self.exports)
        self._report.begin(self.federated_trainer, self.fleet, self.evaluation)

    def run_round(self, t: int, plan: RoundPlan, waves: Waves, *, validates: bool) -> None:
        """Run one round of the algorithm; called by the loop.

        Args:
            t: The round.
            plan: What the loop has decided about it.
            waves: Runs the sessions of this rank, with the hooks of the loop.
            validates: Whether an evaluation follows, for which some models are tested in their
                sessions.
        """
        self._report.start()
        if validates:
            clients = frozenset(self.evaluation.clients)
            plan = replace(plan, tested=dict.fromkeys(self.evaluation.in_sessions, clients))
        self.fleet.open_round(plan, waves)

        with self.fleet.ranks.timings.part("merge"):  # all of the round that is no session
            self.algorithm.round(self.fleet, t)

        metrics = self.fleet.close_round()
        manually = any(not s.module.automatic_optimization for s in self.fleet.groups)
        self._report.trained(self.federated_trainer, metrics, manually=manually)

    @override
    def on_train_epoch_end(self) -> None:
        self._report.end(self.federated_trainer, self.fleet)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("clients train in sessions; the root has no training step")

    @override
    def on_validation_epoch_start(self) -> None:
        self.evaluation.start()

    @override
    def validation_step(self, batch: int, batch_idx: int) -> None:
        with NoEnd("an evaluation"):
            self.evaluation.run(batch)

    @override
    def on_validation_epoch_end(self) -> None:
        metrics, reports = self.evaluation.finish(self.fleet.tests)
        if self.trainer.state.fn != TrainerFn.FITTING:
            # `validate` and `test` return what the root module has logged.
            self.evaluation.warn_outside_of_rounds(trained=bool(self._report.metrics))
            self.log_dict(exact(metrics), sync_dist=True, rank_zero_only=True)
            return

        arrays: Mapping[str, Mapping[str, Tensor]] = {}
        if self.evaluation.tests_anything:
            arrays = self.algorithm.evaluation_end(self.fleet)
        self._report.evaluated(self.federated_trainer, self.fleet, metrics, reports, arrays)

    on_predict_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    @override
    def on_test_epoch_start(self) -> None:
        if self.trainer.is_global_zero:
            module_of_class = {type(s.module): s.module for s in self.fleet.groups}
            for module in module_of_class.values():
                warn_of_missing_test_step(module)
        self.evaluation.start()

    @override
    def on_predict_epoch_start(self) -> None:
        with self._predicting() as hooks:
            if hooks is not None:
                hooks.start()

    @override
    def on_predict_epoch_end(self) -> None:
        with self._predicting() as hooks:
            if hooks is not None:
                hooks.end()

    @contextmanager
    def _predicting(self) -> Iterator[StageHooks | None]:
        """Bind the module that predicts to its model, for a block.

        Yields:
            The hooks of that module; None on ranks that do not have the model.
        """
        fleet = self.fleet
        client = self.predicts
        if client is not None and fleet.stateful:
            rank_of_client = fleet.places.owner.get(client, fleet.ranks.rank)
            if rank_of_client != fleet.ranks.rank:
                yield None
                return

        rows = fleet.deployed(client)
        with (
            NoEnd("a prediction"),
            rows.bound(rows.clients[0]) as module,
            step_under_way(),
        ):
            yield StageHooks(module, "predict")
            fleet.client_sessions.session_of(module).forget()

    @override
    def predict_step(self, batch: Any, *args: Any) -> Any:
        """Return the outputs of the model that the client deploys; None on other ranks."""
        with self._predicting() as hooks:
            if hooks is None:
                return None
            batch = hooks.transferred(batch, self.fleet.device)
            module = hooks.module
            if not is_overridden("predict_step", module):
                # Lightning would call the module's own `forward` with the whole batch. The labels
                # are no argument of it.
                hooks.step = lambda batch, _: module(
                    batch[0] if isinstance(batch, list | tuple) else batch
                )
            return hooks.run(batch, *args)

    @override
    def on_train_end(self) -> None:
        logger = self.federated_trainer.run_logger
        if logger is None:
            return
        export(self.fleet, logger.folder / "models", kinds=self.exports)
        export_masks(self.fleet, logger.folder / "masks")
        self.fleet.ranks.barrier()  # rank 0 makes the run's page from all ranks' files

    def fingerprint(self) -> dict[str, Any]:
        """Return properties that a checkpoint and the run that resumes from it must share."""
        partition = self.federated_trainer.datamodule.partition_.digest
        return federation_state.fingerprint(self.fleet, partition, self.state_dict())

    def round_identity(self, lr: float | None) -> dict[str, Any]:
        """Return properties that a journal and the round that goes on from it must share.

        Args:
            lr: The learning rate of the round.
        """
        logger = self.federated_trainer.run_logger
        config = None if logger is None else logger.place.config
        return {"fingerprint": self.fingerprint(), "lr": lr, "config": config}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[FINGERPRINT] = self.fingerprint()
        checkpoint[METRICS] = self._report.metrics
        checkpoint.update(federation_state.save(self.fleet))

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        federation_state.check_same(checkpoint[FINGERPRINT], self.fingerprint())

        server_models = set()
        for name, module in self.named_modules():
            if isinstance(module, ServerModel):
                server_models.add(f"{name}.floats")
        path = self.federated_trainer.ckpt_path
        federation_state.check_values(
            checkpoint["state_dict"], self.state_dict(), server_models, path
        )

        self._report.metrics = dict(checkpoint[METRICS])
        federation_state.load(self.fleet, checkpoint)
        logger = self.federated_trainer.run_logger
        if logger is not None:
            logger.place.resumed_from()


def federation_of(trainer: L.Trainer) -> RoundModule:
    """Return the root module of a run.

    Raises:
        UserError: It is a module of another class.
    """
    module = trainer.lightning_module
    if not isinstance(module, RoundModule):
        found = f"a {type(module).__name__}"
        raise UserError("model", found, "pass a lightfed Federation to the FederatedTrainer")
    return module
