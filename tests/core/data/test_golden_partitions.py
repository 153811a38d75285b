"""Comparison with splits drawn by the authors' code (tests/golden/partitions.json).

Their draws cannot be repeated, their rules can. Training sets have 10 classes of 200 samples, test
sets 10 of 40.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightfed.data.partition.draw import matched_counts
from lightfed.data.partition.schemes import Classes, DirichletClient, Partitioner

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "golden" / "partitions.json").read_text()
)
LABELS = np.tile(np.arange(10), 200)


def counts_of(scheme: Partitioner, clients: int, *, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    parts = scheme.split(LABELS, clients=clients, num_classes=10, rng=rng)
    return np.array([np.bincount(LABELS[part], minlength=10) for part in parts])


def spread(counts: np.ndarray) -> tuple[float, float]:
    """Means over clients: the distance of class proportions from even ones; classes held."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    return np.abs(shares - 0.1).sum(axis=1).mean(), (counts > 0).sum(axis=1).mean()


@pytest.mark.parametrize(("alpha", "clients"), [(0.3, 10), (1.0, 10), (0.3, 40)])
def test_dispfl_proportions_are_as_uneven(alpha: float, clients: int) -> None:
    golden = np.array(GOLDEN[f"dispfl_dir_{alpha}_n{clients}"]["counts"])
    ours = [counts_of(DirichletClient(alpha), clients, seed=seed) for seed in range(40)]
    distances, classes = np.array([spread(counts) for counts in ours]).T
    distance, held = spread(golden)
    assert abs(distance - distances.mean()) < 3 * distances.std()
    assert abs(held - classes.mean()) < 3 * classes.std()
    assert distances.std() < 0.15  # else the two lines above say little


def test_an_alpha_for_which_the_published_loop_never_ends() -> None:
    assert "did not finish" in GOLDEN["dispfl_dir_0.1_n10"]
    counts = counts_of(DirichletClient(0.1), 10)
    np.testing.assert_array_equal(counts.sum(axis=1), 200)
    np.testing.assert_array_equal(counts.sum(axis=0), 200)


@pytest.mark.parametrize(
    "case",
    [
        "dispfl_dir_0.3_n10",
        "dispfl_dir_0.3_n40",
        "dispfl_dir_1.0_n10",
        "dispfl_n_cls_2_n10",
        "dispfl_my_part_5_n10",
    ],
)
def test_the_matched_test_set_is_that_of_dispfl(case: str) -> None:
    golden = GOLDEN[case]
    ours = matched_counts(np.array(golden["counts"]), np.full(10, 40))
    np.testing.assert_array_equal(ours, golden["test_counts_per_client"])


def test_heterofl_has_as_many_clients_with_one_class() -> None:
    golden = GOLDEN["heterofl_non-iid-2_n100"]["label_split"].values()
    ours = [
        int(((counts_of(Classes(2, strict_paper=True), 100, seed=seed) > 0).sum(1) == 1).sum())
        for seed in range(40)
    ]
    # 19 of the 199 other shards are of the class of the first one
    assert abs(np.mean(ours) - 100 * 19 / 199) < 1.5
    theirs = sum(len(labels) == 1 for labels in golden)
    assert min(ours) <= theirs <= max(ours)


@pytest.mark.parametrize(("clients", "per_client"), [(10, 2), (100, 2), (50, 10)])
def test_pathological_classes_are_used_equally(clients: int, per_client: int) -> None:
    golden = GOLDEN[f"yi_pathological_n{clients}_c{per_client}"]
    for alpha in (None, 20.0):
        counts = counts_of(Classes(per_client, alpha=alpha), clients)
        ours = [np.flatnonzero(row).tolist() for row in counts]
        for held in (golden["classes"], ours):
            assert [len(set(classes)) for classes in held] == [per_client] * clients
            uses = np.bincount(np.concatenate(held), minlength=10)
            np.testing.assert_array_equal(uses, clients * per_client // 10)
        assert counts.sum() == golden["total"]  # theirs drops the remainders
        even = 2000 / clients
        assert abs(np.mean(golden["sizes"]) - even) <= 0.13 * even
        if alpha is None:
            assert np.ptp(counts.sum(axis=1)) <= per_client
