"""The chart of a metric after aggregation and after local training."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from lightfed.drawing.style import LIGHT, PALETTE
from lightfed.report.charts import charts
from lightfed.results.run import Run, read
from lightfed.studies.flexifed.stages import Stages, stages, stages_figure
from tests.report.make_run import ENVIRONMENT, write_run

SENT = {"bytes_up": (5, 5), "bytes_down": (5, 5)}
METHODS: dict[str, dict[str, Any]] = {
    "DisPFL": {"personal/accuracy": (0.5, 0.75), "aggregated/accuracy": (0.25, 0.5), **SENT},
    "FedAvg": {"personal/accuracy": (0.3, 0.4), "finetuned/accuracy": (0.6, 0.7), **SENT},
    "pFedMe": {"personal/accuracy": (0.2, 0.45), **SENT},
    "Standalone": {"personal/accuracy": (0.55, 0.65), "bytes_up": (0, 0), "bytes_down": (0, 0)},
}


def _write(root: Path, method: str, seed: int = 1, **changes: Any) -> Run:
    stated = ENVIRONMENT | {"name": f"{method}-s{seed}", "algorithm": method, "seed": seed}
    stated["rounds"] = len(next(iter(METHODS.get(method, {"": (1,)}).values())))
    files: dict[str, Any] = {
        "metrics": METHODS.get(method, {}),
        "environment": {**stated, **changes.pop("stated", {})},
        "config": f"seed_everything: {seed}\nmodel: {{algorithm: {method}}}\n",
        "evaluations": None,
        "counts": None,
    }
    folder = root / f"{method}-s{seed}"
    return read(write_run(folder, **{**files, **changes}))


def _axes(found: Stages) -> Axes:
    figure = stages_figure(found, LIGHT)
    assert figure is not None
    (axes,) = figure.axes
    return axes


def _lines(axes: Axes) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(colour, dashes) -> points, of the lines that are no entries of the legend."""
    return {
        (str(line.get_color()), str(line.get_linestyle())): [
            (float(x), float(y)) for x, y in np.asarray(line.get_xydata())
        ]
        for line in axes.get_lines()
        if len(np.asarray(line.get_xdata()))
    }


def test_a_method_has_a_dashed_and_a_solid_line(tmp_path: Path) -> None:
    (found,) = stages([_write(tmp_path, method) for method in METHODS])
    lines = _lines(_axes(found))
    assert lines == {
        (PALETTE[0], "--"): [(1, 0.25), (2, 0.5)],
        (PALETTE[0], "-"): [(1, 0.5), (2, 0.75)],
        (PALETTE[1], "--"): [(1, 0.3), (2, 0.4)],
        (PALETTE[1], "-"): [(1, 0.6), (2, 0.7)],
        (PALETTE[2], "--"): [(1, 0.2), (2, 0.45)],
        (PALETTE[3], "-"): [(1, 0.55), (2, 0.65)],
    }


def test_the_legend_tells_methods_and_dashes_once(tmp_path: Path) -> None:
    (found,) = stages([_write(tmp_path, method) for method in METHODS])
    figure = stages_figure(found, LIGHT)
    assert figure is not None
    (legend,) = figure.legends
    names = [f"{method}-s1" for method in METHODS]
    stated = [text.get_text() for text in legend.get_texts()]
    assert stated == [*names, "after aggregation", "after local training"]
    dashes = {line.get_label(): line.get_linestyle() for line in legend.get_lines()}
    assert (dashes["after aggregation"], dashes["after local training"]) == ("--", "-")


def test_seeds_are_a_mean_with_a_band(tmp_path: Path) -> None:
    metrics = {"personal/accuracy": (0.7, 0.85), "aggregated/accuracy": ("", 0.9), **SENT}
    runs = [_write(tmp_path, "DisPFL"), _write(tmp_path, "DisPFL", 2, metrics=metrics)]
    (found,) = stages(runs)
    axes = _axes(found)
    lines = _lines(axes)
    np.testing.assert_allclose(lines[PALETTE[0], "-"], [(1, 0.6), (2, 0.8)])
    np.testing.assert_allclose(lines[PALETTE[0], "--"], [(2, 0.7)])
    corners = [np.asarray(band.get_paths()[0].vertices) for band in axes.collections]
    tops = [(points[points[:, 0] == 2, 1]).max() for points in corners]
    deviations = [np.std(pair, ddof=1) for pair in ((0.5, 0.9), (0.75, 0.85))]
    np.testing.assert_allclose(tops, np.array([0.7, 0.8]) + deviations)
    assert charts(runs)[0].repeated
    assert not charts(runs[:1])[0].repeated


def test_without_both_stages_of_some_method_there_is_no_chart(tmp_path: Path) -> None:
    runs = [_write(tmp_path, method) for method in ("pFedMe", "Standalone")]
    assert stages(runs) == []
    assert charts(runs) == []
    short = {name: values[:1] for name, values in METHODS["DisPFL"].items()}
    (found,) = stages([_write(tmp_path, "DisPFL", metrics=short)])
    assert stages_figure(found, LIGHT) is None


def test_data_sets_have_charts_of_their_own_and_methods_keep_their_colours(tmp_path: Path) -> None:
    mnist = {"dataset": "MNIST", "synthetic": True}
    runs = [_write(tmp_path, "DisPFL"), _write(tmp_path, "FedAvg", stated=mnist)]
    digits, other = stages(runs)
    assert [chart.file for chart in charts(runs)] == [
        "comparison-stages-digits.png",
        "comparison-stages-mnist.png",
    ]
    assert {colour for colour, _ in _lines(_axes(digits))} == {PALETTE[0]}
    assert {colour for colour, _ in _lines(_axes(other))} == {PALETTE[1]}
    title = _axes(other).get_title(loc="left")
    assert title == "MNIST: accuracy after aggregation and after local training (synthetic data)"


def test_the_eleventh_method_has_dashes_of_its_own(tmp_path: Path) -> None:
    runs = [_write(tmp_path, f"m{i}", metrics=METHODS["DisPFL"]) for i in range(11)]
    (found,) = stages(runs)
    lines = _lines(_axes(found))
    assert len(lines) == 22
    assert {(PALETTE[0], ":"), (PALETTE[0], "-.")} <= set(lines)


def test_another_metric_than_accuracy_is_drawn_too(tmp_path: Path) -> None:
    metrics = {"personal/perplexity": (9, 4), "aggregated/perplexity": (20, 8), **SENT}
    first = _write(tmp_path, "unmeasured", metrics={"train_loss": (1, 1), **SENT})
    runs = [_write(tmp_path, "DisPFL", seed, metrics=metrics) for seed in (1, 2)]
    (found,) = stages([first, *runs])
    assert (found.metric, len(found.members)) == ("perplexity", 1)
    assert _axes(found).get_yscale() == "log"
