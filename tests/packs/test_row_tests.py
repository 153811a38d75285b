"""Several clients tested at once: the metrics of one client at a time, on any number of ranks."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.depth.depthfl import DepthFL
from lightfed.algorithms.depth.networks import DepthConv
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.algorithms.fedprox import FedProx
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.algorithms.moon import MOON
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.pfedmoe.fedmrl import FedMRL
from lightfed.algorithms.prototypes.fd import FD
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.topology.topology import Ring
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.fleet import Fleet
from lightfed.distributed.placement import blocks
from lightfed.engine.evaluation import Evaluation
from lightfed.local.client_group import ClientGroup
from lightfed.local.group_state import Packing
from lightfed.local.session import LocalSession, Report
from lightfed.models.client_module import ClientModule
from lightfed.networks import MLP, Conv
from lightfed.packs import row_tests
from lightfed.packs.row_tests import RowTests
from lightfed.state.rows import Rows
from tests.core.engine.spy import evaluated
from tests.packs.federations import SIZES, conv, images, mlp
from tests.pretend import DEVICE, pretended_device
from tests.small import CPU, fleet_of, random_data, run_round

# Numbers of test samples; the first client has none.
TESTED = [0, 1, 3, 17, 40, 5, 9]
CLIENTS = len(SIZES)
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
    "moon": {"algorithm": MOON},
    "fd": {"algorithm": FD},
    "fedmrl": {"algorithm": partial(FedMRL, mlp)},
    "depthfl": {"algorithm": DepthFL, "model": partial(DepthConv, channels=(4, 6)), "data": images},
    "own bn": {"model": conv, "data": images, "algorithm": Standalone},
    "local bn": {"model": conv, "data": images, "algorithm": partial(FedAvg, buffers="local")},
    "gn": {"model": gn, "data": images, "algorithm": Standalone},
    "heterofl": {"algorithm": HeteroFL},
    "heterofl ln": {"model": partial(conv, norm="ln"), "data": images, "algorithm": HeteroFL},
    "heterofl bn": {"model": conv, "data": images, "algorithm": HeteroFL},
    "heterofl statistics": {
        "model": conv,
        "data": images,
        "algorithm": partial(HeteroFL, statistics_batch_size=4),
    },
}


def fleet(name: str, *, device: torch.device = CPU, **changes: Any) -> Fleet:
    """Make the federation of a case, trained for a round, one client at a time."""
    case: dict[str, Any] = {
        "model": mlp,
        "data": partial(random_data, batch_size=5),
        "algorithm": FedAvg,
    }
    case |= CASES.get(name, {})
    case |= changes

    model = case["model"]
    groups = [ClientGroup(CLIENTS, model)]
    if "hetero" in name:
        groups = [ClientGroup(4, model), ClientGroup(3, model, rate=0.5)]

    data = case["data"](SIZES)
    data.eval_batch_size = 16
    made = fleet_of(
        groups,
        case["algorithm"](),
        data,
        optimizer=partial(SGD, lr=0.1),
        side_by_side="off",
        device=device,
    )

    # Test samples that several clients share.
    rng = np.random.default_rng(1)
    indices = [rng.permutation(len(data.test))[:count] for count in TESTED]
    data.partition_ = replace(
        data.partition_,
        test_index=np.concatenate(indices).astype(np.int32),
        test_offsets=np.cumsum([0, *TESTED]),
    )
    run_round(made, 0)
    return made


def evaluate(made: Fleet, **settings: Any) -> tuple[dict[str, float], dict[str, list[Report]]]:
    """Return the metrics, and the reports of clients by kind."""
    evaluation = evaluated(made, **{"kinds": KINDS} | settings)
    return evaluation.finish()  # type: ignore[return-value]


def pack_tests(made: Fleet, most: int, patch: pytest.MonkeyPatch, *, fewest: int = 2) -> None:
    """Have this federation's clients tested at once from now on.

    Args:
        made: The federation.
        most: Number of clients in the largest pack.
        patch: Undoes it after the test.
        fewest: Number of clients in the smallest pack.
    """
    for state in made.groups:
        patch.setattr(state, "packing", Packing(most))
    patch.setattr(row_tests, "SMALLEST_PACK", fewest)

    if made.stateful:
        counts = [state.group.count for state in made.groups]
        pack_numbers = blocks(counts, [most] * len(counts))
        made.places.packs = dict(enumerate(pack_numbers))


@pytest.fixture
def tested_alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clients that have been tested one at a time."""
    clients: list[int] = []
    evaluate_one = LocalSession.evaluate

    def noted(session: LocalSession, batches: Any, *, client: int, **options: Any) -> Report:
        clients.append(client)
        return evaluate_one(session, batches, client=client, **options)

    monkeypatch.setattr(LocalSession, "evaluate", noted)
    return clients


