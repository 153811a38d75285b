"""Logging of a client's module in a session or an evaluation, without collectives."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from lightfed.utils.errors import require
from lightfed.utils.keys import COLUMNS

P = ParamSpec("P")
R = TypeVar("R")


class LogBook:
    """Replaces `self.log` of a client's module by sample-weighted means, without collectives."""

    def __init__(self) -> None:
        # Kept one by one: a running sum in the precision of the values would lose them.
        self._values: dict[str, list[Tensor | float]] = {}
        self._counts: dict[str, list[int]] = {}
        self._metrics: dict[str, Metric] = {}
        self.batch_size = 1

    def see(self, batch: Any) -> None:
        """A batch is trained or evaluated on: what is logged for it counts by its size."""
        self.batch_size = batch_size(batch)

    def log(
        self, name: str, value: Any, *_: Any, batch_size: int | None = None, **options: Any
    ) -> None:
        """Lightning's `self.log`; arguments about steps, bars and ranks are ignored."""
        if isinstance(value, Metric):
            check_name(name)
            self._metrics[name] = value
            return
        check_mean(name, options)
        single = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Number)
        if not single:
            raise TypeError(f"self.log takes a number or a metric, and {name!r} is {value!r:.60}")
        count = self.batch_size if batch_size is None else batch_size
        if isinstance(value, Tensor):
            # Copied, because a step may change it; reading it would wait for a device.
            value = value.item() if value.is_cpu else value.detach().clone()
        self._values.setdefault(name, []).append(value)
        self._counts.setdefault(name, []).append(count)

    def log_dict(
        self, dictionary: dict[str, Any], *_: Any, batch_size: int | None = None, **options: Any
    ) -> None:
        for name, value in dictionary.items():
            self.log(name, value, batch_size=batch_size, **options)

    def epoch_ends(self) -> None:
        """Take the values of metric objects: Lightning resets them after each epoch of a fit."""
        for name, metric in self._metrics.items():
            self._values.setdefault(name, []).append(metric.compute())
            self._counts.setdefault(name, []).append(1)
        self._metrics = {}

    def close(self) -> dict[str, Tensor | float]:
        """Return the means, on their device, and clear them."""
        means: dict[str, Tensor | float] = {
            name: weighted_mean(values, self._counts[name]) for name, values in self._values.items()
        }
        for name, metric in self._metrics.items():
            means[name] = metric.compute()
        self.clear()
        return means

    def clear(self) -> None:
        """Discard all values."""
        for metric in self._metrics.values():
            metric.reset()
        self._values, self._counts, self._metrics = {}, {}, {}


def weighted_mean(values: Sequence[Tensor | float], counts: Sequence[int]) -> Tensor | float:
    """The mean of numbers that stand for so many samples each, in float64.

    It stays on the device of the values, because reading it would wait for the device.
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
    """Reject a metric that would overwrite a column of a run's tables."""
    found = f"self.log({name!r}), a column of lightfed's own tables"
    require(name not in COLUMNS, "model.clients", found, "log it under another name")


def check_mean(name: str, options: Mapping[str, Any]) -> None:
    """Reject what would not be a metric of its own, or is no mean over samples."""
    check_name(name)
    reduction = options.get("reduce_fx", "mean")
    found = f"self.log({name!r}, reduce_fx={getattr(reduction, '__name__', reduction)})"
    fix = "log a metric object of torchmetrics, such as SumMetric or MaxMetric"
    require(reduction in ("mean", "avg", torch.mean), "model.clients", found, fix)


def on_this_rank(run: Callable[P, R]) -> Callable[P, R]:
    """Keep a client's own code from communicating while a function runs.

    Ranks have different numbers of sessions: a metric of torchmetrics that synchronised would wait
    forever, or mix the samples of two clients. Other collectives are refused.
    """

    @wraps(run)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        sync = Metric.sync
        Metric.sync = lambda *_, **__: None  # type: ignore[method-assign]
        try:
            with step_under_way():
                return run(*args, **kwargs)
        finally:
            Metric.sync = sync  # type: ignore[method-assign]

    return alone


def numbers(means: Mapping[str, Tensor | float]) -> dict[str, float]:
    """The means on the host, in one transfer for all that are on a GPU."""
    there = [name for name, value in means.items() if isinstance(value, Tensor) and value.is_cuda]
    found: dict[str, Any] = dict(means)
    if there:
        values = torch.stack([found[name].double() for name in there])
        found |= dict(zip(there, values.tolist(), strict=True))
    return {name: float(value) for name, value in found.items()}


def batch_size(batch: Any) -> int:
    """Length of the first tensor in a nested batch of tensors, lists and dicts."""
    if isinstance(batch, tuple):
        batch = batch[0]
    if isinstance(batch, Tensor):
        return batch.size(0)
    parts: Iterator[Any] = iter(batch.values() if isinstance(batch, dict) else batch)
    return batch_size(next(parts))


def needs_whole(module: L.LightningModule) -> bool:
    """Whether it has metric objects whose value is no mean over batches, such as F1."""
    metrics = (part for part in module.modules() if isinstance(part, Metric))
    return any(type(m) is not MulticlassAccuracy or m.average != "micro" for m in metrics)


def reset_metrics(module: L.LightningModule) -> None:
    """Reset the module's metric objects: they hold samples of another client or of training."""
    parts: list[Any] = [module]
    for part in parts:  # module.modules() takes several times as long
        parts += part._modules.values() if part is not None else ()
        kind = _kind(part.__class__)
        if kind is MetricCollection:
            part.add_metrics([])  # recomputed on the first batch: which metrics share a state
        elif kind is WrapperMetric or (kind is Metric and part.update_called):
            part.reset()


@cache
def _kind(part: type) -> type | None:
    """What a class is; isinstance takes longer."""
    kinds = (MetricCollection, WrapperMetric, Metric)
    return next((kind for kind in kinds if issubclass(part, kind)), None)
