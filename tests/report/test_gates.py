"""The picture of the gates: whose weights stand where, and what many clients are drawn as."""

from pathlib import Path

import numpy as np
import pytest

from lightfed.results.run import Run, read
from lightfed.studies.figures import figures_of_run
from lightfed.studies.pfedmoe.gates import MOST_ROWS, gate_rows, gates_figure
from lightfed.utils.errors import UserError
from tests.report.make_run import COUNTS, EVALUATIONS, write_gates, write_run

NAN = np.nan
KNOWN = np.array([[0.9, 0.2, NAN], [NAN, 0.75, 0.25], [0.5, NAN, NAN], [NAN, NAN, 0.1]])


def _run(tmp_path: Path, personal: np.ndarray = KNOWN, *, client_groups: str | None = None) -> Run:
    """Classes have names while there are three; `client groups` is a letter for each client."""
    rows = [(3, k, name, 9, 0.5, 1.0, 0, 0, 0) for k, name in enumerate(client_groups or "")]
    counts = COUNTS if personal.shape[1] == COUNTS.shape[1] else None
    folder = write_run(tmp_path / "run", evaluations=rows or EVALUATIONS, counts=counts)
    write_gates(folder, personal)
    return read(folder)


def test_a_row_is_a_client_and_a_column_a_class(tmp_path: Path) -> None:
    figure = gates_figure(_run(tmp_path))
    assert figure is not None
    assert figure.title == "Weight of the private expert after round 3"
    heat, means = figure.charts
    cells = heat.data.set_index(["y", "x"])["value"].round(6).to_dict()
    assert cells == {  # no cell where a client has no test samples
        **{("0", "zero"): 0.9, ("0", "one"): 0.2, ("1", "one"): 0.75, ("1", "two"): 0.25},
        **{("2", "zero"): 0.5, ("3", "two"): 0.1},
    }
    assert means.data["y"].tolist() == ["0", "1", "2", "3"]
    np.testing.assert_allclose(means.data["x"], (0.55, 0.5, 0.5, 0.1), atol=1e-6)
    assert means.data["series"].tolist() == ["a", "a", "b", "b"]
    assert means.series is not None
    assert means.series.places == {"a": 0, "b": 1}


def test_clients_without_a_test_sample_have_no_row(tmp_path: Path) -> None:
    weights = KNOWN.copy()
    weights[1] = NAN
    assert gate_rows(_run(tmp_path, weights)).index.tolist() == ["0", "2", "3"]
    assert gates_figure(_run(tmp_path / "none", np.full((4, 3), NAN))) is None


def test_many_clients_stand_in_groups_of_one_client_group_and_like_mean(tmp_path: Path) -> None:
    clients = 2 * MOST_ROWS
    means = np.linspace(0.0, 1.0, clients)
    weights = np.stack([means, np.full(clients, NAN), means], axis=1)
    weights[0, 2] = NAN
    rows = gate_rows(_run(tmp_path, weights, client_groups="ab" * MOST_ROWS))
    half = MOST_ROWS // 2
    assert rows["client group"].tolist() == ["a"] * half + ["b"] * half
    assert rows.index[:2].tolist() == ["a 1 (2 clients)", "a 2 (2 clients)"]
    # client group a has every second client; the last two of them come first
    np.testing.assert_allclose(rows["mean"].iloc[0], means[[-2, -4]].mean(), atol=1e-6)
    np.testing.assert_allclose(rows["mean"].iloc[half], means[[-1, -3]].mean(), atol=1e-6)
    assert (np.diff(rows["mean"].iloc[:half]) < 0).all()
    # of the two clients of the last group of a, one has no sample of the last class
    found = rows.iloc[half - 1][["0", "1", "2"] if "0" in rows else ["zero", "one", "two"]]
    np.testing.assert_allclose(found.astype(float), (means[2] / 2, NAN, means[2]), atol=1e-6)


@pytest.mark.parametrize("clients", [1, MOST_ROWS, MOST_ROWS + 1, 1000])
def test_any_number_of_clients_fits(tmp_path: Path, clients: int) -> None:
    weights = np.random.default_rng(0).uniform(size=(clients, 3))
    rows = gate_rows(_run(tmp_path, weights, client_groups="a" * clients))
    assert len(rows) == min(clients, MOST_ROWS)
    if clients in (MOST_ROWS, 1000):  # groups of one size
        np.testing.assert_allclose(rows["mean"].mean(), weights.mean(), rtol=1e-5)


def test_the_page_has_the_picture_only_while_there_are_gates(tmp_path: Path) -> None:
    folder = _run(tmp_path).folder
    assert [figure.name for figure in figures_of_run(read(folder))] == ["gates"]
    (folder / "gate.npz").unlink()
    assert figures_of_run(read(folder)) == []


@pytest.mark.parametrize("broken", [b"", b"PK\x03\x04 no archive", b"text"])
def test_a_damaged_file_is_named(tmp_path: Path, broken: bytes) -> None:
    folder = _run(tmp_path).folder
    (folder / "gate.npz").write_bytes(broken)
    with pytest.raises(UserError, match=r"gate\.npz cannot be read"):
        read(folder)


def test_an_array_of_another_form_is_refused(tmp_path: Path) -> None:
    folder = _run(tmp_path).folder
    write_gates(folder, np.ones(3))
    with pytest.raises(UserError, match=r"gate\.npz cannot be read"):
        read(folder)
    np.savez(folder / "gate.npz", general=KNOWN)
    with pytest.raises(UserError, match=r"gate\.npz cannot be read"):
        read(folder)
