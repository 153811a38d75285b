"""The root LightningModule: a federation's configuration and its Lightning hooks."""

import hashlib
import json
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import lightning.pytorch as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from typing_extensions import override

from lightfed.aggregation.coverage import Accumulate
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.distributed.placement import RATES, Rates
from lightfed.engine.checks import check_global_test, check_single_samples, warn_of_skipped
from lightfed.engine.evaluation import Evaluation, Jobs, Kind
from lightfed.engine.run_trainer import RunTrainer
from lightfed.engine.strategy import FederatedStrategy
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import Moment
from lightfed.local.local_work import LocalWork
from lightfed.local.packed.rules import SideBySide, packing
from lightfed.local.packed.rules import check as check_side_by_side
from lightfed.local.session import Report
from lightfed.local.session_runner import Waves
from lightfed.local.session_setup import (
    OptimizerFactory,
    ScheduleFactory,
    client_stepper,
    make_optimizer,
    make_schedule,
    runtime_of,
    step_schedule,
)
from lightfed.runs import checkpoint as checkpoints
from lightfed.runs.export import Exported, export, export_masks
from lightfed.runs.run_logger import Row, software
from lightfed.utils.errors import UserError
from lightfed.utils.heap import trim_heap

_FINGERPRINT = "lightfed_fingerprint"
_FRUITLESS = "lightfed_fruitless_rounds"
_LEDGER = "lightfed_ledger"
_COSTS = ("samples", "stored_bytes")  # of a client, written with its metrics
_LR = "lightfed_lr"  # of the last round: sessions in an evaluation train with it
_TESTS = "lightfed_round_tests"  # likewise
_METRICS = "lightfed_round_metrics"  # of a round that is trained but may not be validated


