"""Clients tested at once: the bits of any pack size, and the metrics of one client at a time."""

from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.dispfl import DisPFL
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd import FedBCD
from lightfed.algorithms.fedprox import FedProx
from lightfed.algorithms.heterofl import HeteroFL
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.api.fleet import Fleet
from lightfed.engine.evaluation import Evaluation
from lightfed.local.client_group import ClientGroup
from lightfed.local.packed.evaluation import padded
from lightfed.local.packed.rules import Packed
from lightfed.local.session import LocalSession, Report
from lightfed.models import MLP, Conv
from lightfed.topology.topology import Ring
from tests.local.packs import Drops, Smooth, images, vectors
from tests.small import fleet_of, run_round

SIZES = [5, 9, 4, 16, 7, 7, 12]
TESTED = [0, 1, 3, 17, 40, 5, 9]  # the first client has no test sample
KINDS = ("global", "local", "personal")
mlp = partial(MLP, hidden=(40, 30))
conv = partial(Conv, hidden=(8, 12))
gn = partial(Conv, hidden=(8, 12), norm="gn")
CASES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"algorithm": partial(FedProx, 0.3)},
    "standalone": {"algorithm": Standalone},
    "dispfl": {"algorithm": partial(DisPFL, Ring(), density=0.5, rounds=4)},
    "lgfedavg": {"algorithm": partial(LGFedAvg, 1)},
    "fedbcd": {"algorithm": partial(FedBCD, 1, 7, gamma=0.1, steps=(1, 1))},
    "bn": {"model": conv, "data": images},
    "own bn": {"model": conv, "data": images, "algorithm": Standalone},
    "local bn": {"model": conv, "data": images, "algorithm": partial(FedAvg, buffers="local")},
    "gn": {"model": gn, "data": images, "algorithm": Standalone},
    "dropout": {"model": Drops, "data": images, "algorithm": Standalone},
    "heterofl": {"algorithm": HeteroFL},
    "heterofl ln": {"model": partial(conv, norm="ln"), "data": images, "algorithm": HeteroFL},
    "heterofl bn": {"model": conv, "data": images, "algorithm": HeteroFL},
    "heterofl statistics": {
        "model": conv, "data": images, "algorithm": partial(HeteroFL, statistics_batch_size=4)
    },
}  # fmt: skip


def fleet(name: str, **more: Any) -> Fleet:
    """Trained for a round, one client at a time."""
    case = {"model": mlp, "data": vectors, "algorithm": FedAvg} | CASES.get(name, {}) | more
    data, model = case["data"](SIZES), case["model"]
    data.eval_batch_size = 16
    groups = [ClientGroup(len(SIZES), model)]
    if "hetero" in name:
        groups = [ClientGroup(4, model), ClientGroup(3, model, rate=0.5)]
    made = fleet_of(
        groups, case["algorithm"](), data, optimizer=partial(SGD, lr=0.1), side_by_side="off"
    )
    rng = np.random.default_rng(1)
    parts = [rng.permutation(len(data.test))[:size] for size in TESTED]
    data.partition_ = replace(
        data.partition_,
        test_index=np.concatenate(parts).astype(np.int32),
        test_offsets=np.cumsum([0, *TESTED]),
    )
    run_round(made, 0)
    return made


Found = tuple[dict[str, float], dict[str, list[Report]]]


def evaluate(made: Fleet, side: Any, kinds: Any = KINDS, **settings: Any) -> Found:
    evaluation = Evaluation(made, made.data, kinds=kinds, packed=Packed(side), **settings)  # type: ignore[arg-type]
    evaluation.start()
    for job in evaluation.jobs:
        evaluation.run(job)
    return evaluation.finish()  # type: ignore[return-value]


