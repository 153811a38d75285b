"""Sub-commands that preview a configuration without training."""

import torch

from lightfed.data.datamodule import FederatedDataModule
from lightfed.federation import Federation
from lightfed.lab.results.text import holders
from lightfed.local.client_group import group_names
from lightfed.trainer import FederatedTrainer
from lightfed.utils.errors import UserError


class PreviewTrainer(FederatedTrainer):
    """The Trainer of the command line, with previews of a run."""

    def partition(self, model: Federation, datamodule: FederatedDataModule) -> None:
        """Draw the split of the data over the clients and print it with their groups; trains none.

        Args:
            model: the Federation, which gives the number of clients and the seed.
            datamodule: the FederatedDataModule.
        """
        clients, seed = model.num_clients, model.seed
        datamodule.prepare(clients=clients, seed=seed, device=torch.device("cpu"))
        groups, *_ = model.dealt(datamodule, self)
        sizes = dict(zip(group_names(groups), (group.count for group in groups), strict=True))
        of = holders(sizes, model.algorithm.parts)
        print(datamodule.partition_.table(groups=of if len({*of}) > 1 else ()))

    def groups(self, model: Federation, datamodule: FederatedDataModule) -> None:
        """Print the layers that groups have in common (FlexiFed's trie), without training.

        Args:
            model: the Federation.
            datamodule: the FederatedDataModule, which gives the shape of a sample.
        """
        from lightfed.lab.previews.layer_groups import groups_table

        prepare = model.algorithm.prepare_module
        text = groups_table(model.groups, datamodule, seed=model.seed, prepare=prepare)
        print(text)

    def plan(
        self,
        model: Federation,
        datamodule: FederatedDataModule,
        world_size: int = 1,
        rounds: int = 5,
    ) -> None:
        """Print a plan for many ranks: packs, speed, bytes, memory; starts no ranks.

        Args:
            model: the Federation.
            datamodule: the FederatedDataModule.
            world_size: Number of ranks to plan for.
            rounds: Number of first rounds to plan.
        """
        from lightfed.lab.previews.dry_run import DryFleet, PlannedRanks
        from lightfed.lab.previews.plan import memory, plan_text

        clients, seed = model.num_clients, model.seed
        if not 1 <= world_size <= clients:
            found = f"{world_size} ranks for {clients} clients"
            raise UserError("world_size", found, "give at least 1 and at most one rank per client")
        if rounds < 1:
            raise UserError("rounds", f"{rounds}", "give at least 1")
        datamodule.prepare(clients=clients, seed=seed, device=torch.device("cpu"))
        ranks = PlannedRanks(world_size)
        fleet = model.make_fleet(DryFleet, datamodule, self, ranks=ranks)
        fleet.run(rounds)
        parts = memory(fleet, model.optimizer)
        print(plan_text(fleet, parts, rounds=rounds, chunks=datamodule.chunks))