class Federation(L.LightningModule):
    """A federation: an algorithm and cohorts of clients.

    Registered sub-modules hold only server state, replicated on every rank. Client modules and rows
    are in the `Fleet`. `setup` creates it when the ranks are up and the data is split.

    Attributes:
        optimizer: of local training, as configured.
        host_rows: keep client rows in host memory.
        exchange_buffer: bytes per rank for rows that clients exchange.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: list[ClientGroup] | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        lr_schedule: ScheduleFactory | None = None,
        fraction: float = 1.0,
        clients_per_round: int | None = None,
        local_epochs: int = 1,
        local_steps: int | None = None,
        evaluate: Sequence[Kind] = ("global", "local", "personal"),
        evaluate_at: Moment | None = None,
        eval_clients: int | None = None,
        accumulate: Accumulate = "float64",
        store: Literal["device", "host"] = "device",
        exchange_buffer: int = 256,
        side_by_side: SideBySide = "auto",
        pack_memory: int = 256,
        max_failed_clients: int | None = None,
        export: Sequence[Exported] = ("server",),
        seed: int = 0,
        cohorts: list[ClientGroup] | None = None,
    ) -> None:
        """Configure the federation.

        Args:
            algorithm: The federated algorithm.
            clients: The clients, one group per architecture.
            optimizer: Optimizer of local training, reset for every session. Leave it out if the
                clients' modules define configure_optimizers.
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
            eval_clients: Number of clients to evaluate, drawn once; all by default.
            accumulate: Sums over clients in float64, or in 64-bit fixed point, which is exact.
            store: Keep client rows on the device, or in pinned host memory if they do not fit.
            exchange_buffer: Memory per rank, in MiB, for rows that clients exchange (DisPFL).
            side_by_side: Clients of a group that train at once, by one set of operators: a number,
                auto (where it pays and the module allows it) or off.
            pack_memory: Memory in MiB for the rows of clients that train at once, with their
                gradients; bounds auto.
            max_failed_clients: Number of sessions of a round that may fail, by an error or a
                non-finite update, before the run ends; they are left out and named. The run always
                ends when no session of a round has a usable update; with one session per round,
                after three such rounds in a row.
            export: Which weights to write to the run folder as safetensors at the end: of the
                server, of every client.
            seed: Seed of all draws.
            cohorts: Former name of clients, until version 0.3.
        """
        super().__init__()
        groups = self._groups_of(clients, cohorts)
        if eval_clients is not None and eval_clients < 1:
            fix = "give at least 1, or leave personal out of model.evaluate"
            raise UserError("model.eval_clients", f"{eval_clients} clients", fix)
        if optimizer is None and lr_schedule is not None:
            found = "nothing to schedule: model.optimizer is not given"
            fix = "give model.optimizer, or schedule in the clients' configure_optimizers"
            raise UserError("model.lr_schedule", found, fix)
        self.algorithm = algorithm
        self.cohorts = groups
        self.seed = seed
        self.num_clients = sum(group.count for group in groups)
        self.optimizer = optimizer
        self._lr_schedule = lr_schedule
        self._work = LocalWork(fraction, clients_per_round, local_epochs, local_steps)
        self._work.check(self.num_clients)
        self._kinds = tuple(evaluate)
        self._evaluate_at = evaluate_at
        self._eval_clients = eval_clients
        self._export = tuple(export)
        if exchange_buffer < 1:
            fix = "give at least 1; a few rows of the model make it quick"
            raise UserError("model.exchange_buffer", f"{exchange_buffer} MiB", fix)
        self.exchange_buffer = exchange_buffer * 2**20
        check_side_by_side(side_by_side)
        self._side_by_side: SideBySide = side_by_side
        self._pack_memory = pack_memory * 2**20
        if max_failed_clients is not None and max_failed_clients < 0:
            fix = "give 0 or more"
            raise UserError("model.max_failed_clients", f"{max_failed_clients} clients", fix)
        self._max_failed = max_failed_clients
        self._accumulate: Accumulate = accumulate
        self.host_rows = store == "host"
        self._round_metrics: dict[str, float] = {}
        self._evaluated: set[str] = set()  # names of the last evaluation's metrics
        self._round_started = 0.0
        self.fleet: Fleet
        self.evaluation: Evaluation

    @staticmethod
    def _groups_of(
        clients: list[ClientGroup] | None, cohorts: list[ClientGroup] | None
    ) -> list[ClientGroup]:
        """The client groups, also under their former name.

        Raises:
            UserError: both names are given, or no group, or a group that cannot be built.
        """
        if cohorts is not None:
            if clients is not None:
                raise UserError("model.cohorts", "given besides model.clients", "keep clients")
            warnings.warn("cohorts is now called clients", DeprecationWarning, stacklevel=3)
        groups = clients or cohorts
        if not groups:
            raise UserError("model.clients", "no group", "describe at least one: count, model")
        for position, group in enumerate(groups):
            group.check(position)
        return groups

    # Before the first round.

    @override
    def setup(self, stage: str) -> None:
        trainer, strategy = self.federated_trainer, self.trainer.strategy
        if not isinstance(strategy, FederatedStrategy):
            raise UserError("trainer.strategy", type(strategy).__name__, "use strategy: federated")
        if strategy.ranks.world > self.num_clients:
            raise UserError(
                "trainer.devices",
                f"{strategy.ranks.world} ranks for {self.num_clients} clients",
                "use at most one rank a client",
            )
        if hasattr(self, "fleet"):
            return  # `test` after `fit` in one process: the same federation
        data: Any = trainer.datamodule
        self.fleet = Fleet(
            self.cohorts,
            self.algorithm,
            data,
            ranks=strategy.ranks,
            work=self.work(trainer.limit_train_batches),
            seed=self.seed,
            accumulate=self._accumulate,
            host_rows=self.host_rows,
            exchange_buffer=self.exchange_buffer,
            max_failed=self._max_failed,
            rates=Rates.of_checkpoint(trainer.goes_on_from, strategy.ranks),
            rounds=trainer.max_epochs if (trainer.max_epochs or 0) > 0 else None,
        )
        check_global_test(self._kinds, data)
        check_single_samples(self.fleet, data)
        warn_of_skipped(self.fleet, data)
        runtime = runtime_of(trainer, clips=trainer.clipping)
        steppers = [
            client_stepper(
                state,
                i,
                self.optimizer,
                runtime,
                evaluated=bool(self._kinds),
                lr_factors=self.algorithm.lr_factors(state.module),
            )
            for i, state in enumerate(self.fleet.cohorts)
        ]
        self._packings = [
            packing(
                self._side_by_side,
                state,
                stepper,
                self.algorithm,
                data,
                batch_size=data.batch_size,
                expected=self.fleet.work.share(self.num_clients) * state.cohort.count,
                scaled=runtime.scaler is not None,
                memory=self._pack_memory,
            )
            for state, (stepper, _) in zip(self.fleet.cohorts, steppers, strict=True)
        ]
        self.fleet.training.attach(runtime, steppers, self._packings)
        self.evaluation = Evaluation(
            self.fleet,
            data,
            kinds=self._kinds,
            at=self._evaluate_at,
            clients=self._eval_clients,
        )

    @property
    def federated_trainer(self) -> RunTrainer:
        """The trainer, checked to be a FederatedTrainer."""
        if not isinstance(self.trainer, RunTrainer):
            raise UserError(
                "trainer", type(self.trainer).__name__, "use lightfed's FederatedTrainer"
            )
        return self.trainer

    def work(self, limit: int | float) -> LocalWork:
        """Local work and sampling under the Trainer's limit_train_batches."""
        unlimited = isinstance(limit, float) and limit == 1.0
        return self._work if unlimited else replace(self._work, limit=limit)

    @override
    def configure_optimizers(self) -> Any:
        """The template of the clients' optimisers.

        Its learning rate is that of the round, for LearningRateMonitor.
        """
        if self.optimizer is None:
            return []
        optimizer = make_optimizer(self.optimizer, [nn.Parameter(torch.zeros(()))])
        if self._lr_schedule is None:
            return optimizer
        return [optimizer], [make_schedule(self._lr_schedule, optimizer)]

    @override
    def on_fit_start(self) -> None:
        trainer = self.federated_trainer
        logger = trainer.run_logger
        if logger is None:
            return
        logger.place.own()
        if trainer.is_global_zero:
            trainer.datamodule.partition_.save(logger.folder / "partition.npz")

    @override
    def on_train_start(self) -> None:
        trim_heap()
        trainer = self.federated_trainer
        if trainer.run_logger is not None and trainer.is_global_zero:
            trainer.run_logger.start(self._environment(), finished_rounds=trainer.current_epoch)

    def _environment(self) -> dict[str, Any]:
        trainer, data = self.federated_trainer, self.federated_trainer.datamodule
        device = self.fleet.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        return (
            software()
            | {
                "algorithm": type(self.algorithm).__name__,
                "dataset": data.dataset.name,
                "synthetic": data.dataset.synthetic,
                "skipped_samples": data.skipped_samples,
                "clients": self.num_clients,
                "cohorts": {s.name: s.cohort.count for s in self.fleet.cohorts},
                "parameters": {s.name: s.layout.parameter_numel for s in self.fleet.cohorts},
                "rounds": trainer.max_epochs,
                "seed": self.seed,
                "ranks": trainer.world_size,
                "device": name,
                "precision": str(trainer.precision),
                "personal": self.algorithm.holds,
                "evaluate_at": self.evaluation.at,
                "side_by_side": {
                    state.name: found.reason or found.most
                    for state, found in zip(self.fleet.cohorts, self._packings, strict=True)
                },
            }
            | self.algorithm.facts(self.fleet)
        )

    # A round.

    def run_round(self, t: int, waves: Waves, *, validates: bool) -> None:
        """Run one round of the algorithm; the loop calls it and knows if validation follows."""
        self._round_started = time.monotonic()
        training = self.fleet.training
        training.waves = waves
        tested = frozenset(self.evaluation.clients)
        training.tested = dict.fromkeys(self.evaluation.in_sessions if validates else (), tested)
        self.fleet.open_round()
        self.algorithm.round(self.fleet, t)
        self._round_metrics = self.fleet.close_round()
        self._show()

    def set_learning_rate(self, t: int) -> None:
        """Set the learning rate of round t before its hooks, also in a resumed run."""
        optimizers = self.federated_trainer.optimizers
        if not optimizers:
            return
        for config in self.federated_trainer.lr_scheduler_configs:
            while config.scheduler.last_epoch < t:
                optimizers[0].step()  # the template has no gradient; torch requires this order
                step_schedule(config.scheduler)
        self.fleet.training.lr = float(optimizers[0].param_groups[0]["lr"])

    @override
    def on_train_epoch_end(self) -> None:
        # Before the checkpoint callbacks: every round with a checkpoint has its row on disk.
        trainer, t = self.federated_trainer, self.federated_trainer.current_epoch
        self._publish(self._round_metrics)
        for logger in trainer.loggers:
            logger.log_metrics(self._round_metrics, step=t)
        if trainer.run_logger is not None:
            # Depends on the machine; not part of the promise of equal bits.
            sent = self.fleet.ranks.take_wire_bytes()
            local = {"wire_bytes": sent, "seconds": time.monotonic() - self._round_started}
            trainer.run_logger.log_metrics(local, t)
            trainer.run_logger.end_round(t + 1)

    def _publish(self, figures: dict[str, float]) -> None:
        """Pass metrics to callbacks; `self.log` would cost a millisecond per metric.

        They are already reduced over ranks.
        """
        values = torch.tensor(list(figures.values()), dtype=torch.float64).unbind()
        self.trainer.callback_metrics.update(zip(figures, values, strict=True))

    def _show(self) -> None:
        """Show metrics on progress bars, which run before this module's `on_train_epoch_end`."""
        shown, found = self.trainer.progress_bar_metrics, self._round_metrics
        shown.pop("loss", None)  # this round may have no sessions
        names = {"loss": "train_loss"} | {k: k for k in ("global/accuracy", "personal/accuracy")}
        shown.update({name: found[key] for name, key in names.items() if key in found})

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("clients train in sessions; the root has no training step")

    # Evaluation.

    def evaluation_jobs(self) -> Jobs:
        """This rank's evaluation jobs, as a data loader."""
        return self.evaluation.jobs

    @override
    def on_validation_epoch_start(self) -> None:
        self.evaluation.start()

    @override
    def validation_step(self, batch: int, batch_idx: int) -> None:
        self.evaluation.run(batch)

    @override
    def on_validation_epoch_end(self) -> None:
        self._finish_evaluation()

    @override
    def on_test_epoch_start(self) -> None:
        self.evaluation.start()

    @override
    def test_step(self, batch: int, batch_idx: int) -> None:
        self.evaluation.run(batch)

    @override
    def on_test_epoch_end(self) -> None:
        self._finish_evaluation()

    def _finish_evaluation(self) -> None:
        fleet = self.fleet
        figures, reports = self.evaluation.finish(fleet.tests)
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if not fitting:
            passed = {m: k for m, k in self.evaluation.in_sessions.items() if m not in fleet.tests}
            for moment, kind in passed.items():
                gone = f"model.evaluate_at: what clients have when they are {moment} is measured in"
                fleet.warn(f"{gone} a round's sessions; there is no {kind} figure without one")
            self.log_dict(figures, sync_dist=True, rank_zero_only=True)
            return
        # A cohort that was not tested must not keep the metric of an earlier evaluation.
        for name in self._evaluated - figures.keys():
            self.trainer.callback_metrics.pop(name, None)
        self._evaluated = set(figures)
        self._publish(figures)
        self._round_metrics |= figures
        self._show()
        arrays = self.algorithm.evaluation_end(self.fleet)
        rounds = self.trainer.global_step
        logger = self.federated_trainer.run_logger
        if logger is not None:
            logger.log_clients(self._client_rows(reports))
            logger.log_arrays(rounds, arrays)
        if rounds == self.trainer.current_epoch:  # the round's other metrics are written
            for each in self.trainer.loggers:
                each.log_metrics(figures, step=rounds - 1)

    def _client_rows(self, reports: Mapping[Kind, Sequence[Report]]) -> list[Row]:
        """One row per client, same columns: personal metrics bare, others as `kind/name`."""
        found: dict[int, Row] = {}
        for kind, tests in reports.items():
            for report in tests:
                prefix = "" if kind == "personal" else f"{kind}/"
                row = found.setdefault(report.client, {})
                row |= {f"{prefix}{name}": value for name, value in report.metrics.items()}
                if kind == "personal" or "samples" not in row:
                    row |= {"samples": report.samples, "stored_bytes": report.stored}
        names = dict.fromkeys(name for row in found.values() for name in row if name not in _COSTS)
        return [self._client_row(client, found[client], names) for client in sorted(found)]

    def _client_row(self, client: int, found: Row, names: Iterable[str]) -> Row:
        up, down, flops = self.fleet.ledger.totals[client].tolist()
        return {
            "round": self.trainer.global_step,
            "client": client,
            "cohort": self.fleet.cohorts[self.fleet.home_cohort(client)].name,
            "samples": found["samples"],
            **{name: found.get(name, "") for name in names},
            "bytes_up": up,
            "bytes_down": down,
            "flops": flops,
            "stored_bytes": found["stored_bytes"],
        }

    @override
    def on_train_end(self) -> None:
        logger = self.federated_trainer.run_logger
        if logger is not None:
            export(self.fleet, logger.folder / "models", kinds=self._export)
            export_masks(self.fleet, logger.folder / "masks")
            self.fleet.ranks.barrier()  # rank 0 makes the run's page from all ranks' files

    # Checkpoints.

    def fingerprint(self) -> dict[str, Any]:
        """Properties that a checkpoint and the run that resumes from it must share."""
        data = self.federated_trainer.datamodule
        return {
            "algorithm": type(self.algorithm).__name__,
            "cohorts": [[s.name, s.cohort.count] for s in self.fleet.cohorts],
            "architectures": [_digest(s.layout.signature()) for s in self.fleet.cohorts],
            "seed": self.seed,
            "partition": data.partition_.digest,
            "server state": _digest({n: list(v.shape) for n, v in self.state_dict().items()}),
        }

    def round_identity(self) -> dict[str, Any]:
        """Properties that a round's journal and the round that resumes from it must share."""
        logger = self.federated_trainer.run_logger
        config = None if logger is None else logger.place.config
        return {"fingerprint": self.fingerprint(), "lr": self.fleet.training.lr, "config": config}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[_FINGERPRINT] = self.fingerprint()
        checkpoint[_FRUITLESS] = self.fleet.fruitless_rounds
        checkpoint[_METRICS] = self._round_metrics
        checkpoint[_TESTS] = {
            m: [asdict(r) for r in found] for m, found in self.fleet.tests.items()
        }
        checkpoint[_LR] = self.fleet.training.lr
        checkpoint[RATES] = self.fleet.rates.state_dict()
        checkpoint[_LEDGER] = torch.from_numpy(self.fleet.ledger.totals.copy())
        states = self.fleet.states()
        if states is not None:
            checkpoint[checkpoints.CLIENTS] = states

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        theirs, ours = checkpoint.get(_FINGERPRINT, {}), self.fingerprint()
        for name, value in ours.items():
            if theirs.get(name) != value:
                raise UserError(
                    "ckpt_path",
                    f"a checkpoint of another federation: its {name} is {theirs.get(name)}, "
                    f"this run's is {value}",
                    "resume with the configuration it was made with: config.yaml in its run folder",
                )
        self.fleet.fruitless_rounds = checkpoint.get(_FRUITLESS, 0)  # version 0.1 has none
        self._round_metrics = checkpoint[_METRICS]
        tests = checkpoint.get(_TESTS, {})  # none in a checkpoint of version 0.1
        self.fleet.tests = {m: [Report(**r) for r in found] for m, found in tests.items()}
        self.fleet.training.lr = checkpoint[_LR]
        self.fleet.ledger.totals[:] = checkpoint[_LEDGER].numpy()
        self.fleet.load_states(checkpoint[checkpoints.CLIENTS])


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def federation_of(trainer: L.Trainer) -> Federation:
    """The root module of a run.

    Raises:
        UserError: it is another module.
    """
    module = trainer.lightning_module
    if not isinstance(module, Federation):
        found = f"a {type(module).__name__}"
        raise UserError("model", found, "pass a lightfed Federation to the FederatedTrainer")
    return module
