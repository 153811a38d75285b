"""What a session and an evaluation report of what a client's module logs."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy
from torchmetrics.wrappers import Running
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.local.logbook import LogBook
from lightfed.local.session import LocalSession, Runtime
from lightfed.utils.errors import UserError
from tests.core.local.test_session import session_of, work_of
from tests.small import SGD_HALF, fit, random_data

Batch = tuple[Tensor, Tensor]


def test_a_log_book_takes_means_over_samples() -> None:
    book = LogBook()
    for size, value in ((2, 1.0), (6, 3.0)):
        book.batch_size = size
        book.log("loss", torch.tensor(value, requires_grad=True), prog_bar=True, sync_dist=True)
        book.log("fixed", value, batch_size=1)
        book.log_dict({"one": value, "two": torch.tensor(-value)}, on_epoch=True)
    means = {name: float(value) for name, value in book.close().items()}
    assert means == {"loss": 2.5, "fixed": 2.0, "one": 2.5, "two": -2.5}
    assert book.close() == {}


def test_means_keep_their_digits_beyond_what_float32_counts() -> None:
    """A running sum in float32 would stop at 2^24 samples."""
    book = LogBook()
    book.batch_size = 1
    book.log("loss", torch.tensor(1.0), batch_size=2**26)
    for _ in range(3):
        book.log("loss", torch.tensor(2.0**24))
    exact = (2**26 + 3 * 2**24) / (2**26 + 3)
    assert float(book.close()["loss"]) == pytest.approx(exact, rel=1e-12)


def test_what_is_logged_may_change_afterwards() -> None:
    book = LogBook()
    value = torch.tensor(1.0)
    book.log("value", value)
    value.fill_(5.0)
    assert float(book.close()["value"]) == 1.0


def test_other_reductions_than_means_are_refused() -> None:
    book = LogBook()
    book.log("loss", 1.0, reduce_fx=torch.mean)
    for log in (
        lambda: book.log("largest", 1.0, reduce_fx=torch.max),
        lambda: book.log_dict({"right": 3.0}, reduce_fx="sum"),
    ):
        with pytest.raises(UserError, match=r"model\.clients: self\.log\('(largest|right)', red"):
            log()


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ("training_step", "round"),
        ("training_step", "seconds"),
        ("training_step", "flops"),
        ("validation_step", "client"),
        ("validation_step", "group"),
    ],
)
def test_a_name_of_a_column_ends_a_run_in_its_first_session_or_test(
    step: str, name: str, tmp_path: Path
) -> None:
    class Numbered(Counting):
        @override
        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            self.log("score", 1.0)

    def logs(module: Numbered, batch: Batch, batch_idx: int) -> Tensor:
        module.log(name, 7.0)
        return module.w.sum()

    setattr(Numbered, step, logs)
    made = Federation(FedAvg(), [ClientGroup(3, Numbered)], optimizer=SGD_HALF)
    with pytest.raises(UserError, match=rf"model\.clients: self\.log\('{name}'\), a column"):
        fit(made, random_data([4, 4, 4]), tmp_path)


def test_a_logged_metric_object_is_computed_and_reset() -> None:
    book, metric = LogBook(), MeanMetric()
    for value in (1.0, 2.0, 6.0):
        metric.update(value)
        book.log("mean", metric)
    assert {k: float(v) for k, v in book.close().items()} == {"mean": 3.0}
    metric.update(5.0)
    book.log_dict({"mean": metric})
    assert {k: float(v) for k, v in book.close().items()} == {"mean": 5.0}


class Counting(L.LightningModule):
    """Counts samples in one metric, in training and in evaluation; logs it in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.seen = SumMetric()
        self.newest = Running(SumMetric(), window=3)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.seen.update(len(batch[0]))
        self.newest.update(len(batch[0]))
        return self.w.sum()

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.seen.update(len(batch[0]))
        self.newest.update(len(batch[0]))
        if batch_idx == 1:
            self.log_dict({"seen": self.seen, "newest": self.newest})


def batches_of(*sizes: int) -> list[Batch]:
    return [(torch.zeros(n, 1), torch.zeros(n)) for n in sizes]


def test_what_a_metric_holds_of_training_or_of_another_client_is_forgotten() -> None:
    session, row = session_of(Counting())
    session.train(row, work_of(batches_of(7, 5)))
    session.evaluate(batches_of(11), client=0)  # does not come to its log
    report = session.evaluate(batches_of(2, 3), client=1)
    assert report.metrics == {"seen": 5.0, "newest": 5.0}


class Thresholds(L.LightningModule):
    """Two accuracies together; a batch in which they are equal makes one state of theirs."""

    def __init__(self) -> None:
        super().__init__()
        accuracies = {"low": BinaryAccuracy(threshold=0.5), "high": BinaryAccuracy(threshold=0.8)}
        self.accuracies = MetricCollection(accuracies)

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.accuracies.update(*batch)
        self.log_dict(self.accuracies)


def test_a_clients_figures_do_not_depend_on_the_client_before() -> None:
    session = LocalSession(Thresholds(), Runtime())
    sure = (torch.tensor([0.9, 0.1]), torch.tensor([1, 0]))
    unsure = (torch.tensor([0.6, 0.4]), torch.tensor([1, 0]))
    assert session.evaluate([sure], client=0).metrics == {"low": 1.0, "high": 1.0}
    assert session.evaluate([unsure], client=1).metrics == {"low": 1.0, "high": 0.5}


def of_many_ranks(**options: Any) -> SumMetric:
    """A metric that finds other ranks, and cannot reach them."""

    def gather(*_: Any, **__: Any) -> Any:
        raise ConnectionError

    return SumMetric(dist_sync_fn=gather, distributed_available_fn=lambda: True, **options)


class Remote(Counting):
    """Logs, or computes, metrics that were made in its constructor, in a step, or in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = of_many_ranks()
        self.several = MetricCollection({"a": of_many_ranks(), "b": of_many_ranks()})
        self.listed = [of_many_ranks()]

    def count(self, batch: Batch) -> None:
        size = len(batch[0])
        self.seen.update(size)
        self.several.update(size)
        self.listed[0].update(size)
        made = of_many_ranks()
        made.update(size)
        self.log_dict({"seen": self.seen, "listed": self.listed[0], **self.several})
        self.log_dict({"made": made.compute(), "step": of_many_ranks(dist_sync_on_step=True)(size)})

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.count(batch)
        return self.w.sum()

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.count(batch)


def test_no_metric_of_a_client_asks_other_ranks() -> None:
    session, row = session_of(Remote())
    session.gradient(row, batches_of(3)[0])
    expected = dict.fromkeys(("seen", "listed", "a", "b"), 6.0)
    for report in (
        session.train(row, work_of(batches_of(4, 2))).resolve(),
        session.evaluate(batches_of(4, 2), client=0),
    ):
        found = {name: report.metrics[name] for name in expected}
        assert found == expected
        assert report.metrics["made"] == report.metrics["step"] == pytest.approx(20 / 6)
