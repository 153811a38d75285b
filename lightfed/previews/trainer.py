"""Sub-commands that look at what a configuration would do, and train nothing."""

import lightning.pytorch as L
import torch

from lightfed.engine.trainer import FederatedTrainer


class PreviewTrainer(FederatedTrainer):
    """The Trainer of the command line; it answers questions before a run, too."""

    def partition(self, model: L.LightningModule, datamodule: L.LightningDataModule) -> None:
        """Draw the split of the data over the clients and print it; trains nothing.

        Args:
            model: the Federation; its cohorts say how many clients there are, its seed names the
                draw.
            datamodule: the FederatedDataModule.
        """
        clients, seed = model.num_clients, model.seed
        datamodule.prepare(clients=clients, seed=seed, device=torch.device("cpu"), folder=None)  # type: ignore[attr-defined]
        print(datamodule.partition_.table())  # type: ignore[attr-defined]

    def groups(self, model: L.LightningModule, datamodule: L.LightningDataModule) -> None:
        """Print which layers which cohorts have in common (FlexiFed's trie); trains nothing.

        Args:
            model: the Federation.
            datamodule: the FederatedDataModule; it knows the shape of a sample.
        """
        from lightfed.previews.layer_groups import groups_table

        prepare = model.algorithm.prepare_module  # type: ignore[union-attr]
        text = groups_table(model.cohorts, datamodule, seed=model.seed, prepare=prepare)  # type: ignore[arg-type]
        print(text)

    def plan(
        self,
        model: L.LightningModule,
        datamodule: L.LightningDataModule,
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
        from lightfed.previews.plan import plan_of
        from lightfed.previews.plan_text import plan_text

        planned = plan_of(
            model,  # type: ignore[arg-type]
            self,
            datamodule,  # type: ignore[arg-type]
            world=world_size,
            rounds=rounds,
            ckpt_path=ckpt_path,
        )
        print(plan_text(planned))
