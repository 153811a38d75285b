"""HeteroFL: clients of different width train leading slices of one global model.

Diao, Ding, Tarokh: HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients. ICLR 2021. https://arxiv.org/abs/2010.01264

A client of rate r owns the leading ceil(r d) channels of every hidden layer. The server averages
every element over the clients that own it and keeps the old value where nobody does. The released
code settles what the paper leaves open: averages are uniform by default, not weighted by samples; a
client contributes only those rows of the output layer whose labels it holds, also without the mask
in its loss; clients draw their level anew for every round in the dynamic setting.

Deviation: the static BatchNorm statistics are estimated on the training set in a fixed order and
without augmentation, and only when the model is evaluated; the released code shuffles and augments,
in every round. A last batch of one sample is left out of them: it has no variance.
"""

from functools import partial
from typing import Any, Literal

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightfed.algorithms.fedavg import drop_statistics
from lightfed.core.algorithm import Algorithm, ServerModel
from lightfed.core.client import NetworkClient
from lightfed.core.cohort import DataSpec
from lightfed.core.fleet import Fleet, Weights
from lightfed.core.session import seed_default_generators
from lightfed.core.store import ModelLayout, Row
from lightfed.models.scaler import Scaler
from lightfed.utils.errors import UserError
from lightfed.utils.rng import derive_seed, numpy_generator


class HeteroFL(Algorithm):
    """Width-heterogeneous federated averaging; the first cohort's model is the global one."""

    label_rows = True
    model: ServerModel

    def __init__(
        self,
        assignment: Literal["fix", "dynamic"] = "fix",
        mask: bool = True,
        weights: Weights = "uniform",
        statistics_batch_size: int = 50,
        mask_token: bool = True,
    ) -> None:
        """The paper's switches.

        Args:
            assignment: A client keeps the level of its cohort, or draws one for every round with
                the cohorts' shares as probabilities.
            mask: Masked cross-entropy: logits of labels that a client does not hold are set to zero
                (section 3.3).
            weights: Of the clients in the average: uniform as in the paper, or by samples.
            statistics_batch_size: Batch size of the pass that estimates BatchNorm statistics for
                evaluation.
            mask_token: Average the embedding of a language model's mask token over all clients.
                False: it keeps its initial value, as in the released code, where no client holds
                it as a label.
        """
        super().__init__()
        if statistics_batch_size < 2:
            raise UserError(
                "model.algorithm.init_args.statistics_batch_size",
                str(statistics_batch_size),
                "give at least 2",
            )
        self.assignment = assignment
        self.mask = mask
        self.weights: Weights = weights
        self.statistics_batch_size = statistics_batch_size
        self.surplus_rows = mask_token
        self._hooks = LogitMasks()
        # Not registered: it shares the server's row and carries statistics, neither of which is
        # server state.
        self._evaluation: list[EvaluationModel] = []

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        drop_statistics(module)  # static batch normalisation: no statistics are tracked in training
        if self.mask:
            self._hooks.attach(module)

    @override
    def setup(self, fed: Fleet) -> None:
        widest = max(state.rate for state in fed.cohorts)
        if fed.cohorts[0].rate < widest:
            raise UserError(
                "model.cohorts.0.rate",
                f"{fed.cohorts[0].rate}, while another cohort has {widest}",
                "put the widest cohort first: its model is the global one",
            )
        self.model = fed.new_model()  # W_g
        for cohort, state in enumerate(fed.cohorts):
            fed.check_nested(self.model, cohort)
            scale_to(widest, state.module)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)  # S_t
        if self.assignment == "dynamic":
            fed.assign({m: self.draw_level(fed, m, t) for m in clients})
        fed.send(self.model, clients)  # W_m <- W_g[:d_m, :k_m]
        fed.train(clients, t)  # masked cross-entropy, scaler
        # W_g <- W^P u (W^{P-1} \ W^P) u ... u (W^1 \ W^2): every element is the mean over the
        # clients that own it
        fed.merge(clients, into=self.model, weights=self.weights)

    def draw_level(self, fed: Fleet, client: int, t: int) -> int:
        """The cohort that a client joins in round t."""
        shares = np.array([state.cohort.count for state in fed.cohorts]) / fed.clients
        return int(numpy_generator(fed.seed, "level", t, client).choice(len(shares), p=shares))

    @override
    def session_start(self, fed: Fleet, client: int, module: L.LightningModule, row: Row) -> None:
        if self.mask:
            self._hooks.hold(module, fed.data.labels(client), fed.data.num_classes, fed.device)

    @override
    def session_end(self, fed: Fleet, client: int, row: Row) -> None:
        if self.mask:
            self._hooks.check(fed.state(client).module)

    @override
    def evaluation_start(self, fed: Fleet) -> None:
        if not self._evaluation:
            self._evaluation.append(EvaluationModel(fed, self._hooks if self.mask else None))
        self._evaluation[0].estimate(fed, self.model, self.statistics_batch_size)

    @override
    def evaluated(self, fed: Fleet, client: int | None) -> L.LightningModule | None:
        """The global model; for a client, logits of labels that it does not hold are zero."""
        module = self._evaluation[0].module
        if self.mask:
            labels = None if client is None else fed.data.labels(client)
            self._hooks.hold(module, labels, fed.data.num_classes, fed.device)
        return module

    @override
    def client_row(self, fed: Fleet, client: int) -> tuple[ModelLayout, Row]:
        return fed.cohorts[fed.home_cohort(client)].layout, fed.covered_row(self.model, client)


