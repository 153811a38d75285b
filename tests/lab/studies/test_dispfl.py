"""DisPFL's figures: both stages of a round; distances of masks and similarity of labels."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightfed_kernels import pack_mask, popcount
from pandas import DataFrame
from safetensors.numpy import load_file

from lightfed.lab.results.run import Run, read
from lightfed.lab.studies.dispfl import figures, mask_distances, similarity_figure
from lightfed.utils.errors import UserError
from tests.lab.report.make_run import ENVIRONMENT, by_title, drawn, write_masks, write_run

AT = np.arange(64)
# clients 0 and 2 hold class 1 alone, 1 and 3 class 0 alone; masks follow, 0..31 are in all of them
TWINS = np.array([[0, 9], [5, 0], [0, 2], [7, 0]])
TWIN_MASKS = {k: (AT < 32) | ((AT - k) % 2 == 0) for k in range(4)}
SENT = {"bytes_up": (5, 5), "bytes_down": (5, 5)}
METHODS: dict[str, dict[str, Any]] = {
    "DisPFL": {"personal/accuracy": (0.5, 0.75), "aggregated/accuracy": (0.25, 0.5), **SENT},
    "FedAvg": {"personal/accuracy": (0.3, 0.4), "finetuned/accuracy": (0.6, 0.7), **SENT},
    "pFedMe": {"personal/accuracy": (0.2, 0.45), **SENT},
    "Standalone": {"personal/accuracy": (0.55, 0.65), "bytes_up": (0, 0), "bytes_down": (0, 0)},
}


def _stages(root: Path, method: str, seed: int = 1, **changes: Any) -> Run:
    metrics = changes.pop("metrics", METHODS.get(method, {}))
    stated = ENVIRONMENT | {"name": f"{method}-s{seed}", "algorithm": method, "seed": seed}
    stated["evaluate_at"] = "aggregated" if method in ("FedAvg", "pFedMe") else "trained"
    folder = write_run(
        root / f"{method}-s{seed}",
        metrics=metrics,
        environment=stated | {"rounds": len(next(iter(metrics.values())))} | changes,
        config=f"seed_everything: {seed}\nmodel: {{algorithm: {method}}}\n",
        evaluations=None,
        counts=None,
    )
    return read(folder)


def _masks(
    root: Path, masks: dict[int, np.ndarray], counts: np.ndarray | None = None, **stated: Any
) -> Run:
    folder = write_run(
        root / "run",
        metrics={"train_loss": (2.0,)},
        environment={**ENVIRONMENT, **stated},
        evaluations=None,
        counts=counts,
        classes=(),
    )
    write_masks(folder, masks)
    return read(folder)


def test_a_method_has_a_line_in_each_stage_that_it_measured(tmp_path: Path) -> None:
    (figure,) = figures([_stages(tmp_path, method) for method in METHODS])
    assert figure.series == {method: place for place, method in enumerate(METHODS)}
    aggregated, trained = by_title(figure).values()
    assert drawn(aggregated) == {
        "DisPFL": [(1, 0.25), (2, 0.5)],
        "FedAvg": [(1, 0.3), (2, 0.4)],
        "pFedMe": [(1, 0.2), (2, 0.45)],
    }
    assert drawn(trained) == {
        "DisPFL": [(1, 0.5), (2, 0.75)],
        "FedAvg": [(1, 0.6), (2, 0.7)],
        "Standalone": [(1, 0.55), (2, 0.65)],
    }


def test_without_both_stages_of_some_method_there_is_no_chart(tmp_path: Path) -> None:
    assert [*figures([_stages(tmp_path, name) for name in ("pFedMe", "Standalone")])] == []
    short = {name: values[:1] for name, values in METHODS["DisPFL"].items()}
    assert [*figures([_stages(tmp_path, "DisPFL", metrics=short)])] == []


def test_the_run_says_at_which_stage_its_clients_were_evaluated(tmp_path: Path) -> None:
    metrics = {"personal/accuracy": (0.2, 0.4), "trained/accuracy": (0.3, 0.5), **SENT}
    (figure,) = figures([_stages(tmp_path, "A", metrics=metrics, evaluate_at="aggregated")])
    aggregated, trained = figure.charts
    assert drawn(aggregated) == {"A": [(1, 0.2), (2, 0.4)]}
    assert drawn(trained) == {"A": [(1, 0.3), (2, 0.5)]}


def test_data_sets_have_charts_of_their_own_and_methods_keep_their_colours(tmp_path: Path) -> None:
    mnist = {"dataset": "MNIST", "synthetic": True}
    runs = [_stages(tmp_path, "DisPFL"), _stages(tmp_path, "FedAvg", **mnist)]
    digits, other = figures(runs)
    assert (digits.name, other.name) == ("stages-digits", "stages-mnist")
    assert (digits.series, other.series) == ({"DisPFL": 0}, {"FedAvg": 1})
    text = "MNIST: accuracy after aggregation and after local training (synthetic data)"
    assert other.title == text


@given(
    seed=st.integers(0, 2**32 - 1),
    clients=st.integers(1, 6),
    words=st.integers(1, 9),
    density=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
@settings(max_examples=20, deadline=None)
def test_distances_are_those_counted_element_by_element(
    seed: int, clients: int, words: int, density: float
) -> None:
    kept = np.random.default_rng(seed).random((clients, 32 * words)) < density
    with TemporaryDirectory() as root:
        found = mask_distances(_masks(Path(root), dict(enumerate(kept))))
    sparse = (~kept.all(axis=0)).sum()
    assert found.index.tolist() == list(range(clients if sparse else 0))
    if sparse:
        differing = (kept[:, None] != kept[None]).sum(axis=2)
        np.testing.assert_array_equal(found, differing / sparse)


def test_the_words_are_those_of_the_kernels(tmp_path: Path) -> None:
    kept = np.random.default_rng(0).random(96) < 0.4
    path = _masks(tmp_path, {3: kept}).folder / "masks" / "client3.safetensors"
    words = pack_mask(torch.from_numpy(kept))
    np.testing.assert_array_equal(load_file(path)["mask"], words.numpy())
    assert int(popcount(words)) == kept.sum()


@pytest.mark.parametrize(
    ("parameters", "sparse"),
    [
        ({"a": 50}, 20),  # elements 0..29 are in every mask, 50..63 are padding
        ({"a": 50, "b": 50}, 20),
        ({}, 34),  # not recorded
    ],
)
def test_padding_is_no_sparse_element(tmp_path: Path, parameters: object, sparse: int) -> None:
    run = _masks(tmp_path, {0: AT < 30, 1: AT < 40, 2: AT < 30}, parameters=parameters)
    assert mask_distances(run).loc[0, 1] == 10 / sparse


def test_of_very_many_clients_a_hundred_are_read_and_forty_drawn(tmp_path: Path) -> None:
    run = _masks(tmp_path, {k: k % 64 > AT for k in range(199)}, np.ones((199, 2), dtype=int))
    assert mask_distances(run).index.tolist() == list(range(0, 199, 2))
    figure = similarity_figure(run)
    assert figure is not None
    assert "over 4,950 pairs of clients" in figure.title
    assert figure.charts[0].data["x"].nunique() == 40


def test_a_damaged_mask_is_named(tmp_path: Path) -> None:
    run = _masks(tmp_path, dict.fromkeys(range(3), AT < 9))
    path = run.folder / "masks" / "client1.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"masks/client1\.safetensors cannot be read: .*header"):
        mask_distances(run)


def _cells(run: Run) -> list[DataFrame]:
    """The heat maps of labels and of masks, a row and a column for each client."""
    figure = similarity_figure(run)
    assert figure is not None
    found = []
    for chart in figure.charts:
        order = list(dict.fromkeys(chart.data["x"]))
        cells = chart.data.pivot(index="y", columns="x", values="value")
        found.append(cells.loc[order, order])
        assert chart.spec["layer"][0]["encoding"]["x"]["sort"] == order
    return found


def test_like_labels_and_like_masks_are_correlated_to_minus_one(tmp_path: Path) -> None:
    run = _masks(tmp_path, TWIN_MASKS, TWINS, synthetic=True)
    labels, masks = _cells(run)
    assert masks.index.tolist() == ["1", "3", "0", "2"]
    alike, diagonal = np.kron(np.eye(2), np.ones((2, 2))), np.eye(4, dtype=bool)
    np.testing.assert_array_equal(labels, np.where(diagonal, np.nan, alike))
    np.testing.assert_array_equal(masks, np.where(diagonal, np.nan, 1 - alike))
    figure = similarity_figure(run)
    assert figure is not None
    assert figure.title.endswith("over 6 pairs of clients: -1.000 (synthetic data)")
    assert figure.table.columns.tolist()[:3] == ["chart", "other client", "client"]


def test_clients_of_one_class_come_by_id(tmp_path: Path) -> None:
    counts = np.array([[3, 4], [5, 5], [9, 1], [0, 8]])
    labels, masks = _cells(_masks(tmp_path, TWIN_MASKS, counts))
    order = [1, 2, 0, 3]
    assert masks.index.tolist() == [*map(str, order)]
    rows = counts[order] / np.linalg.norm(counts[order], axis=1, keepdims=True)
    expected = np.where(np.eye(4, dtype=bool), np.nan, rows @ rows.T)
    np.testing.assert_allclose(labels, expected)
    np.testing.assert_array_equal(masks.loc["2"], [1, np.nan, 0, 1])


@pytest.mark.parametrize(
    ("masks", "counts"),
    [
        ({}, TWINS),
        (TWIN_MASKS, None),
        (dict.fromkeys(range(4), AT < 64), TWINS),
    ],
    ids=["no masks", "no partition", "full masks"],
)
def test_a_run_that_has_nothing_to_compare_has_no_picture(
    tmp_path: Path, masks: dict[int, np.ndarray], counts: np.ndarray | None
) -> None:
    assert similarity_figure(_masks(tmp_path, masks, counts)) is None


def test_equal_masks_have_no_correlation(tmp_path: Path) -> None:
    figure = similarity_figure(_masks(tmp_path, dict.fromkeys(range(4), AT < 9), TWINS))
    assert figure is not None
    assert figure.title.endswith(": -")
