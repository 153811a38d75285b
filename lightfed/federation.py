"""The settings of a run, and the one place that puts the core and its rings together."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from torch.optim import Optimizer
from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.devices.devices import Devices
from lightfed.devices.fitting import FastestFit, fitted
from lightfed.devices.policy import Policy
from lightfed.devices.timing import Timing
from lightfed.engine import checks, session_setup, setup
from lightfed.engine.evaluation import Evaluation, Kind
from lightfed.engine.round_module import RoundModule
from lightfed.engine.run_trainer import RunTrainer
from lightfed.engine.session_setup import OptimizerFactory, ScheduleFactory
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import LocalPenalty
from lightfed.local.local_work import LocalWork
from lightfed.packs.packing import Packs, SideBySide
from lightfed.packs.runner import PackRunner
from lightfed.runs.export import Exported
from lightfed.state.rows import Moment
from lightfed.utils.errors import UserError
from lightfed.utils.recorded import Recorded

F = TypeVar("F", bound=Fleet)


class Federation(Recorded, RoundModule):
    """A federation: an algorithm and groups of clients.

    Its registered sub-modules hold only server state, which every rank has a copy of. The modules
    and rows of clients are in the `Fleet`, which is made when the ranks are up and the data is
    split.

    Attributes:
        algorithm: The federated algorithm.
        groups: The client groups as configured.
        num_clients: Number of clients.
        seed: Seed of all draws.
        optimizer: Makes the optimizer of local training; None if the clients' modules do.
        packs: How clients train side by side.
        exports: The weights to write at the end of a run.
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
        local_seconds: float | None = None,
        evaluate: Sequence[Kind] = ("global", "local", "personal"),
        evaluate_at: Moment | None = None,
        eval_clients: int | None = None,
        unseen_epochs: int | None = None,
        store: Literal["device", "host"] = "device",
        side_by_side: SideBySide = "auto",
        pack_memory: int | None = None,
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
            server_optimizer: Optimizer of the server's model, such as FedAdam, FedYogi, FedAdagrad,
                or torch's SGD with momentum (FedAvgM, DiLoCo). Its gradient is the server's model
                minus the merged one. By default the merged model is the server's new model.
            personal: Tensors that stay with their client, as in FedPer and FedBN: prefixes of their
                names, such as net.fc, or norms for all normalization layers. They are never sent or
                merged, and the server's model is tested only with a client's own.
            local_penalty: Term of the clients' objective besides their loss: Pull (FedProx),
                LinearTerm (FedDyn), Contrast (MOON), or a LocalPenalty of your own.
            keep_optimizer: Each client continues with the optimizer of its last session, momentum
                included.
            lr_schedule: Learning rate over rounds: a torch scheduler, stepped once per round.
            fraction: Share of the clients that take part in a round.
            clients_per_round: Number of clients that take part in a round, instead of fraction.
            local_epochs: Epochs per session.
            local_steps: Steps per session, instead of local_epochs.
            local_seconds: Virtual seconds of computation per session, instead of local_epochs: each
                client takes as many steps as its device (devices) does in them, at least one.
            evaluate: Which evaluations: global (the server's model on the global test set), local
                (the server's model on each client's test split, if clients have other models),
                personal (each client's model on its own test split), trained or aggregated (the
                same at that moment, in addition to evaluate_at), finetuned (the server's model
                after a session on the client's training split).
            evaluate_at: When personal is measured: aggregated (after the last aggregation) or
                trained (after the client's session). Models that the round overwrites are measured
                in its sessions, for its participants. The default follows the algorithm's paper;
                set it to compare methods.
            eval_clients: Number of clients to evaluate, drawn once; by default all, but at most
                1,000.
            unseen_epochs: Epochs in which a client that never takes part (data.unseen) trains what
                the method leaves with its clients, before it is tested on it; by default as long as
                a session. It changes no other client and nothing of the server.
            store: Keep client rows on the device, or in pinned host memory if they do not fit.
            side_by_side: Clients of a group that train at once, by one set of operators: a number,
                auto (32 where it pays and all layers are known) or off.
            pack_memory: Memory in MiB for the rows, gradients and activations of clients that train
                at once; by default 256 on a CPU and 2,048 on a GPU of any size.
            max_failed_clients: Number of sessions of a round that may fail, by an error or a
                non-finite update, before the run ends; they are skipped and named. All but one by
                default. The run always ends when all of several sessions of a round have failed.
            devices: How fast the clients' devices and links are. Rounds then take virtual time,
                which is in metrics.csv, clients.csv and on the page.
            policy: Which clients the server waits for in virtual time, and what happens to late
                updates and to clients that leave.
            assign: Assigns clients to groups by what their devices can train. Only the sum of the
                groups' counts is then used.
            export: Which weights to write to the run folder as safetensors at the end: of the
                server, of the first client of each group (`groups`, where clients keep no models of
                their own), of every client.
            seed: Seed of all draws.
        """
        super().__init__()
        if optimizer is None and lr_schedule is not None:
            raise UserError(
                "model.lr_schedule",
                "nothing to schedule: model.optimizer is not given",
                "give model.optimizer, or schedule in the clients' configure_optimizers",
            )
        self.algorithm = checks.algorithm(algorithm)
        self.groups = checks.client_groups(clients, dealt=assign is not None)
        self.num_clients = sum(group.count for group in self.groups)
        self.seed = seed
        self.optimizer = optimizer
        self._lr_schedule = lr_schedule
        self.exports = tuple(export)

        checks.check_least("model.eval_clients", eval_clients)
        if eval_clients is not None and eval_clients > self.num_clients:
            found = f"{eval_clients} of {self.num_clients} clients"
            raise UserError("model.eval_clients", found, "leave it out for all")
        self._kinds = tuple(evaluate)
        checks.check_least("model.unseen_epochs", unseen_epochs)
        self._evaluate = partial(
            Evaluation,
            kinds=self._kinds,
            at=evaluate_at,
            clients=eval_clients,
            unseen_epochs=unseen_epochs,
        )

        checks.check_least("model.max_failed_clients", max_failed_clients, 0)
        self._work = LocalWork(
            fraction, clients_per_round, local_epochs, local_steps, local_seconds
        )
        self._work.check(self.num_clients)

        if assign is not None:
            assign.check(devices)
            if local_seconds is not None:
                found = "given together with model.assign, which asks how long a session takes"
                raise UserError("model.local_seconds", found, "give local_epochs or local_steps")
        self._devices = devices
        self._policy = policy
        self._assign = assign
        self._parts = tuple(algorithm.parts)  # as configured, before devices choose of them
        self.packs = Packs(side_by_side, pack_memory)

        personal_prefixes = personal
        if isinstance(personal, str):
            personal_prefixes = [personal] if personal else []
        self._fleet_options: dict[str, Any] = {
            "seed": seed,
            "host_rows": store == "host",
            "max_failed": max_failed_clients,
            "server_optimizer": server_optimizer,
            "local_penalty": local_penalty,
            "keep_optimizer": keep_optimizer,
            "personal": list(personal_prefixes),
        }

    @override
    def assemble(self, stage: str) -> Fleet:
        trainer = self.federated_trainer
        return self.make_fleet(Fleet, trainer.datamodule, trainer, ranks=trainer.strategy.ranks)

    @override
    def prepare(self, stage: str) -> Evaluation:
        trainer = self.federated_trainer
        data = trainer.datamodule
        setup.attach_configured(trainer, self.fleet, self, stage)
        setup.watch_rates(trainer, self.fleet)
        setup.warn_of_test_monitors(trainer, self.fleet)

        validates = stage != "fit" or trainer.limit_val_batches != 0
        kinds = self._kinds if validates else ()
        setup.check_built(kinds, self.fleet, data, tests=stage == "test")
        return self._evaluate(self.fleet, data)

    def dealt(
        self, data: FederatedDataModule, trainer: RunTrainer
    ) -> tuple[list[ClientGroup], LocalWork, Devices | None]:
        """Return the groups with their clients, the work of a round, and the devices.

        With `assign`, clients are dealt to the groups by their devices, which then are in the order
        of the clients.
        """
        limit = trainer.limit_train_batches
        is_share_of_all = isinstance(limit, float) and limit == 1.0
        work = replace(self._work, limit=None if is_share_of_all else limit)
        if self._assign is None:
            return self.groups, work, self._devices

        assert self._devices is not None, "the constructor has checked that there are devices"
        dealt = fitted(
            self._assign,
            self.groups,
            self.algorithm,
            self._devices,
            data,
            work,
            seed=self.seed,
            parts=self._parts,
            trainer=trainer,
        )
        self.algorithm = dealt.algorithm
        return dealt.groups, work, dealt.devices

    def make_fleet(
        self, kind: type[F], data: FederatedDataModule, trainer: RunTrainer, **options: Any
    ) -> F:
        """Make the fleet of a run, with its sessions.

        Args:
            kind: Class of the fleet; a plan has one of its own.
            data: The samples of the clients.
            trainer: Gives the limits and the precision of the run.
            **options: Arguments of the fleet that are not configured, such as its ranks.
        """
        groups, work, devices = self.dealt(data, trainer)
        rounds = trainer.max_epochs or 0
        fleet = kind(
            groups,
            self.algorithm,
            data,
            work=work,
            rounds=rounds if rounds > 0 else None,
            side_by_side=self._side_by_side(trainer),
            host=setup.host_of(trainer, data),
            timing=Timing(devices, self._policy),
            **self._fleet_options,
            **options,
        )
        setup.attach_sessions(fleet, data, trainer, self.optimizer)
        return fleet

    def _side_by_side(self, trainer: RunTrainer) -> Callable[[Fleet], PackRunner]:
        """Return what makes the packs of a fleet, with the settings of a Trainer."""
        runtime = session_setup.runtime_of(trainer, clips=trainer.clipping)

        def make_optimizer(module: Any) -> Optimizer | str:
            return session_setup.single_optimizer(module, self.optimizer, runtime)

        return partial(
            PackRunner, packs=self.packs, make=make_optimizer, context=runtime.forward_context
        )

    @override
    def configure_optimizers(self) -> Any:
        if self.optimizer is None:
            return []
        # The schedule runs on an optimizer of its own, of the first group that uses its rate.
        with_rate = [state for state in self.fleet.groups if state.takes_lr]
        return session_setup.template(
            self.optimizer,
            self._lr_schedule,
            rounds=self.federated_trainer.max_epochs or -1,
            parameters=with_rate[0].live.trainable,
        )