@pytest.mark.parametrize("name", CASES)
def test_metrics_are_those_of_one_client_at_a_time(
    name: str, tested_alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fleet(name)
    metrics, reports = evaluate(made)
    assert len(reports["personal"]) == CLIENTS - 1
    assert made.stateful or {-1} < set(tested_alone)
    tested_alone.clear()

    for most, fewest in ((CLIENTS, 2), (3, 2), (3, 9)):
        pack_tests(made, most, monkeypatch, fewest=fewest)
        metrics_at_once, reports_at_once = evaluate(made)

        assert not tested_alone
        assert metrics_at_once == pytest.approx(metrics, rel=2e-6)
        for kind, expected in reports.items():
            for mine, one in zip(reports_at_once[kind], expected, strict=True):
                assert replace(mine, metrics={}) == replace(one, metrics={})
                assert mine.metrics == pytest.approx(one.metrics, rel=2e-6, abs=1e-7)
                assert list(mine.metrics) == list(one.metrics)


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
    "changes",
    [
        {"model": Smooth},
        {"model": Told},
        {"model": Mixes, "algorithm": Standalone},
        {"model": conv, "data": images, "algorithm": partial(FedAvg, buffers="drop")},
    ],
)
def test_what_cannot_be_tested_at_once_is_tested_one_client_at_a_time(
    changes: dict[str, Any], tested_alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fleet("fedavg", **changes)
    expected = evaluate(made)
    everyone = set(tested_alone)
    tested_alone.clear()

    pack_tests(made, CLIENTS, monkeypatch)

    assert evaluate(made) == expected
    assert set(tested_alone) == everyone


@pytest.mark.parametrize(
    ("name", "changes", "kind"),
    [
        ("fedavg", {}, "personal"),
        ("fedbcd", {}, "local"),
        ("heterofl", {"algorithm": partial(HeteroFL, mask=False)}, "personal"),
    ],
)
def test_samples_that_clients_share_are_tested_once(
    name: str, changes: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fleet(name, **changes)
    data: Any = made.data
    tested: list[int] = []
    samples = data.tested["test"]
    test_samples = samples.samples

    def noted(client: int, index: Tensor) -> Any:
        tested.extend(index.tolist())
        return test_samples(client, index)

    monkeypatch.setattr(samples, "samples", noted)
    pack_tests(made, 3, monkeypatch)
    evaluate(made, kinds=[kind])

    assert 0 < len(tested) < sum(TESTED)
    most_often = max(tested.count(sample) for sample in tested)
    assert most_often <= len(made.groups)  # each group has a model of its own


def row_tests_of(made: Fleet) -> list[tuple[RowTests, Rows]]:
    """Return the tests of every group with the models that are tested."""
    tests_and_rows = []
    first = 0
    for group, state in enumerate(made.groups):
        clients = list(range(first, first + state.group.count))
        first += state.group.count
        rows = made.algorithm.models(made, made.algorithm.moments[0], clients)
        assert rows is not None
        tests = made.packs.tests(group, rows, clients)
        assert isinstance(tests, RowTests)
        tests_and_rows.append((tests, rows))
    return tests_and_rows


@pytest.mark.parametrize("name", ["fedavg", "standalone", "heterofl bn"])
def test_pieces_do_not_depend_on_the_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of two ranks, one after the other, have the bits of one rank."""
    made = fleet(name)
    pack_tests(made, 2, monkeypatch)
    for state in made.groups:
        state.set_flops(0.0)  # of unknown cost: batches of 16 samples, and so several pieces

    alone = []
    spread = []
    used_ranks = set()
    for tests, rows in row_tests_of(made):
        tests.start()
        for piece in tests.pieces(0, 1, (lambda _: 0) if made.stateful else None):
            tests.run(piece, rows)
        alone += tests.finish(made.ranks)

        tests.start()
        for rank in range(2):
            # A pack has one home.
            home = (lambda client: client // 2 % 2) if made.stateful else None
            for piece in tests.pieces(rank, 2, home):
                tests.run(piece, rows)
                used_ranks.add(rank)
        spread += tests.finish(made.ranks)

    assert spread == alone
    assert used_ranks == {0, 1}


@pytest.mark.parametrize("name", ["fedavg", "standalone", "local bn"])
def test_a_limit_of_jobs_tests_fewer_samples_and_calls_none_of_the_others_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of single jobs add up to the sums of all jobs."""
    made = fleet(name)
    pack_tests(made, 3, monkeypatch)
    evaluation = Evaluation(made, made.data, kinds=("global", "local", "personal"))
    jobs = list(evaluation.jobs)
    assert len(jobs) > 1

    def sums(chosen: list[int]) -> dict[tuple[str, int], np.ndarray]:
        """Return samples, and sums of losses and of accuracies, by kind and client."""
        evaluation.start()
        for job in chosen:
            evaluation.run(job)
        metrics, reports_by_kind = evaluation.finish()
        assert metrics.get("global/loss", 1.0) > 0.5, "of samples that were not tested"

        found = {}
        for kind, reports in reports_by_kind.items():
            for report in reports:
                values = [1.0, report.metrics["loss"], report.metrics["accuracy"]]
                found[kind, report.client] = report.samples * np.array(values)
        return found

    whole = sums(jobs)
    parts = [sums([job]) for job in jobs]
    for key, expected in whole.items():
        total = sum(part.get(key, 0.0) for part in parts)
        np.testing.assert_allclose(total, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "standalone", "heterofl"])
def test_nothing_is_read_from_a_device_before_the_end(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretended_device(monkeypatch) as reads:
        made = fleet(name, device=DEVICE)
        pack_tests(made, 3, monkeypatch)
        evaluation = Evaluation(made, made.data, kinds=("local", "personal"))
        evaluation.start()

        reads.clear()
        for job in evaluation.jobs:
            evaluation.run(job)
        assert reads == []

        evaluation.finish()
    assert reads
