"""pFedMoE and its rivals: gains, costs, differences by client, and gates."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]

from lightfed.lab.drawing.marks import MOST_CELLS
from lightfed.lab.results.run import Run, read
from lightfed.lab.studies.figures import figures_of_run, study_figures
from lightfed.lab.studies.pfedmoe import MEAN, METHODS, figures, gates_figure
from lightfed.lab.studies.shared import protocols
from lightfed.utils.errors import UserError
from tests.lab.report.make_run import COUNTS, EVALUATIONS, recorded, write_gates, write_run

COURSES = {
    "PFedMoE": (0.5, 0.8, 0.9),
    "FML": (0.4, 0.6, 0.85),
    "FD": (0.7, 0.7, 0.875),
    "Standalone": (0.5, 0.6, 0.75),
}
NAN = np.nan
KNOWN = np.array([[0.9, 0.2, NAN], [NAN, 0.75, 0.25], [0.5, NAN, NAN], [NAN, NAN, 0.1]])


def method_run(
    root: Path,
    algorithm: str,
    course: Sequence[float],
    *,
    seed: int = 0,
    name: str = "",
    classes: int = 2,
    clients: Sequence[float] = (),
    lr: float = 0.1,
) -> Run:
    """A run as the command line writes it.

    `course` is the mean over the clients by round, `clients` the accuracy of each at the end, and
    `classes` an option of the protocol.
    """
    stem = f"{name or algorithm}-c{classes}-s{seed}"
    config: dict[str, Any] = {
        "trainer": {"name": stem, "max_epochs": len(course)},
        "model": {
            "algorithm": {"class_path": f"lightfed.algorithms.{algorithm}", "init_args": {"a": 1}},
            "clients": [
                {"count": 2, "name": algorithm, "model": {"class_path": "lightfed.networks.MoECNN"}}
            ],
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": lr}},
            "seed": seed,
        },
        "data": {"partition": {"class_path": "Classes", "init_args": {"per_client": classes}}},
    }
    if name:  # another experiment with the same method
        config["model"]["algorithm"]["init_args"]["a"] = name
    rows = [(len(course), k, "c", 8, value) for k, value in enumerate(clients)]
    stated = {"name": stem, "algorithm": algorithm, "dataset": "CIFAR10", "seed": seed}
    write_run(
        root / stem,
        metrics={"personal/accuracy": course},
        environment=stated,
        config=yaml.safe_dump(config, sort_keys=False),
        evaluations=rows or None,
        client_columns="round,client,group,samples,accuracy",
        counts=None,
    )
    return read(root / stem)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    return [method_run(tmp_path, name, course) for name, course in COURSES.items()]


def _labels(runs: list[Run]) -> dict[str, list[str]]:
    """The methods of each protocol."""
    return {name: [group.label for group in own] for name, own in protocols(runs, METHODS).items()}


def test_protocols_are_apart_and_named_by_what_differs(tmp_path: Path) -> None:
    runs = [
        method_run(tmp_path, method, (0.1, 0.6), classes=classes)
        for classes in (2, 4)
        for method in ("PFedMoE", "FML")
    ]
    runs.append(method_run(tmp_path, "FD", (0.5, 0.6), classes=6))  # without pFedMoE
    runs.append(method_run(tmp_path, "FD", (0.5, 0.6, 0.7), classes=4))  # a round longer
    found = _labels(runs)
    assert found["CIFAR10, per_client 2, MoECNN"] == ["PFedMoE", "FML"]
    assert found["CIFAR10, per_client 4, MoECNN, max_epochs 2"] == ["PFedMoE", "FML"]


def test_methods_come_in_one_order_with_rates_of_their_own_and_labels_name_those_of_one_method(
    runs: list[Run], tmp_path: Path
) -> None:
    tuned = method_run(tmp_path, "FedKD", (0.5, 0.6, 0.88), lr=0.3)
    slow = method_run(tmp_path, "FedKD", (0.5, 0.6, 0.7), lr=0.01, seed=1)
    (labels,) = _labels([*runs[::-1], tuned, slow]).values()
    assert labels == ["PFedMoE", "FML", "FedKD, lr 0.3", "FedKD, lr 0.01", "FD", "Standalone"]


def _with(run: Run, **stated: Any) -> Run:
    """A run of another configuration: of its algorithm, and `lr` of its optimiser."""
    config = yaml.safe_load(run.config)
    if "lr" in stated:
        config["model"]["optimizer"] = {"class_path": "SGD", "init_args": {"lr": stated.pop("lr")}}
    config["model"]["algorithm"]["init_args"].update(stated)
    recording = run.environment | {"experiment": recorded(yaml.safe_dump(config))}
    (run.folder / "environment.json").write_text(json.dumps(recording))
    return read(run.folder)


@pytest.mark.parametrize("part", ["federate false", "gate half", "gate unnormalised"])
def test_an_ablation_is_named_by_what_it_changes(
    part: str, runs: list[Run], tmp_path: Path
) -> None:
    whole = _with(runs[0], gate="paper", federate=True)
    key, value = part.split()
    better = method_run(tmp_path, "PFedMoE", (0.6, 0.9, 0.95), name="a")
    (labels,) = _labels([_with(better, a=1, **{key: value}), *runs[1:], whole]).values()
    assert labels[0] == f"PFedMoE, {part}"


def test_a_client_is_compared_with_itself_in_the_same_seed(tmp_path: Path) -> None:
    runs = [
        method_run(tmp_path, "PFedMoE", (0.5, 0.8), clients=(0.9, 0.7), seed=0),
        method_run(tmp_path, "PFedMoE", (0.5, 0.8), clients=(0.8, 0.7), seed=1),
        method_run(tmp_path, "PFedMoE", (0.5, 0.8), clients=(0.0, 0.0), seed=2),
        method_run(tmp_path, "FML", (0.5, 0.7), clients=(0.6, 0.8), seed=0),
        method_run(tmp_path, "FML", (0.5, 0.7), clients=(0.7, 0.7), seed=1),
        method_run(tmp_path, "FD", (0.5, 0.6), clients=(0.1, 0.1), seed=0),
    ]
    (figure,) = figures(runs)
    assert figure.title.endswith("PFedMoE against FML, the best baseline, by client")
    data = figure.charts[0].data
    np.testing.assert_allclose(data["y"], (20, -5), atol=1e-9)
    np.testing.assert_allclose(data["high"], (30, 0), atol=1e-9)


def test_a_figure_needs_the_method_and_a_rival(tmp_path: Path) -> None:
    made: list[Any] = [
        method_run(tmp_path, name, course, clients=(0.5, 0.6)) for name, course in COURSES.items()
    ]
    assert [figure.name for figure in study_figures(made)] == ["differences-cifar10-moecnn"]
    assert study_figures(made[:1]) == []
    none = method_run(tmp_path, "FML", (math.nan,) * 3, name="none", clients=(0.5, 0.6))
    assert [*figures([made[0], none])] == []


def _gates(
    tmp_path: Path, personal: np.ndarray = KNOWN, *, client_groups: str | None = None
) -> Run:
    """Classes have names while there are three; `client groups` is a letter for each client."""
    rows = [(3, k, name, 9, 0.5, 1.0, 0, 0, 0) for k, name in enumerate(client_groups or "")]
    counts = COUNTS if personal.shape[1] == COUNTS.shape[1] else None
    folder = write_run(tmp_path / "run", evaluations=rows or EVALUATIONS, counts=counts)
    write_gates(folder, personal)
    return read(folder)


def test_a_row_is_a_client_and_a_column_a_class(tmp_path: Path) -> None:
    figure = gates_figure(_gates(tmp_path))
    assert figure is not None
    assert figure.title == "Weight of the private expert after round 3"
    (heat,) = figure.charts
    cells = heat.data.set_index(["y", "x"])["value"].round(6)
    means = cells.xs(MEAN, level="x").to_dict()
    assert cells.drop(MEAN, level="x").to_dict() == {  # none where a client has no test samples
        **{("0", "zero"): 0.9, ("0", "one"): 0.2, ("1", "one"): 0.75, ("1", "two"): 0.25},
        **{("2", "zero"): 0.5, ("3", "two"): 0.1},
    }
    assert means == pytest.approx({"0": 0.55, "1": 0.5, "2": 0.5, "3": 0.1}, abs=1e-6)


def test_clients_without_a_test_sample_have_no_row(tmp_path: Path) -> None:
    weights = KNOWN.copy()
    weights[1] = NAN
    figure = gates_figure(_gates(tmp_path, weights))
    assert figure is not None
    assert {*figure.charts[0].data["y"]} == {"0", "2", "3"}
    assert gates_figure(_gates(tmp_path / "none", np.full((4, 3), NAN))) is None


@pytest.mark.parametrize("clients", [1, MOST_CELLS, 2 * MOST_CELLS + 1])
def test_any_number_of_clients_fits(tmp_path: Path, clients: int) -> None:
    weights = np.random.default_rng(0).uniform(size=(clients, MOST_CELLS + 1))
    figure = gates_figure(_gates(tmp_path, weights, client_groups="a" * clients))
    assert figure is not None
    data = figure.charts[0].data
    assert data["x"].nunique() == MOST_CELLS
    means = data[data["x"] == MEAN]
    assert len(means) == min(clients, MOST_CELLS)
    of = weights[means["y"].astype(int)]
    np.testing.assert_allclose(means["value"], of.mean(axis=1), rtol=1e-5)


def test_the_page_has_the_picture_only_while_there_are_gates(tmp_path: Path) -> None:
    folder = _gates(tmp_path).folder
    assert [figure.name for figure in figures_of_run(read(folder))] == ["gates"]
    (folder / "gate.npz").unlink()
    assert figures_of_run(read(folder)) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = _gates(tmp_path).folder
    (folder / "gate.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(UserError, match=r"gate\.npz cannot be read"):
        figures_of_run(read(folder))
