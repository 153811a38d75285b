"""The picture of the gates: whose weights stand where, and what many clients are drawn as."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from lightfed.drawing.style import DARK, LIGHT, PALETTE, png_bytes
from lightfed.results.run import Run, read
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


def _figure(run: Run) -> Figure:
    figure = gates_figure(run, LIGHT)
    assert figure is not None
    return figure


def _cells(figure: Figure) -> np.ndarray:
    return np.ma.filled(np.ma.asarray(figure.axes[0].images[0].get_array()), NAN)


def _bars(figure: Figure) -> list[tuple[float, float, str]]:
    """Row, end and colour, from the top."""
    from matplotlib.colors import to_hex

    found = []
    for patch in figure.axes[1].patches:
        box = patch.get_path().get_extents(patch.get_transform() - figure.axes[1].transData)
        assert 0.5 in (round(box.x0, 6), round(box.x1, 6))
        end = box.x0 + box.x1 - 0.5
        found.append(((box.y0 + box.y1) / 2, end, to_hex(patch.get_facecolor())))
    return sorted(found)


def test_a_row_is_a_client_and_a_column_a_class(tmp_path: Path) -> None:
    figure = _figure(_run(tmp_path))
    heat = figure.axes[0]
    np.testing.assert_allclose(_cells(figure), KNOWN, atol=1e-6)
    assert [text.get_text() for text in heat.get_xticklabels()] == ["zero", "one", "two"]
    assert [text.get_text() for text in heat.get_yticklabels()] == ["0", "1", "2", "3"]
    written = {tuple(text.get_position()): text.get_text() for text in heat.texts}
    assert written == {
        **{(0, 0): "0.90", (1, 0): "0.20", (1, 1): "0.75", (2, 1): "0.25"},
        **{(0, 2): "0.50", (2, 3): "0.10"},
    }
    assert heat.get_title(loc="left") == "Mean weight of the private expert after round 3"


def test_the_map_diverges_from_a_half_and_what_nobody_holds_is_hatched(tmp_path: Path) -> None:
    figure = _figure(_run(tmp_path))
    image = figure.axes[0].images[0]
    assert image.get_clim() == (0.0, 1.0)
    ends = [np.array(image.to_rgba(np.array([value]))[0, :3]) for value in (0.0, 0.5, 1.0)]
    assert ends[0][0] > ends[0][2]  # brown
    assert ends[2][2] > ends[2][0]  # blue
    assert np.ptp(ends[1]) < 0.05  # grey
    assert image.to_rgba(np.ma.masked_invalid([NAN]))[0, 3] == 0  # the ground shows
    assert figure.axes[0].patch.get_hatch()


def test_beside_a_row_is_the_mean_over_its_classes_in_the_colour_of_its_client_group(
    tmp_path: Path,
) -> None:
    rows, ends, colours = zip(*_bars(_figure(_run(tmp_path))), strict=True)
    np.testing.assert_allclose(rows, range(4), atol=1e-9)
    np.testing.assert_allclose(ends, (0.55, 0.5, 0.5, 0.1), atol=1e-6)
    assert colours == (PALETTE[0], PALETTE[0], PALETTE[1], PALETTE[1])


def test_clients_of_one_client_group_need_no_legend(tmp_path: Path) -> None:
    figure = _figure(_run(tmp_path, client_groups="aaaa"))
    assert {colour for *_, colour in _bars(figure)} == {LIGHT.accent}
    assert not figure.legends
    assert [text.get_text() for text in _figure(_run(tmp_path / "b")).legends[0].get_texts()] == [
        *("client group a", "client group b")
    ]


def test_clients_without_a_test_sample_have_no_row(tmp_path: Path) -> None:
    weights = KNOWN.copy()
    weights[1] = NAN
    figure = _figure(_run(tmp_path, weights))
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["0", "2", "3"]
    assert len(_bars(figure)) == 3
    assert gates_figure(_run(tmp_path / "none", np.full((4, 3), NAN)), LIGHT) is None


def test_many_clients_stand_in_groups_of_one_client_group_and_like_mean(tmp_path: Path) -> None:
    clients = 2 * MOST_ROWS
    means = np.linspace(0.0, 1.0, clients)
    weights = np.stack([means, np.full(clients, NAN), means], axis=1)
    weights[0, 2] = NAN
    run = _run(tmp_path, weights, client_groups="ab" * MOST_ROWS)
    assert run.gates is not None
    rows = gate_rows(run, run.gates)
    assert len(rows.weights) == MOST_ROWS
    assert rows.client_groups == ("a",) * 25 + ("b",) * 25
    assert rows.names == ("a \u00d7 2",) * 25 + ("b \u00d7 2",) * 25
    # client group a has every second client; the last two of them come first
    np.testing.assert_allclose(rows.means[0], (means[98] + means[96]) / 2, atol=1e-6)
    np.testing.assert_allclose(rows.means[25], (means[99] + means[97]) / 2, atol=1e-6)
    assert (np.diff(rows.means[:25]) < 0).all()
    # of the two clients of the last group of a, one has no sample of the last class
    np.testing.assert_allclose(rows.weights[24], (means[2] / 2, NAN, means[2]), atol=1e-6)
    label = _figure(run).axes[0].get_ylabel()
    assert label == "groups of similar clients, 100 in all"


@pytest.mark.parametrize("clients", [1, MOST_ROWS, MOST_ROWS + 1, 1000])
def test_any_number_of_clients_fits(tmp_path: Path, clients: int) -> None:
    weights = np.random.default_rng(0).uniform(size=(clients, 3))
    figure = _figure(_run(tmp_path, weights, client_groups="a" * clients))
    cells = _cells(figure)
    assert len(cells) == len(_bars(figure)) == min(clients, MOST_ROWS)
    assert figure.get_size_inches().max() <= 12
    assert (figure.axes[0].get_ylabel() == "client") == (clients <= MOST_ROWS)
    if clients in (MOST_ROWS, 1000):  # groups of one size
        np.testing.assert_allclose(cells.mean(axis=0), weights.mean(axis=0), rtol=1e-5)


def test_client_groups_beyond_the_colours_are_not_distinguished(tmp_path: Path) -> None:
    run = _run(tmp_path, np.full((55, 3), 0.5), client_groups=5 * "abcdefghijk")
    assert run.gates is not None
    rows = gate_rows(run, run.gates)
    assert set(rows.client_groups) == {""}
    assert set(rows.names) == {"\u00d7 1", "\u00d7 2"}


def test_many_classes_are_averaged_in_groups(tmp_path: Path) -> None:
    weights = np.tile([0.2, 0.4], (2, 100))
    weights[0, :2] = 0.6, NAN
    figure = _figure(_run(tmp_path, weights))
    cells = _cells(figure)
    assert cells.shape == (2, 100)
    np.testing.assert_allclose(cells[0, 0], 0.6, atol=1e-6)
    np.testing.assert_allclose(cells[1], 0.3, atol=1e-6)
    assert figure.axes[0].get_title(loc="left").endswith("; 200 classes in 100 groups")


def test_both_themes_are_pictures(tmp_path: Path) -> None:
    run = _run(tmp_path)
    for theme in (LIGHT, DARK):
        figure = gates_figure(run, theme)
        assert figure is not None
        assert png_bytes(figure).startswith(b"\x89PNG")


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
