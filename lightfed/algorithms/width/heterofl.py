"""HeteroFL: clients of different width train leading slices of one global model.

Diao, Ding, Tarokh: HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients. ICLR 2021. https://arxiv.org/abs/2010.01264

A client of rate r owns the leading ceil(r d) channels of every hidden layer. The server averages
every element over the clients that own it; an element without owners keeps its old value. Where the
paper is silent, the released code decides: averages are uniform by default, not weighted by
samples; a client contributes only the output rows of labels that it holds, even without the mask in
its loss; in the dynamic setting clients draw their level every round.

Deviation: static BatchNorm statistics are estimated on the training set in a fixed order, without
augmentation, and only when the model is evaluated; the released code shuffles and augments, every
round. A last batch of one sample is left out, because it has no variance.

Beside it: the masked loss and the tests of slices (`slices.py`), the released code's control
strings (`control.py`), its layer `Scaler` (`networks/layers.py`), its figures
(`lab/studies/heterofl.py`).
"""

from collections.abc import Sequence
from typing import Literal

import lightning.pytorch as L
import numpy as np
from typing_extensions import override

from lightfed.algorithms.fedavg import drop_statistics
from lightfed.algorithms.width.slices import SliceTests, check_masked, mask_logits
from lightfed.algorithms.width.units import assign
from lightfed.api.algorithm import Algorithm, require_argument
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.hooks import SessionContext
from lightfed.models.build import DataSpec
from lightfed.state.rows import ModelKind, Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Count, Positive
from lightfed.utils.errors import require
from lightfed.utils.rng import numpy_generator


class HeteroFL(Algorithm):
    """Width-heterogeneous federated averaging; the first group's model is the global one."""

    label_rows = True
    side_by_side = True
    takes_late = True
    deployed_with = (
        "put layers of the type Scaler into training mode; with `mask`, set the logits of labels "
        "where `absent_labels`, in the file `besides`, is true to 0"
    )
    holds = "its slice of the global model, with batch-norm statistics of its own training data"
    model: ServerModel

    def __init__(
        self,
        assignment: Literal["fix", "dynamic"] = "fix",
        mask: bool = True,
        weights: Weights = "uniform",
        statistics_batch_size: Count = 50,
        mask_token: bool = True,
        level_weights: list[Positive] | None = None,
    ) -> None:
        """The paper's switches.

        Args:
            assignment: A client keeps the level of its group, or draws one for every round.
            mask: Masked cross-entropy: logits of labels that a client does not hold are set to zero
                (section 3.3).
            weights: Of the clients in the average: uniform, as in the paper, or by samples.
            statistics_batch_size: Batch size of the pass that estimates BatchNorm statistics for
                evaluation.
            mask_token: Average the embedding of a language model's mask token over all clients.
                False: it keeps its initial value, as in the released code: there no client holds it
                as a label.
            level_weights: Relative probabilities of the groups in a dynamic draw; their numbers of
                clients by default.
        """
        super().__init__()
        size, fix = statistics_batch_size, "give at least 2"
        require_argument(size >= 2, "statistics_batch_size", size, fix)
        self.assignment, self.level_weights, self.mask = assignment, level_weights, mask
        self.weights: Weights = weights
        self.statistics_batch_size, self.surplus_rows = statistics_batch_size, mask_token
        self._tests: SliceTests

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        found, fix = "it sets logits of classes, and the samples are named columns", "choose FedAvg"
        require(data.task != "columns", "model.algorithm", found, fix)
        drop_statistics(module)  # static batch normalisation: no statistics are tracked in training
        if self.mask:
            mask_logits(module, data.num_classes)

    @override
    def setup(self, fed: Fleet) -> None:
        self._tests = SliceTests(fed, batch_size=self.statistics_batch_size, masks=self.mask)
        count = len(fed.groups if self.level_weights is None else self.level_weights)
        fits, found = count == len(fed.groups), f"{count} weights for {len(fed.groups)} groups"
        require_argument(fits, "level_weights", found, "give one for every group")
        self.model = fed.new_model()  # W_g
        for group in range(len(fed.groups)):
            fed.check_nested(self.model, group)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)  # S_t
        if self.assignment == "dynamic":
            assign(fed, {m: self.draw_level(fed, m, t) for m in clients})
        fed.send(self.model, clients)  # W_m <- W_g[:d_m, :k_m]
        fed.train(clients, t)  # masked cross-entropy, scaler
        for state in fed.groups:
            check_masked(state.module)
        # W_g <- W^P u (W^{P-1} \ W^P) u ... u (W^1 \ W^2): every element is the mean over the
        # clients that own it
        fed.merge(clients, into=self.model, weights=self.weights)

    def draw_level(self, fed: Fleet, client: int, t: int) -> int:
        """The group that a client joins in round t."""
        weights = np.array(self.level_weights or [state.group.count for state in fed.groups])
        shares = weights / weights.sum()
        return int(numpy_generator(fed.seed, "level", t, client).choice(len(shares), p=shares))

    @override
    def session_start(self, s: SessionContext) -> None:
        self._tests.hold(s.module, s.client)

    @override
    def evaluation_start(self, fed: Fleet) -> None:
        self._tests.estimate_global(self.model)

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        """The global model, with logits of other labels zero for "local", or clients' slices."""
        if kind in ("global", "local"):
            return self._tests.of_global(self.model, clients)
        own = fed.rows(clients) if kind == "trained" else fed.server_rows(self.model, clients)
        return None if own is None else self._tests.of_slices(own)
