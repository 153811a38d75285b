"""Static batch normalisation: statistics that are estimated when a model is evaluated.

HeteroFL (Diao, Ding, Tarokh, ICLR 2021, section 3.3) tracks no statistics in training. Before an
evaluation those of the batches of some data are averaged.
"""

from collections.abc import Callable, Iterable

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightfed.local.session import seed_default_generators
from lightfed.models.networks.scaler import Scaler
from lightfed.state.rows import ModelLayout, Row
from lightfed.utils.rng import derive_seed


class StaticNorms:
    """A module of its own for evaluations, which takes its weights from rows.

    Args:
        module: a fresh one, on the device; it keeps no weights of its own.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module
        self._parameters = dict(module.named_parameters())
        self._norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
        self._scalers = [part for part in module.modules() if isinstance(part, Scaler)]
        self._device = next(module.parameters()).device
        for norm in self._norms:
            # The statistics of one batch at a time: `estimate` averages them in float64.
            norm.momentum = 1.0
            norm.track_running_stats = True
            if norm.running_mean is None:
                shape = norm.num_features
                norm.running_mean = torch.zeros(shape, device=self._device)
                norm.running_var = torch.ones(shape, device=self._device)
                norm.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=self._device)

    def load(self, layout: ModelLayout, row: Row) -> None:
        """Take the parameters of a row, as views of it."""
        for name, value in layout.floats.views(row.floats).items():
            self._parameters[name].data = value

    @torch.no_grad()
    def estimate(
        self, batches: Iterable[tuple[int, Tensor]], *, sum_: Callable[[Tensor], Tensor], seed: int
    ) -> None:
        """The mean of the batches' statistics, each batch counting alike; variances are unbiased.

        Args:
            batches: inputs with their numbers, which name the draws of dropout.
            sum_: makes the mean over all batches of the sum over these.
            seed: of the draws.
        """
        if self._norms:
            self.module.train()
            sizes = [norm.num_features for norm in self._norms for _ in range(2)]
            total = torch.zeros(sum(sizes), dtype=torch.float64, device=self._device)
            for number, x in batches:
                # Dropout is on, as in training.
                seed_default_generators(
                    derive_seed(seed, "statistics", client=number), self._device
                )
                self.module(x)
                total += torch.cat(self._statistics())
            for tensor, mean in zip(
                self._statistics(), sum_(total).float().split(sizes), strict=True
            ):
                tensor.copy_(mean)
        self.module.eval()
        for scaler in self._scalers:
            scaler.train()  # a slice that is used alone is scaled as in its training

    def _statistics(self) -> list[Tensor]:
        """Of all norms in order: mean and variance."""
        return [s for n in self._norms for s in (n.running_mean, n.running_var) if s is not None]


def scale_to(global_rate: float, module: L.LightningModule) -> None:
    """Scalers divide by the rate relative to the widest client's: its model is not scaled."""
    for part in module.modules():
        if isinstance(part, Scaler):
            part.rate /= global_rate
