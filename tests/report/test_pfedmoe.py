"""pFedMoE and its rivals: gains, costs, differences by client, robustness, and gates."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]

from lightfed.drawing.charts import Figure
from lightfed.report import compare
from lightfed.results.run import Run, read
from lightfed.studies.figures import figures_of_run, study_figures
from lightfed.studies.pfedmoe import (
    MOST_SHOWN,
    Protocol,
    figures,
    gates_figure,
    method_table,
    notes,
    protocols,
)
from lightfed.utils.errors import UserError
from tests.report.make_run import COUNTS, EVALUATIONS, drawn, write_gates, write_run

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
    metric: str = "accuracy",
    sent: float = 100.0,
    lr: float = 0.1,
) -> Run:
    """A run as the command line writes it: a round sends `sent` bytes up and 2 of it down.

    `course` is the mean over the clients by round, `clients` the metric of each at the end, and
    `classes` an option of the protocol.
    """
    stem = f"{name or algorithm}-c{classes}-s{seed}"
    config: dict[str, Any] = {
        "trainer": {"name": stem, "max_epochs": len(course)},
        "model": {
            "algorithm": {"class_path": f"lightfed.algorithms.{algorithm}", "init_args": {"a": 1}},
            "clients": [
                {"count": 2, "name": algorithm, "model": {"class_path": "lightfed.models.MoECNN"}}
            ],
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": lr}},
            "seed": seed,
        },
        "data": {"partition": {"class_path": "Classes", "init_args": {"per_client": classes}}},
    }
    if name:  # another experiment with the same method
        config["model"]["algorithm"]["init_args"]["a"] = name
    columns = {
        f"personal/{metric}": list(course),
        "bytes_up": [sent] * len(course),
        "bytes_down": [2 * sent] * len(course),
        "flops": [10 * sent] * len(course),
    }
    rows = [(len(course), k, "c", 8, value) for k, value in enumerate(clients)]
    stated = {"name": stem, "algorithm": algorithm, "dataset": "CIFAR10", "seed": seed}
    write_run(
        root / stem,
        metrics=columns,
        environment=stated,
        config=yaml.safe_dump(config, sort_keys=False),
        evaluations=rows or None,
        client_columns=f"round,client,group,samples,{metric}",
        counts=None,
    )
    return read(root / stem)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    return [method_run(tmp_path, name, course) for name, course in COURSES.items()]


def _protocol(runs: list[Run]) -> Protocol:
    (found,) = protocols(runs)
    return found


def _row(protocol: Protocol, label: str, asked: float | None = None) -> list[str]:
    """The cells of a method without its label and kind."""
    cells = method_table(protocol, asked).set_index("method").loc[label]
    return [str(cell) for cell in cells.iloc[1:]]


def _figure(runs: list[Run], name: str, target: float | None = None) -> Figure | None:
    return next((f for f in figures(runs, target=target) if f.name.startswith(name)), None)


def _final(root: Path, finals: dict[str, Sequence[float]], **changes: Any) -> list[Run]:
    """Runs of two rounds, a seed for each final value."""
    return [
        method_run(root, name, (0.1, final), seed=seed, **changes)
        for name, own in finals.items()
        for seed, final in enumerate(own)
    ]


def test_methods_come_in_the_order_of_the_kinds_and_gain_over_the_best(runs: list[Run]) -> None:
    found = _protocol(runs[::-1])
    assert found.name == "CIFAR10"
    table = method_table(found)
    assert table.iloc[:, :5].to_numpy().tolist() == [
        ["pFedMoE", "mutual learning", "*90.00 %", "+2.50", "+5.00"],
        ["FML", "mutual learning", "85.00 %", "-5.00", "-5.00"],
        ["FD", "distillation", "87.50 %", "-2.50", "-"],
        ["Standalone", "-", "75.00 %", "-15.00", "-"],
    ]
    assert tuple(table.columns[-3:]) == (
        "rounds to 75.00 % personal accuracy, resolution 1 round",
        "bytes until then",
        "FLOPs until then",
    )
    assert notes(found)[0] == (
        "pFedMoE: +2.50 points over FD, the best baseline, 1 seed (0): one seed shows no interval; "
        "+5.00 points over FML, the best of its kind (mutual learning), 1 seed (0): "
        "one seed shows no interval."
    )


def test_a_gain_is_over_the_seeds_that_both_were_run_with(tmp_path: Path) -> None:
    """Means over different seeds, whose clients hold different data, would say +30 points."""
    runs = _final(tmp_path, {"PFedMoE": (0.7, 0.8, 0.9), "FML": (0.6, 0.7), "FD": (0.1,)})
    runs[-2] = method_run(tmp_path, "FML", (0.1, 0.3), seed=3)  # in place of seed 1
    assert _row(_protocol(runs), "pFedMoE")[1:3] == ["+10.00", "+10.00"]
    text = "1 seed (0), pFedMoE lacks seed 3, FML lacks seeds 1-2: one seed shows no interval"
    assert f"+10.00 points over FML, the best baseline, {text};" in notes(_protocol(runs))[0]


def test_gains_and_means_of_several_seeds_have_their_intervals(tmp_path: Path) -> None:
    runs = _final(tmp_path, {"PFedMoE": (0.7, 0.8, 0.9), "FML": (0.69, 0.78, 0.87)})
    gain = "+2.00 (-0.48 to 4.48)"  # 4.3027 * .01 / sqrt(3) to both sides
    half = "24.84"  # and ten times as much
    assert _row(_protocol(runs), "pFedMoE")[:3] == [f"*80.00 +- {half} %", gain, gain]
    text = "95 % paired t interval -0.48 to 4.48, 3 seeds (0-2): no difference shown; "
    assert text in notes(_protocol(runs))[0]


def test_of_a_perplexity_less_is_a_gain(tmp_path: Path) -> None:
    courses = {"PFedMoE": (9.0, 4.0), "FML": (9.0, 6.0)}
    runs = [method_run(tmp_path, name, own, metric="perplexity") for name, own in courses.items()]
    found = _protocol(runs)
    assert found.target(None) == 6.0
    assert _row(found, "pFedMoE")[:4] == ["*4", "+2", "+2", "2"]


def test_a_cost_is_what_was_sent_and_computed_until_the_target(
    runs: list[Run], tmp_path: Path
) -> None:
    found = _protocol(runs)
    assert found.target(None) == 0.75  # Standalone's best is what all reached
    assert _row(found, "pFedMoE")[3:] == ["2", "600 B", "2.00 kFLOPs"]
    assert _row(found, "FD", 0.7)[3] == "1"
    assert _row(found, "Standalone", 0.76)[3:] == ["-", "-", "-"]
    other = method_run(tmp_path, "PFedMoE", (0.7, 0.9, 0.9), seed=1)
    assert _row(_protocol([*runs, other]), "pFedMoE", 0.7)[3] == "1.5"
    assert _row(_protocol([*runs, other]), "pFedMoE", 0.85)[3] == "2.5"
    assert _row(_protocol([*runs, other]), "pFedMoE", 0.91)[3] == "-"


def test_protocols_are_apart_and_named_by_what_differs(tmp_path: Path) -> None:
    runs = [
        run
        for classes in (2, 4)
        for run in _final(tmp_path, {"PFedMoE": (0.6,), "FML": (0.6,)}, classes=classes)
    ]
    runs.append(method_run(tmp_path, "FD", (0.5, 0.6), classes=6))  # without pFedMoE
    found = protocols(runs)
    assert [one.name for one in found] == [
        "CIFAR10; partition per_client 2",
        "CIFAR10; partition per_client 4",
    ]
    assert [len(one.members) for one in found] == [2, 2]


def test_methods_have_their_own_rates_and_labels_name_those_of_one_method(
    runs: list[Run], tmp_path: Path
) -> None:
    tuned = method_run(tmp_path, "FedKD", (0.5, 0.6, 0.88), lr=0.3)
    slow = method_run(tmp_path, "FedKD", (0.5, 0.6, 0.7), lr=0.01, seed=1)
    labels = [method.label for method in _protocol([*runs, tuned, slow]).members]
    assert labels == ["pFedMoE", "FML", "FedKD, lr 0.3", "FedKD, lr 0.01", "FD", "Standalone"]


def _with(run: Run, **stated: Any) -> Run:
    """A run of another configuration: of its algorithm, and `lr` of its optimiser."""
    path = run.folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    if "lr" in stated:
        config["model"]["optimizer"] = {"class_path": "SGD", "init_args": {"lr": stated.pop("lr")}}
    config["model"]["algorithm"]["init_args"].update(stated)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return read(run.folder)


@pytest.mark.parametrize("part", ["federate false", "gate half", "gate unnormalised"])
def test_an_ablation_is_named_by_what_it_changes_and_has_no_kind(
    part: str, runs: list[Run], tmp_path: Path
) -> None:
    """It is neither pFedMoE nor a baseline; one row of the table has a star."""
    whole = _with(runs[0], gate="paper", federate=True)
    key, value = part.split()
    better = method_run(tmp_path, "PFedMoE", (0.6, 0.9, 0.95), name="a")
    found = _protocol([_with(better, a=1, **{key: value}), *runs[1:], whole])
    table = method_table(found)
    assert table["method"].tolist()[:2] == ["pFedMoE", f"pFedMoE, {part}"]
    assert table["kind"].tolist()[:2] == ["mutual learning", "-"]
    scores = table["personal accuracy"]
    assert scores.str.startswith("*").tolist() == [False, True, False, False, False]
    assert notes(found)[0].startswith("pFedMoE: +2.50 points over FD, the best baseline")


def test_a_client_is_compared_with_itself_in_the_same_seed(tmp_path: Path) -> None:
    runs = [
        method_run(tmp_path, "PFedMoE", (0.5, 0.8), clients=(0.9, 0.7), seed=0),
        method_run(tmp_path, "PFedMoE", (0.5, 0.8), clients=(0.8, 0.7), seed=1),
        method_run(tmp_path, "PFedMoE", (0.5, 0.8), clients=(0.0, 0.0), seed=2),
        method_run(tmp_path, "FML", (0.5, 0.7), clients=(0.6, 0.8), seed=0),
        method_run(tmp_path, "FML", (0.5, 0.7), clients=(0.7, 0.7), seed=1),
        method_run(tmp_path, "FD", (0.5, 0.6), clients=(0.1, 0.1), seed=0),
    ]
    figure = _figure(runs, "differences")
    assert figure is not None
    assert "FML, the best baseline" in figure.title
    data = figure.charts[0].data
    np.testing.assert_allclose(data["y"], (20, -5), atol=1e-9)
    np.testing.assert_allclose(data["high"], (30, 0), atol=1e-9)
    assert data["series"].tolist() == ["ahead", "behind"]


def test_costs_have_a_bar_each_and_say_who_did_not_get_there(runs: list[Run]) -> None:
    figure = _figure(runs, "costs", 0.8)
    assert figure is not None
    sent, work = figure.charts
    assert sent.data["x"].tolist() == [600, 900, 900]
    assert work.data["x"].tolist() == [2, 3, 3]
    assert sent.data["y"].tolist() == ["pFedMoE", "FML", "FD"]
    assert work.title == "work of all clients (kFLOPs)"
    assert figure.caption.endswith("Not reached: Standalone.")
    assert _figure(runs, "costs", 0.99) is None


def test_robustness_has_a_line_per_method_over_the_classes(tmp_path: Path) -> None:
    runs = [
        run
        for classes, finals in ((10, (0.5, 0.4)), (2, (0.7, 0.6)))
        for run in _final(tmp_path, {"PFedMoE": finals[:1], "FML": finals[1:]}, classes=classes)
    ]
    figure = _figure(runs, "robustness")
    assert figure is not None
    assert figure.title == "CIFAR10: accuracy by classes of a client"
    assert drawn(figure.charts[0]) == {
        "pFedMoE": [(2, 0.7), (10, 0.5)],
        "FML": [(2, 0.6), (10, 0.4)],
    }
    assert _figure(runs[:2], "robustness") is None


def test_a_comparison_shows_table_and_charts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = [
        method_run(tmp_path, name, course, clients=(0.5, 0.6)) for name, course in COURSES.items()
    ]
    page = compare([run.folder for run in made], output=tmp_path / "out", target=0.8).read_text()
    stated = capsys.readouterr().out
    assert "rounds to 80.00 % personal accuracy, resolution 1 round" in stated
    assert "over the best of its kind" in stated
    assert stated.count("+2.50 points over FD, the best baseline") == 1
    assert "the next best" not in stated  # the verdict on the same figures would be stated twice
    assert "over FD, the best baseline" in page
    assert "CIFAR10: methods" in page
    names = [figure.name for figure in study_figures(made)]
    assert names == ["differences-cifar10", "costs-cifar10"]
    assert study_figures(made[:1]) == []
    none = method_run(tmp_path, "FML", (math.nan,) * 3, name="none")
    assert notes(_protocol([made[0], none]))[0] == "pFedMoE: no baseline was measured."


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
    figure = gates_figure(_gates(tmp_path, weights))
    assert figure is not None
    assert figure.charts[1].data["y"].tolist() == ["0", "2", "3"]
    assert gates_figure(_gates(tmp_path / "none", np.full((4, 3), NAN))) is None


@pytest.mark.parametrize("clients", [1, MOST_SHOWN, 2 * MOST_SHOWN + 1])
def test_any_number_of_clients_fits(tmp_path: Path, clients: int) -> None:
    weights = np.random.default_rng(0).uniform(size=(clients, MOST_SHOWN + 1))
    figure = gates_figure(_gates(tmp_path, weights, client_groups="a" * clients))
    assert figure is not None
    heat, means = figure.charts
    assert heat.data["x"].nunique() == MOST_SHOWN
    assert len(means.data) == min(clients, MOST_SHOWN)
    shown = means.data["y"].astype(int)
    np.testing.assert_allclose(means.data["x"], weights[shown].mean(axis=1), rtol=1e-5)


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
