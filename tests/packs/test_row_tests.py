"""Several clients tested at once: the metrics of one client at a time, on any number of ranks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.algorithms.fedprox import FedProx
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.topology.topology import Ring
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.fleet import Fleet
from lightfed.distributed.placement import blocks
from lightfed.engine.evaluation import Evaluation
from lightfed.local.client_group import ClientGroup, Packing
from lightfed.local.session import LocalSession, Report
from lightfed.models.client_module import ClientModule
from lightfed.networks import MLP, Conv
from lightfed.packs import row_tests
from tests.core.engine.spy import evaluated
from tests.packs.federations import SIZES, conv, images, mlp
from tests.pretend import DEVICE, pretended_device
from tests.small import CPU, fleet_of, random_data, run_round

TESTED = [0, 1, 3, 17, 40, 5, 9]  # the first client has no test sample
KINDS = ("global", "local", "personal", "trained", "aggregated")


class Smooth(ClientModule):
    """A module of a user's."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(MLP(num_classes, input_shape, hidden=(9,)), num_classes=num_classes)


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
    "heterofl": {"algorithm": HeteroFL},
    "heterofl ln": {"model": partial(conv, norm="ln"), "data": images, "algorithm": HeteroFL},
    "heterofl bn": {"model": conv, "data": images, "algorithm": HeteroFL},
    "heterofl statistics": {
        "model": conv, "data": images, "algorithm": partial(HeteroFL, statistics_batch_size=4)
    },
}  # fmt: skip


def fleet(name: str, *, device: torch.device = CPU, **more: Any) -> Fleet:
    """Trained for a round, one client at a time."""
    case = (
        {"model": mlp, "data": partial(random_data, batch_size=5), "algorithm": FedAvg}
        | CASES.get(name, {})
        | more
    )
    data, model = case["data"](SIZES), case["model"]
    data.eval_batch_size = 16
    groups = [ClientGroup(len(SIZES), model)]
    if "hetero" in name:
        groups = [ClientGroup(4, model), ClientGroup(3, model, rate=0.5)]
    made = fleet_of(
        groups,
        case["algorithm"](),
        data,
        optimizer=partial(SGD, lr=0.1),
        side_by_side="off",
        device=device,
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


def evaluate(made: Fleet, **settings: Any) -> Found:
    return evaluated(made, **{"kinds": KINDS} | settings).finish()  # type: ignore[return-value]


def side_by_side(made: Fleet, most: int, patch: pytest.MonkeyPatch, *, few: int = 2) -> None:
    """From now on so many clients are tested at once, in packs of `few` at least."""
    for state in made.groups:
        patch.setattr(state, "packing", Packing(most))
    patch.setattr(row_tests, "_FEW", few)
    if made.stateful:
        counts = [state.group.count for state in made.groups]
        made.places.packs = dict(enumerate(blocks(counts, [most] * len(counts))))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Clients that are tested one at a time."""
    seen: list[int] = []
    evaluate_one = LocalSession.evaluate

    def counted(session: LocalSession, batches: Any, *, client: int, **given: Any) -> Report:
        seen.append(client)
        return evaluate_one(session, batches, client=client, **given)

    monkeypatch.setattr(LocalSession, "evaluate", counted)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_metrics_are_those_of_one_client_at_a_time(
    name: str, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fleet(name)
    metrics, reports = evaluate(made)
    assert {-1} < set(alone) or made.stateful
    alone.clear()
    for side, few in ((len(SIZES), 2), (3, 2), (3, 9)):
        side_by_side(made, side, monkeypatch, few=few)
        found, theirs = evaluate(made)
        assert not alone
        assert found == pytest.approx(metrics, rel=2e-6)
        for kind, tests in reports.items():
            for mine, one in zip(theirs[kind], tests, strict=True):
                assert replace(mine, metrics={}) == replace(one, metrics={})
                assert mine.metrics == pytest.approx(one.metrics, rel=2e-6, abs=1e-7)
                assert list(mine.metrics) == list(one.metrics)
    assert len(reports["personal"]) == len(SIZES) - 1


class Told(MLP):
    """Reports a number of its own."""

    def figures(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"mean": x.mean()}


class Mixes(MLP):
    """Looks at other samples of a batch."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(
    "more",
    [
        {"model": Smooth},
        {"model": Told},
        {"model": Mixes, "algorithm": Standalone},
        {"model": conv, "data": images, "algorithm": partial(FedAvg, buffers="drop")},
    ],
)
def test_what_cannot_be_tested_at_once_is_tested_one_client_at_a_time(
    more: dict[str, Any], alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fleet("fedavg", **more)
    expected = evaluate(made)
    everyone = sorted(set(alone))
    alone.clear()
    side_by_side(made, len(SIZES), monkeypatch, few=2)
    assert evaluate(made) == expected
    assert sorted(set(alone)) == everyone


@pytest.mark.parametrize("name", ["fedavg", "fedbcd", "heterofl"])
def test_samples_that_clients_share_are_tested_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fleet(name, **({"algorithm": partial(HeteroFL, mask=False)} if "hetero" in name else {}))
    asked: list[int] = []
    given = made.data.test_samples  # type: ignore[attr-defined]

    def counted(client: int, index: Tensor) -> Any:
        asked.extend(index.tolist())
        return given(client, index)

    monkeypatch.setattr(made.data, "test_samples", counted)
    side_by_side(made, 3, monkeypatch)
    evaluate(made, kinds=["local" if name == "fedbcd" else "personal"])
    groups = [TESTED[:4], TESTED[4:]] if "hetero" in name else [TESTED]
    assert 0 < len(asked) < sum(TESTED)
    assert all(asked.count(sample) <= len(groups) for sample in asked)


@pytest.mark.parametrize("name", ["fedavg", "standalone", "heterofl bn"])
def test_pieces_do_not_depend_on_the_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of two ranks, one after the other, have the bits of one rank."""
    made = fleet(name)
    side_by_side(made, 3, monkeypatch, few=2)
    kinds = ("personal", "global")
    expected = evaluate(made, kinds=kinds)[1]["personal"]
    homes = {k: k // 3 % 2 for k in range(len(SIZES))}  # a pack has one home
    evaluation = Evaluation(made, made.data, kinds=kinds)
    evaluation.start()
    run: list[Sequence[Any]] = []
    for (kind, group), tests in evaluation.tests_at_once.items():
        for rank in range(2):
            home = homes.__getitem__ if made.stateful else None
            run.append(tests.pieces(rank, 2, home))
            for piece in run[-1]:
                tests.run(piece, evaluation.rows[kind, group])
    assert sum(map(bool, run)) > 1
    assert evaluation.finish()[1]["personal"] == expected


@pytest.mark.parametrize("name", ["fedavg", "standalone", "local bn"])
def test_a_limit_of_jobs_tests_fewer_samples_and_calls_none_of_the_others_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fleet(name)
    side_by_side(made, 3, monkeypatch, few=2)
    evaluation = Evaluation(made, made.data, kinds=("global", "local", "personal"))
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


@pytest.mark.parametrize("name", ["fedavg", "standalone", "heterofl"])
def test_nothing_is_read_from_a_device_before_the_end(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretended_device(monkeypatch) as reads:
        made = fleet(name, device=DEVICE)
        side_by_side(made, 3, monkeypatch)
        evaluation = Evaluation(made, made.data, kinds=("local", "personal"))
        evaluation.start()
        reads.clear()
        for job in evaluation.jobs:
            evaluation.run(job)
        assert reads == []
        evaluation.finish()
    assert reads
