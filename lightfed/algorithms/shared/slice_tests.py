"""How slices of a global model are tested: static batch normalisation, and logits of held labels.

HeteroFL (Diao, Ding, Tarokh, ICLR 2021, section 3.3). Modules of their own take the weights of the
global model, or of a client's slice of it, and estimate batch-norm statistics when they are tested.
"""

import lightning.pytorch as L
import torch

from lightfed.algorithms.shared.logit_masks import LogitMasks
from lightfed.algorithms.shared.static_norm import StaticNorms, scale_to
from lightfed.api.fleet import Fleet
from lightfed.state.rows import Row
from lightfed.state.server_model import ServerModel
from lightfed.utils.rng import derive_seed


class SliceTests:
    """A module for the global model, and one for the slices of every cohort.

    Args:
        fed: the clients; the first cohort has the global model's layout.
        widest: rate of the first cohort.
        batch_size: of the passes that estimate statistics.
        masks: of the clients' logits; None for none.
    """

    def __init__(
        self, fed: Fleet, *, widest: float, batch_size: int, masks: LogitMasks | None
    ) -> None:
        self._fed = fed
        self._batch_size = batch_size
        self._masks = masks
        self._global = self._module(0, widest)
        self._slices = [self._module(c, widest) for c in range(len(fed.cohorts))]

    def _module(self, cohort: int, widest: float) -> StaticNorms:
        """A cohort's model, scaled and masked as in training."""
        fed = self._fed
        module = fed.cohorts[cohort].cohort.build(fed.data, position=cohort, seed=fed.seed)
        scale_to(widest, module.to(fed.device))
        if self._masks is not None:
            self._masks.attach(module)
        return StaticNorms(module)

    def estimate_global(self, model: ServerModel) -> None:
        """Take the global model's weights, and statistics of all training data; on every rank."""
        fed, size = self._fed, self._batch_size
        batches = fed.data.train_batches(size)
        own = range(fed.ranks.rank, batches, fed.ranks.world)
        self._global.load(model.layout, model.row)
        self._global.estimate(
            ((i, fed.data.train_batch(i, size)[0]) for i in own),
            sum_=lambda total: fed.ranks.sum_(total) / batches,
            seed=fed.seed,
        )

    def of_global(self, client: int | None) -> L.LightningModule:
        """The global model, for the labels that a client holds, or for all."""
        return self.masked(self._global.module, client)

    @torch.inference_mode(False)  # its statistics are estimated in one evaluation after the other
    def of_slice(self, client: int, cohort: int, row: Row) -> L.LightningModule:
        """A row of a cohort's layout, with statistics of the client's training data."""
        static = self._slices[cohort]
        static.load(self._fed.cohorts[cohort].layout, row)
        batches = [x for x, _ in self._fed.data.client_batches(client, self._batch_size)]
        static.estimate(
            enumerate(batches),
            sum_=lambda total: total / len(batches),
            seed=derive_seed(self._fed.seed, "own-statistics", client=client),
        )
        return self.masked(static.module, client)

    def masked(self, module: L.LightningModule, client: int | None) -> L.LightningModule:
        """A module whose logits of labels that a client does not hold are zero."""
        if self._masks is not None:
            data = self._fed.data
            labels = None if client is None else data.labels(client)
            self._masks.hold(module, labels, data.num_classes, self._fed.device)
        return module
