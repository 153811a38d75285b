"""The pictures: what is drawn is what was measured, and the files are pictures."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from lightfed.drawing.clients import POINTS_SHOWN, clients_figure
from lightfed.drawing.curves import curves_figure
from lightfed.drawing.heatmap import evenly_spaced, partition_figure
from lightfed.drawing.style import DARK, LIGHT, PALETTE, Theme, png_bytes, render
from lightfed.report.page import PICTURES
from lightfed.results.run import Run, read
from tests.report.make_run import (
    CLIENTS,
    ENVIRONMENT,
    METRICS,
    write_gates,
    write_masks,
    write_partition,
    write_run,
)

Draw = Callable[[Run, Theme], Figure | None]
DRAWS: list[Draw] = [partition_figure, curves_figure, clients_figure]


def _figure(draw: Draw, run: Run) -> Figure:
    figure = draw(run, LIGHT)
    assert figure is not None
    return figure


def _pixels(png: bytes) -> np.ndarray:
    """(H, W, 3) in 0..1."""
    return imread(io.BytesIO(png), format="png")[..., :3]


def _share_of(pixels: np.ndarray, colour: str) -> float:
    return float((np.abs(pixels - to_rgb(colour)).max(axis=-1) < 0.02).mean())


def _lines(axes: Axes) -> dict[str, np.ndarray]:
    """Label -> points (M, 2)."""
    return {str(line.get_label()): np.asarray(line.get_xydata()) for line in axes.get_lines()}


def _panel(figure: Figure, title: str) -> Axes:
    found = [axes for axes in figure.axes if axes.get_title(loc="left") == title]
    assert len(found) == 1, [axes.get_title(loc="left") for axes in figure.axes]
    return found[0]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_picture_is_a_png_with_something_on_it(tmp_path: Path, draw: Draw, theme: Theme) -> None:
    figure = draw(read(write_run(tmp_path / "run")), theme)
    assert figure is not None
    pixels = _pixels(png_bytes(figure))
    height, width = pixels.shape[:2]
    assert (width, height) == tuple((figure.get_size_inches() * 150).astype(int))
    assert 0.4 < _share_of(pixels, theme.face) < 0.99 or draw is partition_figure
    assert pixels.std() > 0.03
    assert _share_of(pixels, theme.ink) > 1e-4


def test_a_metric_with_a_slash_has_curves_of_its_own_and_of_its_client_groups(
    tmp_path: Path,
) -> None:
    metrics = {name.replace("accuracy", "val/acc"): values for name, values in METRICS.items()}
    columns = CLIENTS.replace("accuracy", "val/acc")
    run = read(write_run(tmp_path / "run", metrics=metrics, client_columns=columns))
    figure = _figure(curves_figure, run)
    panel = _panel(figure, "Val acc")
    assert _lines(panel)["global"].tolist() == [[1, 0.5], [3, 0.75]]
    assert panel.yaxis.get_major_formatter()(0.5) == "50%"
    assert set(_lines(_panel(figure, "Personal val acc per client group"))) == {"a", "b"}
    assert _panel(_figure(clients_figure, run), "Val acc of each client after round 3")


@pytest.mark.parametrize("draw", DRAWS)
def test_a_client_group_has_one_colour_in_all_pictures(tmp_path: Path, draw: Draw) -> None:
    run = read(write_run(tmp_path / "run"))
    pixels = _pixels(png_bytes(_figure(draw, run)))
    assert _share_of(pixels, PALETTE[1]) > 1e-4
    assert _share_of(pixels, PALETTE[2]) == 0


def test_the_heat_map_shows_the_counts(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run"))
    bars, heat, _ = _figure(partition_figure, run).axes
    assert run.partition is not None
    np.testing.assert_array_equal(heat.images[0].get_array(), run.partition.counts.T)
    boxes = [
        patch.get_path().get_extents(patch.get_transform() - bars.transData)
        for patch in bars.patches
    ]
    assert {round((box.x0 + box.x1) / 2): box.y1 for box in boxes} == {0: 30, 1: 20, 2: 10, 3: 5}
    assert [label.get_text() for label in heat.get_yticklabels()] == ["zero", "one", "two"]
    written = sorted(int(text.get_text()) for text in heat.texts)
    assert written == [5, 5, 10, 10, 15, 20]
    assert bars.get_title(loc="left") == "Who holds what: Digits, Shards(2)"


@pytest.mark.parametrize("clients", [1, 4, 200, 1000, 100_000])
def test_any_number_of_clients_can_be_drawn(tmp_path: Path, clients: int) -> None:
    folder = write_run(tmp_path / "run", evaluations=None)
    counts = np.arange(clients)[:, None] * [1, 0, 2] + 1
    write_partition(folder, counts, classes=("zero", "one", "two"))
    figure = _figure(partition_figure, read(folder))
    bars, heat, _ = figure.axes
    shown = min(clients, 200)
    drawn = np.asarray(heat.images[0].get_array())
    assert drawn.shape == (3, shown)
    np.testing.assert_array_equal(drawn[:, [0, -1]], counts[[0, -1]].T)
    assert (np.diff(drawn[0]) > 0).all()
    stated = f"200 of {clients:,} clients, evenly spaced by id" in bars.get_title(loc="left")
    assert stated == (clients > 200)
    assert figure.get_size_inches().max() <= 12


def test_many_classes_are_summed_in_groups(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_partition(folder, np.ones((4, 1000), int), classes=())
    bars, heat, _ = _figure(partition_figure, read(folder)).axes
    drawn = np.asarray(heat.images[0].get_array())
    assert drawn.shape == (100, 4)
    assert (drawn == 10).all()
    title = bars.get_title(loc="left").replace("\n", " ")
    assert "1,000 classes, summed in 100 groups" in title


@pytest.mark.parametrize(("total", "most"), [(1, 5), (5, 5), (1000, 200), (201, 200)])
def test_an_even_sample_keeps_both_ends(total: int, most: int) -> None:
    sample = evenly_spaced(total, most=most)
    assert len(sample) == min(total, most)
    assert (sample[0], sample[-1]) == (0, total - 1)
    assert (np.diff(sample) > 0).all()
    assert np.diff(sample).max(initial=0) <= -(-total // min(total, most)) + 1


def test_the_curves_go_through_the_measured_points(tmp_path: Path) -> None:
    figure = _figure(curves_figure, read(write_run(tmp_path / "run")))
    lines = _lines(_panel(figure, "Accuracy"))
    np.testing.assert_allclose(lines["global"], [[1, 0.5], [3, 0.75]])
    np.testing.assert_allclose(lines["personal, mean"], [[1, 0.55], [3, 0.65]])
    np.testing.assert_allclose(lines["personal, worst 10 %"], [[1, 0.4], [3, 0.3]])
    band = _panel(figure, "Accuracy").collections[0].get_paths()[0].vertices
    np.testing.assert_allclose(sorted({*np.asarray(band)[:, 1].round(6)}), [0.4, 0.5, 0.6, 0.9])
    losses = _lines(_panel(figure, "Loss"))
    np.testing.assert_allclose(losses["training"], [[1, 2.0], [2, 1.0], [3, 0.5]])
    np.testing.assert_allclose(losses["global loss, test"], [[1, 1.5], [3, 0.8]])
    client_groups = _panel(figure, "Personal accuracy per client group")
    np.testing.assert_allclose(_lines(client_groups)["b"], [[1, 0.5], [3, 0.4]])
    assert [line.get_color() for line in client_groups.get_lines()] == list(PALETTE[:2])


def test_the_cost_panel_is_against_all_bytes_so_far(tmp_path: Path) -> None:
    figure = _figure(curves_figure, read(write_run(tmp_path / "run")))
    axes = _panel(figure, "Accuracy for the bytes sent")
    np.testing.assert_allclose(_lines(axes)["global"], [[3, 0.5], [9, 0.75]])
    assert axes.get_xlabel().endswith("(kB)")
    assert all(a.get_xlabel() and a.get_ylabel() for a in figure.axes)


def test_a_run_that_sends_nothing_has_no_cost_panel(tmp_path: Path) -> None:
    metrics = {**METRICS, "bytes_up": (0, 0, 0), "bytes_down": (0, 0, 0)}
    figure = _figure(curves_figure, read(write_run(tmp_path / "run", metrics=metrics)))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["Accuracy", "Loss", "Personal accuracy per client group"]


def test_metrics_of_a_users_own_get_a_panel_and_other_columns_none(tmp_path: Path) -> None:
    metrics = {**METRICS, "global/f1": (0.1, 0.2, 0.3), "temperature": (1, 2, 3)}
    figure = _figure(curves_figure, read(write_run(tmp_path / "run", metrics=metrics)))
    np.testing.assert_allclose(_lines(_panel(figure, "F1"))["global"][:, 1], [0.1, 0.2, 0.3])
    titles = " ".join(axes.get_title(loc="left") for axes in figure.axes).lower()
    assert "temperature" not in titles
    assert "lr" not in titles
    assert len(figure.axes) == 5


def test_a_loss_over_decades_has_a_log_axis(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run", metrics={"train_loss": (100, 10, "inf", 1)}))
    axes = _panel(_figure(curves_figure, run), "Loss")
    assert axes.get_yscale() == "log"
    assert axes.get_ylabel() == "loss (log scale)"
    np.testing.assert_allclose(_lines(axes)["training"], [[1, 100], [2, 10], [4, 1]])


def test_every_client_is_a_point_in_the_row_of_its_client_group(tmp_path: Path) -> None:
    figure = _figure(clients_figure, read(write_run(tmp_path / "run")))
    (axes,) = figure.axes
    rows = [np.asarray(points.get_offsets()) for points in axes.collections]
    np.testing.assert_allclose(rows[0], [[0.8, 0], [1.0, 0]])
    np.testing.assert_allclose(rows[1], [[0.3, 1], [0.5, 1]])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a  (2)", "b  (2)"]
    lines = _lines(axes)
    np.testing.assert_allclose(lines["mean of all: 65.00 %"][:, 0], 0.65)
    np.testing.assert_allclose(lines["worst 10 %: 30.00 %"][:, 0], 0.3)


def test_many_clients_keep_their_distribution_in_fewer_points(tmp_path: Path) -> None:
    scores = np.linspace(0, 1, 3001) ** 2
    rows = [(1, i, "a", 1, score, 0, 0, 0, 0) for i, score in enumerate(scores)]
    folder = write_run(tmp_path / "run", evaluations=rows, metrics={"personal/accuracy": (0.5,)})
    (axes,) = _figure(clients_figure, read(folder)).axes
    points = np.asarray(axes.collections[0].get_offsets())
    assert len(points) == POINTS_SHOWN
    drawn = np.quantile(points[:, 0], [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(drawn, np.quantile(scores, [0, 0.25, 0.5, 0.75, 1]), atol=2e-3)
    assert np.abs(points[:, 1]).max() < 0.5
    assert len(np.unique(points.round(9), axis=0)) == POINTS_SHOWN


@pytest.mark.parametrize("client_groups", [1, 10, 23])
def test_one_client_group_or_many_can_be_drawn(tmp_path: Path, client_groups: int) -> None:
    rows = [(1, i, f"c{i % client_groups}", 1, i / 99, 0, 0, 0, 0) for i in range(99)]
    folder = write_run(tmp_path / "run", evaluations=rows, metrics={"personal/accuracy": (0.5,)})
    figure = _figure(clients_figure, read(folder))
    assert len(figure.axes[0].get_yticklabels()) == client_groups
    assert _pixels(png_bytes(figure)).std() > 0.03


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_clients_that_are_all_alike_can_be_drawn(tmp_path: Path, score: float) -> None:
    rows = [(1, i, "a", 1, score, 0, 0, 0, 0) for i in range(8)]
    folder = write_run(tmp_path / "run", evaluations=rows, metrics={"personal/accuracy": (score,)})
    (axes,) = _figure(clients_figure, read(folder)).axes
    points = np.asarray(axes.collections[0].get_offsets())
    assert len(np.unique(points, axis=0)) == 8


def test_names_with_dollar_signs_are_no_formulas(tmp_path: Path) -> None:
    metrics = {"personal/accuracy": (0.5, 0.6), "personal/accuracy/$x_{": (0.5, 0.6)}
    metrics["personal/accuracy/b"] = (0.1, 0.2)
    rows = [(1, 0, "$x_{", 3, 0.5, 1, 1, 1, 1), (1, 1, "b", 3, 0.6, 1, 1, 1, 1)]
    folder = write_run(
        tmp_path / "run", metrics=metrics, evaluations=rows, classes=("$\\frac{", "$", "$$")
    )
    run = read(folder)
    for draw in DRAWS:
        assert len(png_bytes(_figure(draw, run))) > 5000


def test_a_long_client_group_name_leaves_room_for_the_plot(tmp_path: Path) -> None:
    name = "a client group whose name is a whole sentence " * 3
    rows = [(1, i, f"{name}{i}", 3, 0.5, 1, 1, 1, 1) for i in range(4)]
    figure = _figure(partition_figure, read(write_run(tmp_path / "run", evaluations=rows)))
    png_bytes(figure)
    assert figure.axes[0].get_position().width > 0.5


def test_synthetic_data_is_reported_on_the_picture(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run", environment={**ENVIRONMENT, "synthetic": True}))
    for draw in (partition_figure, clients_figure):
        title = _figure(draw, run).axes[0].get_title(loc="left")
        assert "(synthetic data)" in title


@pytest.mark.parametrize(
    ("draw", "missing"),
    [
        (partition_figure, {"counts": None}),
        (partition_figure, {"counts": np.zeros((4, 3), int)}),
        (curves_figure, {"metrics": {"train_loss": (1.0,), "global/accuracy": (0.5,)}}),
        (curves_figure, {"metrics": {"train_loss": ("nan", "nan"), "lr-SGD": (1, 1)}}),
        (clients_figure, {"evaluations": None}),
        (clients_figure, {"evaluations": [(1, 0, "a", 3, "nan", 0.5, 1, 1, 1)]}),
    ],
)
def test_nothing_to_show_is_no_picture(tmp_path: Path, draw: Draw, missing: dict[str, Any]) -> None:
    run = read(write_run(tmp_path / "run", **missing))
    assert render(lambda theme: draw(run, theme)) is None


def test_drawing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run"))
    write_masks(run.folder, {k: np.arange(64) % 5 != k for k in range(4)})
    write_gates(run.folder, np.full((4, 3), 0.25))
    run = read(run.folder)
    for draw in PICTURES.values():
        first, second = draw(run, LIGHT), draw(run, LIGHT)
        assert first is not None
        assert second is not None
        assert png_bytes(first) == png_bytes(second)


def _linear(colour: str) -> np.ndarray:
    rgb = np.array(to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def _lab(linear: np.ndarray) -> np.ndarray:
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ linear.clip(0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# Machado, Oliveira, Fernandes 2009, table 1, severity 1, on linear RGB
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                   [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_any_two_colours_stay_apart(deficiency: str) -> None:
    seen = [_lab(np.array(DEFICIENCIES[deficiency]) @ _linear(colour)) for colour in PALETTE]
    apart = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(apart) > 18  # CIE76; some 2 is a just noticeable difference


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_every_colour_shows_on_its_ground(theme: Theme) -> None:
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in PALETTE)
    ground = _lab(_linear(theme.face))
    assert min(np.linalg.norm(_lab(_linear(colour)) - ground) for colour in PALETTE) > 25
