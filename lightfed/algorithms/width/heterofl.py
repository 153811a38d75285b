"""HeteroFL: clients of different width train leading slices of one global model.

Diao, Ding, Tarokh: HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients. ICLR 2021. https://arxiv.org/abs/2010.01264

A client of level p has the leading part of every hidden layer of the global model, with the share
r^(p-1) of its channels, rounded up. In algorithm 1 of the paper

    W_m <- W_g[:d_m, :k_m]                                  for each participant m in S_t
    W_m <- E local epochs of SGD on D_m, with masked cross-entropy and Scalers
    W_g <- W^P u (W^{P-1} minus W^P) u ... u (W^1 minus W^2)

W^p is the mean of the slices of levels up to p, so that every element of W_g is the mean over the
clients that own it. An element without owners keeps its old value.

Where the paper is silent, the released code decides:

- Averages are uniform by default, not weighted by samples.
- A client contributes only the output rows of labels that it holds, even without the mask in its
  loss.
- In the dynamic setting clients draw their level in every round.

Deviation: static BatchNorm statistics are estimated on the training set in a fixed order, without
augmentation, and only when the model is evaluated. The released code shuffles and augments, in
every round. A last batch of one sample is left out, because it has no variance.

See also the masked loss and the tests of slices (`slices.py`), the released code's control strings
(`control.py`), its layer `Scaler` (`networks/layers.py`), its figures (`lab/studies/heterofl.py`).
"""

from collections.abc import Sequence
from typing import Literal

import lightning.pytorch as L
import numpy as np
from typing_extensions import override

from lightfed.algorithms.fedavg import drop_statistics
from lightfed.algorithms.width.slices import SliceTests, check_masked, mask_logits
from lightfed.algorithms.width.units import assign
from lightfed.api.algorithm import KEY, Algorithm
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.hooks import SessionContext
from lightfed.models.build import DataSpec
from lightfed.state.rows import ModelKind, Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Count, Positive
from lightfed.utils.errors import UserError
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
        statistics_samples: Count | None = None,
    ) -> None:
        """Set the paper's switches.

        Args:
            assignment: A client keeps the level of its group (fix), or draws one for every round
                (dynamic).
            mask: Masked cross-entropy: logits of labels that a client does not hold are set to zero
                (section 3.3).
            weights: Weigh all clients alike (uniform), as in the paper, or by their number of
                samples.
            statistics_batch_size: Batch size of the pass that estimates BatchNorm statistics for
                evaluation, at least 2.
            mask_token: Average the embedding of a language model's mask token over all clients.
                False: it keeps its initial value, as in the released code, where no client holds it
                as a label.
            level_weights: Relative probabilities of the groups in a dynamic draw. By default their
                numbers of clients.
            statistics_samples: About how many training samples estimate the BatchNorm statistics of
                the global model, in batches evenly spaced over all of them. None for all, as in
                the paper: with few participants, that pass takes longer than a round.
        """
        super().__init__()
        if statistics_batch_size < 2:  # one sample has no variance
            raise UserError(
                f"{KEY}.statistics_batch_size", f"{statistics_batch_size}", "give at least 2"
            )
        self.assignment = assignment
        self.level_weights = level_weights
        self.mask = mask
        self.weights: Weights = weights
        self.statistics_batch_size = statistics_batch_size
        self.statistics_samples = statistics_samples
        self.surplus_rows = mask_token
        self._tests: SliceTests

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        if data.task == "columns":
            raise UserError(
                key="model.algorithm",
                found="it masks logits of classes, but the samples have named columns",
                fix="choose FedAvg",
            )
        drop_statistics(module)  # static batch normalization: no statistics are tracked in training
        if self.mask:
            mask_logits(module, data.num_classes)

    @override
    def setup(self, fed: Fleet) -> None:
        self._tests = SliceTests(
            fed,
            batch_size=self.statistics_batch_size,
            samples=self.statistics_samples,
            masks=self.mask,
        )
        if self.level_weights is not None and len(self.level_weights) != len(fed.groups):
            raise UserError(
                key=f"{KEY}.level_weights",
                found=f"{len(self.level_weights)} weights for {len(fed.groups)} groups",
                fix="give one for every group",
            )
        self.model = fed.new_model()  # W_g
        for group in range(len(fed.groups)):
            fed.check_nested(self.model, group)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)  # S_t
        if self.assignment == "dynamic":
            assign(fed, {m: self.draw_level(fed, m, t) for m in clients})
        fed.send(self.model, clients)  # W_m <- W_g[:d_m, :k_m]
        fed.train(clients, t)  # masked cross-entropy, Scalers
        for state in fed.groups:
            check_masked(state.module)
        # W_g <- W^P u (W^{P-1} \ W^P) u ... u (W^1 \ W^2): every element is the mean over the
        # clients that own it
        fed.merge(clients, into=self.model, weights=self.weights)

    def draw_level(self, fed: Fleet, client: int, t: int) -> int:
        """Return the group that a client joins in round t."""
        if self.level_weights is None:
            weights = np.array([state.group.count for state in fed.groups])
        else:
            weights = np.array(self.level_weights)
        probabilities = weights / weights.sum()
        rng = numpy_generator(fed.seed, "level", t, client)
        return int(rng.choice(len(probabilities), p=probabilities))

    @override
    def session_start(self, s: SessionContext) -> None:
        self._tests.mask_session(s.module, s.client)

    @override
    def evaluation_start(self, fed: Fleet) -> None:
        self._tests.estimate_global(self.model)

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        """Return the global model, with logits of absent labels zero for "local", or slices."""
        if kind in ("global", "local"):
            return self._tests.of_global(self.model, clients)
        if kind == "trained":
            return self._tests.of_slices(fed.rows(clients))
        slices = fed.server_rows(self.model, clients)
        return None if slices is None else self._tests.of_slices(slices)
