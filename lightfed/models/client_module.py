"""Networks as clients.

Any LightningModule can be a client. `ClientModule` wraps any classifier, `Regressor` any network
that predicts numbers, and `MaskedLanguageClient` any masked language model.
"""

import math
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError, R2Score
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightfed.utils.errors import UserError

Batch = tuple[Tensor, Tensor]


class NetworkClient(L.LightningModule):
    """A client made of a network, `net`, that maps inputs to logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ClientModule(NetworkClient):
    """A classifier as a client: cross-entropy to train, accuracy and loss to evaluate.

    Args:
        net: maps (B, ...) inputs to (B, num_classes) logits. If it has a method `losses(inputs,
            labels)`, training minimises the sum of the losses that this returns by name. If it has
            `figures(inputs, labels)`, evaluation reports the returned numbers too.
        num_classes: C.
    """

    def __init__(self, net: nn.Module, *, num_classes: int) -> None:
        super().__init__(net)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro", validate_args=False)

    @classmethod
    def of(cls, module: L.LightningModule, *, method: str) -> "ClientModule":
        """A client's module, for a method that changes its network.

        Raises:
            UserError: it is a LightningModule of the user's, without such a network.
        """
        if not isinstance(module, ClientModule):
            found = f"{type(module).__name__}, which is no network that classifies"
            raise UserError("model.clients", found, f"{method} trains such networks; name one")
        return module

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        losses = getattr(self.net, "losses", None)
        if losses is None:
            return F.cross_entropy(self.net(x), y)
        return torch.stack(list(losses(x, y).values())).sum()

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.accuracy.update(logits, y)
        self.log("loss", F.cross_entropy(logits, y))
        self.log("accuracy", self.accuracy)
        figures = getattr(self.net, "figures", None)
        if figures is not None:
            self.log_dict(figures(x, y))


class _Determination(R2Score):
    """The coefficient of determination, of targets of any size and offset.

    torchmetrics takes sums of squares within 1e-4 of 0 for 0, and says 1 for any predictions of
    small targets.
    """

    @override
    def compute(self) -> Tensor:
        spread = self.sum_squared_error - self.sum_error * self.sum_error / self.total
        # The rounding of a sum of squares: what is below it comes from equal targets.
        equal = spread <= 1e-14 * self.sum_squared_error
        perfect = self.residual == 0
        scores = 1 - self.residual / torch.where(equal, torch.ones_like(spread), spread)
        of_equal = perfect.to(scores.dtype)
        return torch.where(equal, of_equal, scores).mean()


class Regressor(NetworkClient):
    """A network that predicts numbers, as a client: it trains on the mean squared error.

    Evaluation reports that error as `loss`, the mean absolute error as `mae`, and the coefficient
    of determination as `r2`, the mean over outputs, if there are two samples; for equal targets it
    is 1 if all are predicted, and else 0. All three are of the whole test set, not means over
    batches, and are summed in float64.

    Args:
        net: maps (B, ...) inputs to (B, outputs) numbers; targets are (B, outputs), or (B,) for a
            single output.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.mse, self.mae, self.r2 = MeanSquaredError(), MeanAbsoluteError(), _Determination()
        # The spread of targets far from 0 is a small difference of large sums.
        for metric in (self.mse, self.mae, self.r2):
            metric.set_dtype(torch.float64)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x).view_as(y), y)

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        predicted = self.net(x).view_as(y).double()
        for name, metric in (("loss", self.mse), ("mae", self.mae), ("r2", self.r2)):
            metric.update(predicted, y.double())
            if name != "r2" or self.r2.total > 1:
                self.log(name, metric)


class MaskedLanguageClient(NetworkClient):
    """A masked language model as a client: it predicts all tokens of a window, masked or not.

    Evaluation reports two perplexities, exp of the mean cross-entropy: over all positions, as in
    HeteroFL's released code, and over masked positions only. The latter mean weights batches by
    their number of windows.

    Args:
        net: maps (B, T) int64 tokens to (B, T, V) logits and keeps `masked`, (B, T)
            bool, the positions masked by its last forward pass in evaluation.
    """

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        tokens, target = batch
        return F.cross_entropy(self.net(tokens).flatten(0, 1), target.flatten())

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        tokens, target = batch
        losses = F.cross_entropy(
            self.net(tokens).flatten(0, 1), target.flatten(), reduction="none"
        ).view_as(target)
        self.log("loss", losses.mean())
        self.log(LOG_PERPLEXITY, losses.mean())
        net: Any = self.net
        if net.masked.any():
            self.log(f"{LOG_PERPLEXITY}_masked", losses[net.masked].mean())


# A metric with this prefix is the mean of a logarithm. Its exp is reported, without `log_`.
LOG_PERPLEXITY = "log_perplexity"


def reported(metrics: dict[str, float]) -> dict[str, float]:
    """Convert means of a client or the global model to reported metrics."""
    found = {}
    for name, value in metrics.items():
        if name.startswith(LOG_PERPLEXITY):
            found[name.removeprefix("log_")] = math.exp(min(value, 700.0))
        else:
            found[name] = value
    return found