def scale_to(global_rate: float, module: L.LightningModule) -> None:
    """Scalers divide by r_m / r_g: the global model is not scaled, be it of level b."""
    for part in module.modules():
        if isinstance(part, Scaler):
            part.rate /= global_rate


class LogitMasks:
    """Forward hooks that set the logits of labels outside a client's data to zero.

    Zero and not minus infinity: absent classes still add exp(0) to the softmax denominator, but get
    no gradient.
    """

    def __init__(self) -> None:
        self._absent: dict[int, Tensor | None] = {}
        self._filled: set[int] = set()  # modules whose masks have been used

    def attach(self, module: L.LightningModule) -> None:
        """Hook a NetworkClient's network, or a user's module, whose steps call `self(x)`."""
        network = module.net if isinstance(module, NetworkClient) else module
        network.register_forward_hook(partial(self._fill, module))

    def check(self, module: L.LightningModule) -> None:
        """Refuse a module whose session was to be masked, but never came by the hook.

        Raises:
            UserError: naming the module.
        """
        if self._absent.get(id(module)) is not None and id(module) not in self._filled:
            found = f"true, but the training_step of {type(module).__name__} does not call self(x)"
            fix = "call it there, or set mask: false"
            raise UserError("model.algorithm.init_args.mask", found, fix)

    def hold(
        self,
        module: L.LightningModule,
        labels: Tensor | None,
        num_classes: int,
        device: torch.device,
    ) -> None:
        """Which labels the module's present client holds; None for all."""
        if labels is None or len(labels) == num_classes:
            self._absent[id(module)] = None
            return
        absent = torch.ones(num_classes, dtype=torch.bool)
        absent[labels] = False
        self._absent[id(module)] = absent.to(device)

    def _fill(
        self, module: L.LightningModule, network: torch.nn.Module, inputs: Any, logits: Tensor
    ) -> Tensor:
        absent = self._absent.get(id(module))
        if absent is None:
            return logits
        self._filled.add(id(module))
        return logits.masked_fill(absent, 0.0)


class EvaluationModel:
    """The global model with BatchNorm statistics of the union of the training data (section 3.3).

    Args:
        fed: whose first cohort's architecture it has.
        masks: hooks for local evaluation, if the loss is masked.
    """

    def __init__(self, fed: Fleet, masks: LogitMasks | None) -> None:
        state = fed.cohorts[0]
        self.module = state.cohort.build(fed.data, position=0, seed=fed.seed).to(fed.device)
        scale_to(state.rate, self.module)
        self._norms = [part for part in self.module.modules() if isinstance(part, _BatchNorm)]
        for norm in self._norms:
            # The statistics of one batch at a time: those of the batches are averaged in float64
            # below.
            norm.momentum = 1.0
            norm.track_running_stats = True
            if norm.running_mean is None:
                shape = norm.num_features
                norm.running_mean = torch.zeros(shape, device=fed.device)
                norm.running_var = torch.ones(shape, device=fed.device)
                norm.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=fed.device)
        if masks is not None:
            masks.attach(self.module)
            masks.hold(self.module, None, fed.data.num_classes, fed.device)

    @torch.no_grad()
    def estimate(self, fed: Fleet, model: ServerModel, batch_size: int) -> None:
        """Load the global weights.

        Average the statistics of all training batches, split over the ranks.

        The cumulative average: every batch counts alike, a short last one too; variances are
        unbiased.
        """
        own = dict(self.module.named_parameters())
        for name, value in model.layout.floats.views(model.floats).items():
            own[name].data = value
        if not self._norms:
            return
        self.module.train()
        batches = fed.data.train_batches(batch_size)
        total = torch.zeros(
            sum(2 * n.num_features for n in self._norms), dtype=torch.float64, device=fed.device
        )
        for index in range(fed.ranks.rank, batches, fed.ranks.world):
            x, _ = fed.data.train_batch(index, batch_size)
            # Dropout is on, as in training; its draws are named by the batch.
            seed_default_generators(derive_seed(fed.seed, "statistics", client=index), fed.device)
            self.module(x)
            total += torch.cat([s for n in self._norms for s in (n.running_mean, n.running_var)])  # type: ignore[misc]
        means = (fed.ranks.sum_(total) / batches).float()
        for norm, (mean, variance) in zip(self._norms, self._pairs(means), strict=True):
            norm.running_mean = mean
            norm.running_var = variance
        self.module.eval()

    def _pairs(self, means: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = means.split(
            [size for n in self._norms for size in (n.num_features, n.num_features)]
        )
        return list(zip(parts[::2], parts[1::2], strict=True))
