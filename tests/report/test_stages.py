"""The chart of a metric after aggregation and after local training."""

import json
from pathlib import Path
from typing import Any

from lightfed.results.run import Run, read
from lightfed.studies.flexifed.stages import stages, stages_figure
from tests.report.make_run import ENVIRONMENT, by_title, drawn, write_run

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


def test_a_method_has_a_line_in_each_stage_that_it_measured(tmp_path: Path) -> None:
    (found,) = stages([_write(tmp_path, method) for method in METHODS])
    figure = stages_figure(found)
    assert figure is not None
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
    runs = [_write(tmp_path, method) for method in ("pFedMe", "Standalone")]
    assert stages(runs) == []
    short = {name: values[:1] for name, values in METHODS["DisPFL"].items()}
    (found,) = stages([_write(tmp_path, "DisPFL", metrics=short)])
    assert stages_figure(found) is None


def test_data_sets_have_charts_of_their_own_and_methods_keep_their_colours(tmp_path: Path) -> None:
    mnist = {"dataset": "MNIST", "synthetic": True}
    runs = [_write(tmp_path, "DisPFL"), _write(tmp_path, "FedAvg", stated=mnist)]
    digits, other = map(stages_figure, stages(runs))
    assert digits is not None
    assert other is not None
    assert (digits.name, other.name) == ("stages-digits", "stages-mnist")
    assert (digits.series, other.series) == ({"DisPFL": 0}, {"FedAvg": 1})
    text = "MNIST: accuracy after aggregation and after local training (synthetic data)"
    assert other.title == text


def test_another_metric_than_accuracy_is_drawn_too(tmp_path: Path) -> None:
    metrics = {"personal/perplexity": (9, 4), "aggregated/perplexity": (900, 8), **SENT}
    first = _write(tmp_path, "unmeasured", metrics={"train_loss": (1, 1), **SENT})
    runs = [_write(tmp_path, "DisPFL", seed, metrics=metrics) for seed in (1, 2)]
    (found,) = stages([first, *runs])
    assert (found.metric, len(found.members)) == ("perplexity", 1)
    figure = stages_figure(found)
    assert figure is not None
    assert '"log"' in json.dumps(figure.charts[0].spec)
