"""The root LightningModule: a federation's configuration and its Lightning hooks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import lightning.pytorch as L
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.devices.devices import Devices
from lightfed.devices.fitting import FastestFit, fitted
from lightfed.devices.policy import Policy
from lightfed.distributed.steps import step_under_way
from lightfed.engine import checks, session_setup, setup
from lightfed.engine.evaluation import Evaluation, Kind
from lightfed.engine.round_report import RoundReport, exact
from lightfed.engine.run_trainer import RunTrainer
from lightfed.engine.session_setup import OptimizerFactory, ScheduleFactory
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import LocalPenalty
from lightfed.local.local_work import LocalWork, RoundPlan
from lightfed.local.rank_sessions import Waves
from lightfed.models.evaluating import StageHooks, warn_of_missing_test_step
from lightfed.packs.packing import Packs, SideBySide
from lightfed.runs import federation_state
from lightfed.runs.export import Exported, check, export, export_masks
from lightfed.runs.federation_state import FINGERPRINT, METRICS
from lightfed.state.rows import Moment
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import NoEnd, UserError, require
from lightfed.utils.lightning_private import is_overridden
from lightfed.utils.memory import trim_heap
from lightfed.utils.recorded import Recorded

F = TypeVar("F", bound=Fleet)


class Federation(Recorded, L.LightningModule):
    """A federation: an algorithm and groups of clients.

    Registered sub-modules hold only server state, replicated on every rank. Client modules and rows
    are in the `Fleet`. `setup` creates it when the ranks are up and the data is split.

    Attributes:
        optimizer: of local training, as configured.
        packs: how clients train side by side, as configured.
        predicts: the client whose model `predict` uses; None for the server's.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: list[ClientGroup] | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        server_optimizer: OptimizerFactory | None = None,
        personal: list[str] | str = "",
        local_penalty: LocalPenalty | None = None,
        keep_optimizer: bool = False,
        lr_schedule: ScheduleFactory | None = None,
        fraction: float = 1.0,
        clients_per_round: int | None = None,
        local_epochs: int = 1,
        local_steps: int | None = None,
        evaluate: Sequence[Kind] = ("global", "local", "personal"),
        evaluate_at: Moment | None = None,
        eval_clients: int | None = None,
        store: Literal["device", "host"] = "device",
        side_by_side: SideBySide = "auto",
        pack_memory: int = 256,
        max_failed_clients: int | None = None,
        devices: Devices | None = None,
        policy: Policy | None = None,
        assign: FastestFit | None = None,
        export: Sequence[Exported] = ("server",),
        seed: int = 0,
    ) -> None:
        """Configure the federation.

        Args:
            algorithm: The federated algorithm.
            clients: The clients, one group per architecture.
            optimizer: Optimizer of local training, reset for every session unless it is kept. Leave
                it out if the clients' modules define configure_optimizers.
            server_optimizer: Optimizer that takes what clients are merged to as a step, such as
                FedAdam, FedYogi, FedAdagrad, or torch's SGD with momentum (FedAvgM, DiLoCo). By
                default the merge is the server's new model.
            personal: Tensors that stay with their client, as of FedPer and FedBN: prefixes of their
                names, such as net.fc, or norms for all normalisation layers. They are never sent or
                merged, and the server's model is tested only with a client's own.
            local_penalty: Term of the clients' objective besides their loss: Pull (FedProx),
                LinearTerm (FedDyn), Contrast (MOON), or a LocalPenalty of your own.
            keep_optimizer: A client's optimizer goes on from its last session, with its momentum.
            lr_schedule: Learning rate over rounds: a torch scheduler, stepped once per round.
            fraction: Share of the clients that take part in a round.
            clients_per_round: Number of clients that take part in a round, instead of fraction.
            local_epochs: Epochs per session.
            local_steps: Steps per session, instead of local_epochs.
            evaluate: Which evaluations: global (the server's model on the global test set), local
                (the server's model on each client's test split, if clients have other models),
                personal (each client's model on its own test split), trained or aggregated (the
                same at that moment, in addition to evaluate_at), finetuned (the server's model
                after a session on the client's training split).
            evaluate_at: When personal is measured: aggregated (after the last aggregation) or
                trained (after the client's session). Models that the round overwrites are measured
                in its sessions, for its participants. The default follows the algorithm's paper;
                set it to compare methods.
            eval_clients: Number of clients to evaluate, drawn once; by default all, or 1,000 of
                more.
            store: Keep client rows on the device, or in pinned host memory if they do not fit.
            side_by_side: Clients of a group that train at once, by one set of operators: a number,
                auto (32 where it pays and all layers are known) or off.
            pack_memory: Memory in MiB for the rows, gradients and activations of clients that train
                at once.
            max_failed_clients: Number of sessions of a round that may fail, by an error or a
                non-finite update, before the run ends; they are left out and named. All but one by
                default. The run always ends when all of several sessions of a round have failed.
            devices: What the clients' devices compute and transfer in a second: rounds take virtual
                time, which is in metrics.csv, clients.csv and on the page.
            policy: What the server waits for in virtual time, and what becomes of late updates and
                of clients that leave.
            assign: Deals the clients to the groups, by what their devices can train. The counts of
                the groups then only add up to the number of clients.
            export: Which weights to write to the run folder as safetensors at the end: of the
                server, of every client.
            seed: Seed of all draws.
        """
        super().__init__()
        found = "nothing to schedule: model.optimizer is not given"
        fix = "give model.optimizer, or schedule in the clients' configure_optimizers"
        require(optimizer is not None or lr_schedule is None, "model.lr_schedule", found, fix)
        self.algorithm, self.seed = checks.algorithm(algorithm), seed
        self.groups = checks.client_groups(clients, dealt=assign is not None)
        self.num_clients = sum(group.count for group in self.groups)
        checks.check_least("model.eval_clients", eval_clients)
        checks.check_least("model.max_failed_clients", max_failed_clients, 0)
        found, fix = f"{eval_clients} of {self.num_clients} clients", "leave it out for all"
        require((eval_clients or 0) <= self.num_clients, "model.eval_clients", found, fix)
        self.optimizer, self._lr_schedule = optimizer, lr_schedule
        self._work = LocalWork(fraction, clients_per_round, local_epochs, local_steps)
        self._work.check(self.num_clients)
        self._fleet_options: dict[str, Any] = {
            "seed": seed,
            "host_rows": store == "host",
            "max_failed": max_failed_clients,
            "server_optimizer": server_optimizer,
            "local_penalty": local_penalty,
            "keep_optimizer": keep_optimizer,
            "personal": [personal] if isinstance(personal, str) and personal else [*personal],
            "devices": devices,
            "policy": policy,
        }
        self._assign = assign
        if assign is not None:
            assign.check(devices)
        self._kinds = tuple(evaluate)
        self.packs = Packs(side_by_side, pack_memory)
        self._evaluate = partial(
            Evaluation, kinds=self._kinds, at=evaluate_at, clients=eval_clients
        )
        self._export = tuple(export)
        self._report = RoundReport()
        self.predicts: int | None = None
        self.fleet: Fleet
        self.evaluation: Evaluation

    @override
    def setup(self, stage: str) -> None:
        trainer = self.federated_trainer
        if hasattr(self, "fleet"):
            return  # `test` after `fit` in one process: the same federation
        data, ranks = trainer.datamodule, trainer.strategy.ranks
        self.fleet = self.make_fleet(Fleet, data, trainer, ranks=ranks)
        setup.attach_configured(trainer, self.fleet, self, stage)
        validates = stage != "fit" or trainer.limit_val_batches != 0
        evaluated = self._kinds if validates else ()
        setup.check_built(evaluated, self.fleet, data, tests=stage == "test")
        self.evaluation = self._evaluate(self.fleet, data)

    @override
    def teardown(self, stage: str) -> None:
        """Lightning calls this after a run: so it is over for the clients' modules, too."""
        for state in self.fleet.groups if hasattr(self, "fleet") else ():
            if state.trainer is not None:
                state.trainer.close()

    @property
    def federated_trainer(self) -> RunTrainer:
        """The trainer, checked to be a FederatedTrainer."""
        if not isinstance(self.trainer, RunTrainer):
            found = type(self.trainer).__name__
            raise UserError("trainer", found, "use lightfed's FederatedTrainer")
        return self.trainer

    def dealt(
        self, data: FederatedDataModule, trainer: RunTrainer
    ) -> tuple[list[ClientGroup], LocalWork, Devices | None]:
        """The groups with their clients, the work of a round, and the devices in that order."""
        limit, devices = trainer.limit_train_batches, self._fleet_options["devices"]
        all_of_them = limit == 1.0 and isinstance(limit, float)
        data.trainer = trainer  # also in a plan
        work = replace(self._work, limit=None if all_of_them else limit)
        if self._assign is None:
            return self.groups, work, devices
        groups, devices = fitted(
            self._assign, self.groups, self.algorithm, devices, data, work, seed=self.seed
        )
        return groups, work, devices

    def make_fleet(
        self, kind: type[F], data: FederatedDataModule, trainer: RunTrainer, **given: Any
    ) -> F:
        """The clients with their sessions, under the limits of a Trainer.

        `kind` is a class of fleets, `given` its arguments that are not configured: ranks, rates.
        """
        rounds = trainer.max_epochs or 0
        groups, work, devices = self.dealt(data, trainer)
        fleet = kind(
            groups,
            self.algorithm,
            data,
            work=work,
            rounds=rounds if rounds > 0 else None,
            pack=setup.packing_of(self.packs, self.optimizer, trainer),
            host=setup.host_of(trainer, data),
            **self._fleet_options | {"devices": devices},
            **given,
        )
        setup.attach_sessions(fleet, data, trainer, self.optimizer)
        return fleet

    @override
    def configure_optimizers(self) -> Any:
        if self.optimizer is None:
            return []
        rounds = self.federated_trainer.max_epochs or -1
        first = next(state for state in self.fleet.groups if state.takes_lr)
        return session_setup.template(
            self.optimizer, self._lr_schedule, rounds=rounds, parameters=first.live.trainable
        )

    @override
    def on_fit_start(self) -> None:
        trainer = self.federated_trainer
        logger = trainer.run_logger
        if logger is None:
            return
        self.fleet.ranks.first(logger.check)
        logger.place.own()
        if trainer.is_global_zero:
            trainer.datamodule.partition_.save(logger.folder / "partition.npz")

    @override
    def on_train_start(self) -> None:
        trim_heap()
        check(self.fleet, self._export)
        self._report.begin(self.federated_trainer, self.fleet, self.evaluation)

    def run_round(self, t: int, plan: RoundPlan, waves: Waves, *, validates: bool) -> None:
        """Run one round of the algorithm; the loop calls it and knows if validation follows."""
        self._report.start()
        tested = frozenset(self.evaluation.clients)
        moments = self.evaluation.in_sessions if validates else ()
        self.fleet.open_round(replace(plan, tested=dict.fromkeys(moments, tested)), waves)
        with self.fleet.ranks.timings.part("merge"):  # all of it that is no session
            self.algorithm.round(self.fleet, t)
        manually = any(not s.module.automatic_optimization for s in self.fleet.groups)
        metrics = self.fleet.close_round()
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
            self.evaluation.warn_outside_of_rounds(trained=bool(self._report.metrics))
            self.log_dict(exact(metrics), sync_dist=True, rank_zero_only=True)
            return
        arrays = self.algorithm.evaluation_end(self.fleet)
        self._report.evaluated(self.federated_trainer, self.fleet, metrics, reports, arrays)

    on_predict_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    @override
    def on_test_epoch_start(self) -> None:
        for module in {type(s.module): s.module for s in self.fleet.groups}.values():
            if self.trainer.is_global_zero:
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
        """The hooks of the module that predicts, bound to its model; None on other ranks."""
        fleet, client = self.fleet, self.predicts
        owner = fleet.places.owner if fleet.stateful else {}
        if client is not None and owner.get(client, fleet.ranks.rank) != fleet.ranks.rank:
            yield None
            return
        rows = fleet.deployed(client)
        with (
            NoEnd("a prediction"),
            rows.bound(rows.clients[0]) as module,
            step_under_way(),
        ):
            yield StageHooks(module, "predict")
            fleet.training.session_of(module).forget()

    @override
    def predict_step(self, batch: Any, *args: Any) -> Any:
        """The outputs of the model that the client deploys, on its rank; None on the others."""
        with self._predicting() as hooks:
            if hooks is None:
                return None
            batch = hooks.transferred(batch, self.fleet.device)
            module = hooks.module
            if not is_overridden("predict_step", module):
                # The module's own `forward`, without the labels.
                hooks.step = lambda batch, _: module(
                    batch[0] if isinstance(batch, list | tuple) else batch
                )
            return hooks.run(batch, *args)

    @override
    def on_train_end(self) -> None:
        logger = self.federated_trainer.run_logger
        if logger is not None:
            export(self.fleet, logger.folder / "models", kinds=self._export)
            export_masks(self.fleet, logger.folder / "masks")
            self.fleet.ranks.barrier()  # rank 0 makes the run's page from all ranks' files

    def fingerprint(self) -> dict[str, Any]:
        """Properties that a checkpoint and the run that resumes from it must share."""
        partition = self.federated_trainer.datamodule.partition_.digest
        return federation_state.fingerprint(self.fleet, partition, self.state_dict())

    def round_identity(self, lr: float | None) -> dict[str, Any]:
        """Properties that a round's journal and the round that resumes from it must share."""
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
        named = self.named_modules()
        models = {f"{name}.floats" for name, part in named if isinstance(part, ServerModel)}
        path = self.federated_trainer.ckpt_path
        federation_state.check_values(checkpoint["state_dict"], self.state_dict(), models, path)
        self._report.metrics = dict(checkpoint[METRICS])
        federation_state.load(self.fleet, checkpoint)
        logger = self.federated_trainer.run_logger
        if logger is not None:
            logger.place.resumed_from()


def federation_of(trainer: L.Trainer) -> Federation:
    """The root module of a run; a UserError if it is another."""
    module = trainer.lightning_module
    if not isinstance(module, Federation):
        found = f"a {type(module).__name__}"
        raise UserError("model", found, "pass a lightfed Federation to the FederatedTrainer")
    return module
