"""Sub-commands that look at what a configuration would do, and train nothing."""

import torch

from lightfed.data.datamodule import FederatedDataModule
from lightfed.distributed.collectives import Ranks
from lightfed.distributed.placement import Rates
from lightfed.engine.federation import Federation
from lightfed.engine.trainer import FederatedTrainer
from lightfed.runs.checkpoint import main_file
from lightfed.utils.errors import UserError


class PreviewTrainer(FederatedTrainer):
    """The Trainer of the command line; it answers questions before a run, too."""

    def partition(self, model: Federation, datamodule: FederatedDataModule) -> None:
        """Draw the split of the data over the clients and print it; trains nothing.

        Args:
            model: the Federation; its cohorts say how many clients there are, its seed names the
                draw.
            datamodule: the FederatedDataModule.
        """
        clients, seed = model.num_clients, model.seed
        datamodule.prepare(clients=clients, seed=seed, device=torch.device("cpu"), folder=None)
        print(datamodule.partition_.table())

    def groups(self, model: Federation, datamodule: FederatedDataModule) -> None:
        """Print which layers which cohorts have in common (FlexiFed's trie); trains nothing.

        Args:
            model: the Federation.
            datamodule: the FederatedDataModule; it knows the shape of a sample.
        """
        from lightfed.previews.layer_groups import groups_table

        prepare = model.algorithm.prepare_module
        text = groups_table(model.cohorts, datamodule, seed=model.seed, prepare=prepare)
        print(text)

    def plan(
        self,
        model: Federation,
        datamodule: FederatedDataModule,
        world_size: int,
        rounds: int = 5,
        ckpt_path: str | None = None,
    ) -> None:
        """Print who would train what on many ranks: balance, bytes, memory; starts nothing.

        Args:
            model: the Federation.
            datamodule: the FederatedDataModule.
            world_size: Ranks of the run that is planned.
            rounds: How many of its first rounds to go through.
            ckpt_path: A checkpoint of such a run: costs are the session times that it has measured,
                in place of samples x FLOPs.
        """
        from lightfed.previews.dry_run import DryFleet, PlannedRanks
        from lightfed.previews.plan import memory, plan_text

        clients, seed = model.num_clients, model.seed
        if not 1 <= world_size <= clients:
            found = f"{world_size} ranks for {clients} clients"
            raise UserError("world_size", found, "give at least 1 and at most one rank a client")
        if rounds < 1:
            raise UserError("rounds", f"{rounds}", "give at least 1")
        rates = None if ckpt_path is None else _rates(ckpt_path, len(model.cohorts))
        datamodule.prepare(clients=clients, seed=seed, device=torch.device("cpu"), folder=None)
        fleet = DryFleet(
            model.cohorts,
            model.algorithm,
            datamodule,
            ranks=PlannedRanks(world_size),
            work=model.work(self.limit_train_batches),
            seed=seed,
            exchange_buffer=model.exchange_buffer,
            rounds=self.max_epochs if (self.max_epochs or 0) > 0 else None,
            rates=rates,
        )
        fleet.run(rounds)
        parts = memory(fleet, model.optimizer, host_rows=model.host_rows)
        print(plan_text(fleet, parts, rounds=rounds, chunks=datamodule.chunks))


def _rates(ckpt_path: str, cohorts: int) -> Rates:
    """Times that a run has measured, of all cohorts' sessions."""
    rates = Rates.of_checkpoint(main_file(ckpt_path), Ranks(torch.device("cpu")))
    if rates.of(range(cohorts)) is None:
        found = f"{ckpt_path} has no times of sessions of all {cohorts} cohorts"
        fix = "give a checkpoint of this configuration, or leave it out"
        raise UserError("ckpt_path", found, fix)
    return rates
