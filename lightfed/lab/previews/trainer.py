"""Sub-commands that preview a configuration without training."""

import torch

from lightfed.data.datamodule import FederatedDataModule
from lightfed.federation import Federation
from lightfed.lab.results.text import holders
from lightfed.local.client_group import group_names
from lightfed.trainer import FederatedTrainer
from lightfed.utils.errors import UserError
from lightfed.utils.json_output import print_json


class PreviewTrainer(FederatedTrainer):
    """The Trainer of the command line, with previews of a run."""

    def partition(
        self, model: Federation, datamodule: FederatedDataModule, json: bool = False
    ) -> None:
        """Print how the data are split among the clients, and the group of each client.

        Nothing is trained.

        Args:
            model: The Federation, which gives the number of clients and the seed.
            datamodule: The FederatedDataModule.
            json: Print the numbers of all clients as JSON (docs/scripts.md) instead of a table.
        """
        datamodule.prepare(clients=model.num_clients, seed=model.seed, device=torch.device("cpu"))
        groups, *_ = model.dealt(datamodule, self)

        sizes = {}
        for name, group in zip(group_names(groups), groups, strict=True):
            sizes[name] = group.count
        models_of_clients = holders(sizes, model.algorithm.parts)

        # If all clients have the same model, there is nothing to tell apart.
        if len(set(models_of_clients)) == 1:
            models_of_clients = []
        if json:
            print_json(datamodule.partition_.numbers(groups=models_of_clients))
            return
        print(datamodule.partition_.table(groups=models_of_clients))

    def groups(
        self, model: Federation, datamodule: FederatedDataModule, json: bool = False
    ) -> None:
        """Print which layers client groups share (FlexiFed's trie), without training.

        Args:
            model: The Federation.
            datamodule: The FederatedDataModule, which gives the shape of a sample.
            json: Print the layers for a program (docs/scripts.md), not a table.
        """
        from lightfed.lab.previews.layer_groups import trie_numbers, trie_of, trie_table

        trie = trie_of(
            model.groups, datamodule, seed=model.seed, prepare=model.algorithm.prepare_module
        )
        names = group_names(model.groups)
        counts = [group.count for group in model.groups]
        if json:
            print_json(trie_numbers(trie, names=names, counts=counts))
        else:
            print(trie_table(trie, names=names, counts=counts))

    def plan(
        self,
        model: Federation,
        datamodule: FederatedDataModule,
        world_size: int = 1,
        rounds: int = 5,
        json: bool = False,
    ) -> None:
        """Print packs, speed, bytes and memory of a run on many ranks, without starting them.

        Args:
            model: The Federation.
            datamodule: The FederatedDataModule.
            world_size: The number of ranks to plan for.
            rounds: How many rounds to plan, from the first.
            json: Print the numbers as JSON (docs/scripts.md) instead of text.
        """
        from lightfed.lab.previews.dry_run import DryFleet, PlannedRanks
        from lightfed.lab.previews.plan import memory, plan_numbers, plan_text

        clients = model.num_clients
        if not 1 <= world_size <= clients:
            raise UserError(
                key="world_size",
                found=f"{world_size} ranks for {clients} clients",
                fix="give at least 1 and at most one rank per client",
            )
        if rounds < 1:
            raise UserError("rounds", found=f"{rounds}", fix="give at least 1")

        datamodule.prepare(clients=clients, seed=model.seed, device=torch.device("cpu"))
        ranks = PlannedRanks(world_size)
        fleet = model.make_fleet(DryFleet, datamodule, self, ranks=ranks)
        fleet.run(rounds)
        parts = memory(fleet, model.optimizer)
        chunks = datamodule.chunks
        if json:
            print_json(plan_numbers(fleet, parts, rounds=rounds, chunks=chunks))
        else:
            print(plan_text(fleet, parts, rounds=rounds, chunks=chunks))
