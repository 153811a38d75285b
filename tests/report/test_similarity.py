"""The heat maps of labels and masks, and what a page says of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightfed.results.run import Run, read
from lightfed.studies.dispfl.similarity import (
    Similarity,
    similarity_figure,
    similarity_figures,
    similarity_of,
)
from lightfed.utils.errors import UserError
from tests.report.make_run import ENVIRONMENT, write_masks, write_run

AT = np.arange(64)
# clients 0 and 2 hold class 1 alone, 1 and 3 class 0 alone; masks follow, 0..31 are in all of them
TWINS = np.array([[0, 9], [5, 0], [0, 2], [7, 0]])
TWIN_MASKS = {k: (AT < 32) | ((AT - k) % 2 == 0) for k in range(4)}


def _run(
    root: Path, masks: dict[int, np.ndarray], counts: np.ndarray | None, **changes: Any
) -> Run:
    files: dict[str, Any] = {"metrics": {"train_loss": (2.0,)}, "evaluations": None}
    folder = write_run(root / "run", counts=counts, classes=(), **{**files, **changes})
    write_masks(folder, masks)
    return read(folder)


def _found(root: Path, masks: dict[int, np.ndarray], counts: np.ndarray) -> Similarity:
    found = similarity_of(_run(root, masks, counts))
    assert found is not None
    return found


def test_like_labels_and_like_masks_are_correlated_to_minus_one(tmp_path: Path) -> None:
    found = _found(tmp_path, TWIN_MASKS, TWINS)
    assert found.client.tolist() == [1, 3, 0, 2]
    assert found.dominant.tolist() == [0, 0, 1, 1]
    alike = np.kron(np.eye(2), np.ones((2, 2)))
    np.testing.assert_array_equal(found.labels, alike)
    np.testing.assert_array_equal(found.masks, 1 - alike)
    assert found.correlation == pytest.approx(-1, abs=1e-12)
    assert found.pairs == 6


def test_clients_of_one_class_come_by_its_share(tmp_path: Path) -> None:
    counts = np.array([[3, 4], [5, 5], [9, 1], [0, 8]])
    found = _found(tmp_path, TWIN_MASKS, counts)
    assert found.client.tolist() == [2, 1, 3, 0]
    rows = counts[found.client] / np.linalg.norm(counts[found.client], axis=1, keepdims=True)
    np.testing.assert_allclose(found.labels, rows @ rows.T)
    upper = np.triu_indices(4, k=1)
    parity = found.client % 2
    apart = (parity[:, None] != parity[None]).astype(float)
    np.testing.assert_array_equal(found.masks, apart)
    expected = np.corrcoef((rows @ rows.T)[upper], apart[upper])[0, 1]
    assert found.correlation == pytest.approx(expected)


def test_labels_are_those_of_the_clients_that_have_a_mask(tmp_path: Path) -> None:
    counts = np.array([[9, 9], [0, 5], [9, 9], [5, 0], [0, 2]])
    found = _found(tmp_path, {k: TWIN_MASKS[k % 4] for k in (4, 1, 3)}, counts)
    assert found.client.tolist() == [3, 1, 4]
    np.testing.assert_array_equal(found.labels, [[1, 0, 0], [0, 1, 1], [0, 1, 1]])
    np.testing.assert_array_equal(found.masks, [[0, 0, 1], [0, 0, 1], [1, 1, 0]])
    assert found.total == 3


def test_labels_that_differ_by_rounding_alone_have_no_correlation(tmp_path: Path) -> None:
    found = _found(tmp_path, TWIN_MASKS, TWINS)
    labels = np.ones((4, 4))
    labels[0, 1] = np.nextafter(1.0, 0.0)
    assert np.isnan(replace(found, labels=labels).correlation)
    assert np.isfinite(found.correlation)


def test_the_heat_maps_show_the_pairs_and_print_their_correlation(tmp_path: Path) -> None:
    run = _run(tmp_path, TWIN_MASKS, TWINS, environment={**ENVIRONMENT, "synthetic": True})
    figure, found = similarity_figure(run), similarity_of(run)
    assert figure is not None
    assert found is not None
    order = ["1", "3", "0", "2"]
    for chart, values in zip(figure.charts, (found.labels, found.masks), strict=True):
        cells = chart.data.pivot(index="y", columns="x", values="value").loc[order, order]
        np.testing.assert_array_equal(cells, np.where(np.eye(4, dtype=bool), np.nan, values))
    assert figure.title.endswith("over 6 pairs of clients: -1.000 (synthetic data)")


def test_of_many_clients_some_are_drawn(tmp_path: Path) -> None:
    counts = np.eye(3, dtype=int)[np.arange(50) % 3] * 5
    figure = similarity_figure(_run(tmp_path, {k: (AT - k) % 3 > 0 for k in range(50)}, counts))
    assert figure is not None
    assert figure.charts[0].data["x"].nunique() == 40
    assert figure.caption.endswith(" 40 are drawn.")


def test_clients_that_are_left_out_are_reported(tmp_path: Path) -> None:
    masks: dict[int, np.ndarray] = {**TWIN_MASKS, 4: np.ones(32, bool)}
    figure = similarity_figure(_run(tmp_path, masks, np.vstack([TWINS, [[1, 1]]])))
    assert figure is not None
    assert "6 pairs of 4 of 5 clients" in figure.title


def test_a_page_holds_the_correlation(tmp_path: Path) -> None:
    (stated,) = similarity_figures(_run(tmp_path, TWIN_MASKS, TWINS))
    assert (stated.value, stated.note) == ("-1.000", "Pearson correlation, 6 pairs of clients")


@pytest.mark.parametrize(
    ("masks", "counts"),
    [
        ({}, TWINS),
        ({0: AT < 9, 3: AT > 9}, TWINS),
        (TWIN_MASKS, None),
        (dict.fromkeys(range(4), AT < 64), TWINS),
    ],
    ids=["no masks", "one pair", "no partition", "full masks"],
)
def test_a_run_that_has_nothing_to_compare_has_no_picture(
    tmp_path: Path, masks: dict[int, np.ndarray], counts: np.ndarray | None
) -> None:
    run = _run(tmp_path, masks, counts)
    assert similarity_figure(run) is None
    assert similarity_figures(run) == []


def test_equal_masks_have_no_correlation(tmp_path: Path) -> None:
    run = _run(tmp_path, dict.fromkeys(range(4), AT < 9), TWINS)
    assert similarity_figures(run) == []
    figure = similarity_figure(run)
    assert figure is not None
    assert figure.title.endswith(": -")


def test_a_mask_of_an_unknown_client_is_the_users_error(tmp_path: Path) -> None:
    run = _run(tmp_path, {**TWIN_MASKS, 4: AT < 9}, TWINS)
    with pytest.raises(UserError, match=r"partition\.npz .* it knows no client 4, who has a mask"):
        similarity_of(run)
