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

# A metric with this prefix is the mean of a logarithm. Its exp is reported, without `log_`.
LOG_PERPLEXITY = "log_perplexity"

# exp of more would overflow a float.
_LARGEST_LOG = 700.0


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
        net: The network, which maps inputs (B, ...) to logits (B, num_classes). If it has a method
            `losses(inputs, labels)`, training minimizes the sum of the losses that this returns by
            name; `lightfed.packs.known_layers` says what `packs_losses` declares about them. If it
            has `figures(inputs, labels)`, evaluation reports the returned numbers too.
        num_classes: The number of classes C.
    """

    sequence = "net"  # the only part that the forward pass calls; see lightfed.packs.stacked

    def __init__(self, net: nn.Module, *, num_classes: int) -> None:
        super().__init__(net)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro", validate_args=False)

    @classmethod
    def of(cls, module: L.LightningModule, *, method: str) -> "ClientModule":
        """Return a client's module itself, for a method that changes its network.

        Args:
            module: The client's module.
            method: The name of the method, for errors.

        Raises:
            UserError: If it is a LightningModule of the user's, without such a network.
        """
        if not isinstance(module, ClientModule):
            raise UserError(
                key="model.clients",
                found=f"{type(module).__name__}, which is not a classifier",
                fix=f"{method} needs a classifier",
            )
        return module

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        net = self.net
        losses = getattr(net, "losses", None)
        if losses is None:
            return F.cross_entropy(net(x), y)
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
        # The rounding of a sum of squares: a spread below it comes from equal targets.
        all_equal = spread <= 1e-14 * self.sum_squared_error
        scores = 1 - self.residual / torch.where(all_equal, torch.ones_like(spread), spread)
        # Equal targets have no spread to explain: 1 if all are predicted, and else 0.
        all_predicted = (self.residual == 0).to(scores.dtype)
        return torch.where(all_equal, all_predicted, scores).mean()


class Regressor(NetworkClient):
    """A network that predicts numbers, as a client: it trains on the mean squared error.

    Evaluation reports that error as `loss`, the mean absolute error as `mae`, and the coefficient
    of determination as `r2`, the mean over outputs, if there are two samples; for equal targets it
    is 1 if all are predicted, and else 0. All three are of the whole test set, not means over
    batches, and are summed in float64.

    Args:
        net: The network, which maps inputs (B, ...) to numbers (B, outputs). Targets are
            (B, outputs), or (B,) for a single output.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.mse = MeanSquaredError()
        self.mae = MeanAbsoluteError()
        self.r2 = _Determination()
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
        targets = y.double()
        predicted = self.net(x).view_as(y).double()

        self.mse.update(predicted, targets)
        self.mae.update(predicted, targets)
        self.r2.update(predicted, targets)
        self.log("loss", self.mse)
        self.log("mae", self.mae)
        # A single sample has no spread.
        if self.r2.total > 1:
            self.log("r2", self.r2)


class MaskedLanguageClient(NetworkClient):
    """A masked language model as a client: it predicts all tokens of a window, masked or not.

    Evaluation reports two perplexities, exp of the mean cross-entropy: over all positions, as in
    HeteroFL's released code, and over masked positions only. The latter mean weights batches by
    their number of windows.

    Args:
        net: The network, which maps tokens, (B, T) int64, to logits, (B, T, V). It keeps `masked`,
            (B, T) bool: the positions masked by its last forward pass in evaluation.
    """

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        tokens, target = batch
        return F.cross_entropy(self.net(tokens).flatten(0, 1), target.flatten())

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        tokens, target = batch
        logits = self.net(tokens).flatten(0, 1)
        losses = F.cross_entropy(logits, target.flatten(), reduction="none").view_as(target)
        self.log("loss", losses.mean())
        self.log(LOG_PERPLEXITY, losses.mean())

        net: Any = self.net
        if net.masked.any():
            self.log(f"{LOG_PERPLEXITY}_masked", losses[net.masked].mean())


def reported(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics to report, from the means of a client or of the global model."""
    to_report = {}
    for name, value in metrics.items():
        if name.startswith(LOG_PERPLEXITY):
            to_report[name.removeprefix("log_")] = math.exp(min(value, _LARGEST_LOG))
        else:
            to_report[name] = value
    return to_report
