"""What a client's module logs in a session or an evaluation, gathered without collectives."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from numbers import Number
from typing import Any, ParamSpec, TypeVar

import lightning.pytorch as L
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers.abstract import WrapperMetric

from lightfed.data.batches import sent
from lightfed.distributed.steps import step_under_way
from lightfed.utils.errors import UserError
from lightfed.utils.keys import COLUMNS

P = ParamSpec("P")
R = TypeVar("R")


class LogBook:
    """Stands in for `self.log` of a client's module; gives means weighted by samples.

    Attributes:
        batch_size: Samples of the current batch, by which a logged value counts.
    """

    def __init__(self) -> None:
        # Kept one by one: a running sum in the precision of the values would lose small ones.
        self._values: dict[str, list[Tensor | float]] = {}
        self._counts: dict[str, list[int]] = {}
        self._metrics: dict[str, Metric] = {}
        self.batch_size = 1

    def see(self, batch: Any) -> None:
        """Note the batch that is trained or evaluated on next."""
        self.batch_size = batch_size(batch)

    def log(
        self, name: str, value: Any, *_: Any, batch_size: int | None = None, **options: Any
    ) -> None:
        """Take a value as Lightning's `self.log` does.

        Arguments about steps, progress bars and ranks have no meaning here, and are ignored.

        Args:
            name: Name of the metric.
            value: A number, a tensor with one element, or a metric object of torchmetrics.
            batch_size: Samples that the value stands for; by default those of the batch.
            options: Of these, `reduce_fx` is checked.

        Raises:
            TypeError: The value is something else.
            UserError: The name is one of lightfed's columns, or the reduction is no mean.
        """
        if isinstance(value, Metric):
            check_name(name)
            self._metrics[name] = value
            return

        check_mean(name, options)
        is_single = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Number)
        if not is_single:
            raise TypeError(f"self.log takes a number or a metric, and {name!r} is {value!r:.60}")

        if isinstance(value, Tensor):
            # Copied, because a step may change it. On a GPU it stays there: reading it would wait.
            value = value.item() if value.is_cpu else value.detach().clone()
        self._values.setdefault(name, []).append(value)
        self._counts.setdefault(name, []).append(
            self.batch_size if batch_size is None else batch_size
        )

    def log_dict(
        self, dictionary: dict[str, Any], *_: Any, batch_size: int | None = None, **options: Any
    ) -> None:
        """Take several values as Lightning's `self.log_dict` does."""
        for name, value in dictionary.items():
            self.log(name, value, batch_size=batch_size, **options)

    def epoch_ends(self) -> None:
        """Take the values of metric objects, which Lightning resets after each epoch of a fit."""
        for name, metric in self._metrics.items():
            self._values.setdefault(name, []).append(metric.compute())
            self._counts.setdefault(name, []).append(1)
        self._metrics = {}

    def close(self) -> dict[str, Tensor | float]:
        """Return the means, each on its device, and clear them."""
        means: dict[str, Tensor | float] = {}
        for name, values in self._values.items():
            means[name] = weighted_mean(values, self._counts[name])
        for name, metric in self._metrics.items():
            means[name] = metric.compute()
        self.clear()
        return means

    def clear(self) -> None:
        """Discard all values."""
        for metric in self._metrics.values():
            metric.reset()
        self._values = {}
        self._counts = {}
        self._metrics = {}


def weighted_mean(values: Sequence[Tensor | float], counts: Sequence[int]) -> Tensor | float:
    """Return the mean of numbers, weighted by the samples they stand for, in float64.

    It stays on the device of the values, because reading it would wait for the device.

    Args:
        values: Numbers, or tensors with one element.
        counts: Samples that each stands for.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        pairs = zip(values, counts, strict=True)
        return sum(float(value) * count for value, count in pairs) / sum(counts)

    device = tensors[0].device
    scalars = [torch.as_tensor(value, device=device).reshape(()).double() for value in values]
    weights = sent(torch.tensor(counts, dtype=torch.float64), device)
    return (torch.stack(scalars) * weights).sum() / sum(counts)


def check_name(name: str) -> None:
    """Refuse a metric that would overwrite a column of a run's tables."""
    if name in COLUMNS:
        found = f"self.log({name!r}), a column of lightfed's own tables"
        raise UserError("model.clients", found, "log it under another name")


def check_mean(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a metric with the name of a column, or with a reduction that is no mean."""
    check_name(name)
    reduction = options.get("reduce_fx", "mean")
    if reduction not in ("mean", "avg", torch.mean):
        raise UserError(
            "model.clients",
            f"self.log({name!r}, reduce_fx={getattr(reduction, '__name__', reduction)})",
            "log a metric object of torchmetrics, such as SumMetric or MaxMetric",
        )


def on_this_rank(run: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that runs a client's code, which must not communicate with other ranks.

    Ranks have different numbers of sessions. A metric of torchmetrics that synchronized would wait
    forever, or mix the samples of two clients; it does not synchronize here. Other collectives are
    refused.
    """

    @wraps(run)
    def run_on_this_rank(*args: P.args, **kwargs: P.kwargs) -> R:
        sync = Metric.sync
        Metric.sync = lambda *_, **__: None  # type: ignore[method-assign]
        try:
            with step_under_way():
                return run(*args, **kwargs)
        finally:
            Metric.sync = sync  # type: ignore[method-assign]

    return run_on_this_rank


def numbers(means: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return means as numbers of the host, in one transfer for all that are on a GPU."""
    on_the_gpu = {
        name: value.double()
        for name, value in means.items()
        if isinstance(value, Tensor) and value.is_cuda
    }
    values: dict[str, Any] = dict(means)
    if on_the_gpu:
        transferred = torch.stack(list(on_the_gpu.values())).tolist()
        values |= dict(zip(on_the_gpu, transferred, strict=True))
    return {name: float(value) for name, value in values.items()}


def batch_size(batch: Any) -> int:
    """Return the length of the first tensor in a nested batch of tensors, lists and dicts."""
    # A batch is usually a tuple of tensors. This runs at every step, so that case comes first.
    if isinstance(batch, tuple):
        batch = batch[0]
    if isinstance(batch, Tensor):
        return batch.size(0)
    parts = batch.values() if isinstance(batch, dict) else batch
    return batch_size(next(iter(parts)))


def needs_whole(module: L.LightningModule) -> bool:
    """Whether a module has metric objects whose value is no mean over batches, such as F1."""
    for part in module.modules():
        if not isinstance(part, Metric):
            continue
        is_mean = type(part) is MulticlassAccuracy and part.average == "micro"
        if not is_mean:
            return True
    return False


def reset_metrics(module: L.LightningModule) -> None:
    """Reset a module's metric objects, which hold samples of another client or of training."""
    # The list grows while it is read. `module.modules()` takes several times as long, and this runs
    # before every session.
    parts: list[Any] = [module]
    for part in parts:
        if part is None:
            continue
        parts.extend(part._modules.values())
        kind = _kind_of_metric(part.__class__)
        if kind is MetricCollection:
            part.add_metrics([])  # so that the first batch finds out which metrics share a state
        elif kind is WrapperMetric or (kind is Metric and part.update_called):
            part.reset()


@cache
def _kind_of_metric(part: type) -> type | None:
    """Return the kind of metric that a class is; None for other modules.

    Cached, because `isinstance` takes longer.
    """
    for kind in (MetricCollection, WrapperMetric, Metric):
        if issubclass(part, kind):
            return kind
    return None