def sequential_tests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Clients that are tested one at a time from now on."""
    seen: list[int] = []
    evaluate_one = LocalSession.evaluate

    def counted(session: LocalSession, batches: Any, *, client: int, batch: int = -1) -> Report:
        seen.append(client)
        return evaluate_one(session, batches, client=client, batch=batch)

    monkeypatch.setattr(LocalSession, "evaluate", counted)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_metrics_are_those_of_one_client_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fleet(name)
    seen = sequential_tests(monkeypatch)
    metrics, reports = evaluate(made, "off")
    assert {-1} < set(seen) or made.algorithm.stateful
    seen.clear()
    packed = [evaluate(made, side) for side in (len(SIZES), 2)]
    # FedBCD's global models differ by server, and are tested as before.
    assert not [k for k in seen if k >= 0] or name == "fedbcd"
    for found, theirs in packed[1:]:  # the bits
        assert found == packed[0][0]
        assert theirs == packed[0][1]
    assert packed[0][0].keys() == metrics.keys()
    assert packed[0][0] == pytest.approx(metrics, rel=1e-6)
    for kind, tests in reports.items():
        ours = packed[0][1][kind]
        assert [(r.client, r.samples, r.stored) for r in ours] == [
            (r.client, r.samples, r.stored) for r in tests
        ]
        for mine, one in zip(ours, tests, strict=True):
            assert mine.metrics["accuracy"] == pytest.approx(one.metrics["accuracy"], abs=1e-7)
            assert mine.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-6)
            assert list(mine.metrics) == list(one.metrics)
    assert len(reports["personal"]) == len(SIZES) - 1


class Personal(FedAvg):
    """Says which model is tested, but not how several are at once."""

    @override
    def evaluated(self, fed: Fleet, client: int | None) -> L.LightningModule | None:
        return super().evaluated(fed, client)


class Told(MLP):
    """Reports a number of its own."""

    def figures(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": x.mean()}


@pytest.mark.parametrize(
    "more",
    [
        {"algorithm": Personal},
        {"model": Smooth},
        {"model": Told},
        {"model": conv, "data": images, "algorithm": partial(FedAvg, buffers="drop")},
    ],
)
def test_what_cannot_be_tested_at_once_is_tested_one_client_at_a_time(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fleet("fedavg", **more)
    seen = sequential_tests(monkeypatch)
    found = evaluate(made, 3)
    assert sorted(set(seen)) == [-1, *range(len(SIZES))]
    assert found == evaluate(made, "off")


def test_a_network_that_keeps_a_cpu_busy_is_tested_alone_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = fleet("gn")
    seen = sequential_tests(monkeypatch)
    assert evaluate(made, "auto", ["personal"])[0]
    assert seen == []
    monkeypatch.setattr("lightfed.local.packed.rules._BUSY_CONVOLUTIONS", 1.0)
    assert evaluate(made, "auto", ["personal"])[0]
    assert sorted(seen) == list(range(len(SIZES)))


def test_samples_that_clients_share_are_tested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fleet("fedavg")
    asked: list[int] = []
    given = made.data.test_samples  # type: ignore[attr-defined]

    def counted(client: int, index: torch.Tensor) -> Any:
        asked.extend(index.tolist())
        return given(client, index)

    monkeypatch.setattr(made.data, "test_samples", counted)
    evaluate(made, "auto", ["personal"])
    assert len(asked) == len(set(asked)) < sum(TESTED)


@pytest.mark.parametrize("name", ["fedavg", "standalone", "local bn"])
def test_a_limit_of_jobs_tests_fewer_samples_and_calls_none_of_the_others_wrong(name: str) -> None:
    made = fleet(name)
    evaluation = Evaluation(made, made.data, kinds=KINDS, packed=Packed(3))
    jobs = list(evaluation.jobs)
    assert len(jobs) > 1

    def sums(chosen: list[int]) -> dict[tuple[str, int], np.ndarray]:
        evaluation.start()
        for job in chosen:
            evaluation.run(job)
        metrics, kinds = evaluation.finish()
        assert metrics.get("global/loss", 1.0) > 0.5, "of samples that were not tested"
        return {
            (kind, r.client): r.samples * np.array([1.0, r.metrics["loss"], r.metrics["accuracy"]])
            for kind, reports in kinds.items()
            for r in reports
        }

    whole, parts = sums(jobs), [sums([job]) for job in jobs]
    for key, expected in whole.items():
        np.testing.assert_allclose(sum(part.get(key, 0.0) for part in parts), expected, rtol=1e-6)


def test_batches_are_padded_by_an_eighth_at_most() -> None:
    sizes = [padded(size) for size in range(1, 2000)]
    assert all(size <= found <= size * 9 / 8 for size, found in enumerate(sizes, 1))
    assert sizes[:16] == list(range(1, 17))
    assert len(set(sizes)) < 80
