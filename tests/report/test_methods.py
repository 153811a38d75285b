"""pFedMoE beside its baselines: gains, costs to a target, differences by client, robustness."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]

from lightfed.report import compare
from lightfed.results.run import Run, read
from lightfed.studies.figures import study_figures
from lightfed.studies.pfedmoe.method_figures import (
    costs_figure,
    differences_figure,
    robustness,
    robustness_figure,
)
from lightfed.studies.pfedmoe.method_table import method_table, verdict
from lightfed.studies.pfedmoe.methods import METHODS, Cost, Method, Protocol, protocols
from tests.report.make_run import drawn, rows_of, write_run

COURSES = {
    "PFedMoE": (0.5, 0.8, 0.9),
    "FML": (0.4, 0.6, 0.85),
    "FD": (0.7, 0.7, 0.875),
    "Standalone": (0.5, 0.6, 0.75),
}


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
    """A run as the command line writes it; up, down and FLOPs are `sent`, 2 and 10 of it a round.

    Args:
        root: the folder of the runs.
        algorithm: its class.
        course: mean over the clients, by round.
        seed: of the run.
        name: of the run.
        classes: an option of the protocol.
        clients: metric of each at the last evaluation; none is evaluated by default.
        metric: that was measured.
        sent: bytes up of a round.
        lr: of the optimiser.
    """
    stem = f"{name or algorithm}-c{classes}-s{seed}"
    config = {
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


def _method(protocol: Protocol, name: str) -> Method:
    return next(method for method in protocol.members if method.name == name)


def test_methods_stand_in_the_order_of_the_kinds_whatever_the_order_of_the_runs(
    runs: list[Run],
) -> None:
    found = _protocol(runs[::-1])
    assert [m.name for m in found.members] == ["pFedMoE", "FML", "FD", "Standalone"]
    assert found.ours.name == "pFedMoE"
    assert found.name == "CIFAR10"


def test_a_gain_is_over_the_best_other_and_over_the_best_of_the_kind(runs: list[Run]) -> None:
    found = _protocol(runs)
    ours, fml, fd = found.ours, _method(found, "FML"), _method(found, "FD")
    assert found.best_other(ours) is fd
    assert found.best_other(ours, kind="mutual learning") is fml
    assert found.best_other(fml) is ours
    assert found.best_other(fd, kind="distillation") is None
    assert found.gain(ours, fd).difference == pytest.approx(0.9 - 0.875)
    assert found.gain(fml, ours).difference == pytest.approx(0.85 - 0.9)
    assert [m.name for m in found.members if found.is_best(m)] == ["pFedMoE"]


def test_a_gain_is_over_the_seeds_that_both_were_run_with(tmp_path: Path) -> None:
    """Means over different seeds, whose clients hold different data, would say +30 points."""
    finals = {"PFedMoE": (0.7, 0.8, 0.9), "FML": (0.6, 0.7), "FD": (0.1,)}
    runs = [
        method_run(tmp_path, name, (0.1, final), seed=seed)
        for name, own in finals.items()
        for seed, final in enumerate(own)
    ]
    runs[-2] = method_run(tmp_path, "FML", (0.1, 0.3), seed=3)  # in place of seed 1
    gain = _protocol(runs).gain(_protocol(runs).ours, _method(_protocol(runs), "FML"))
    assert gain.difference == pytest.approx(0.1)
    assert gain.seeds == (0,)
    assert verdict(_protocol(runs)) == (
        "pFedMoE, final personal accuracy: +10.00 points over FML, the best baseline, 1 seed (0), "
        "pFedMoE lacks seed 3, FML lacks seeds 1-2: one seed shows no interval; +10.00 points over "
        "FML, the best of its kind (mutual learning), 1 seed (0), pFedMoE lacks seed 3, FML lacks "
        "seeds 1-2: one seed shows no interval."
    )


def test_of_a_perplexity_less_is_a_gain(tmp_path: Path) -> None:
    ours = method_run(tmp_path, "PFedMoE", (9.0, 4.0), metric="perplexity")
    other = method_run(tmp_path, "FML", (9.0, 6.0), metric="perplexity")
    found = _protocol([ours, other])
    assert found.gain(found.ours, _method(found, "FML")).difference == pytest.approx(2.0)
    assert "over FML, the best baseline" in verdict(found)
    assert found.target(None) == 6.0
    assert found.ours.cost("perplexity", 6.0).rounds == 2


def test_a_cost_is_what_was_sent_and_computed_until_the_target(runs: list[Run]) -> None:
    found = _protocol(runs)
    assert found.target(None) == 0.75  # Standalone's best is what all reached
    assert found.ours.cost("accuracy", 0.75) == Cost(rounds=2, bytes=600, flops=2000)
    assert _method(found, "FD").cost("accuracy", 0.7).rounds == 1
    assert math.isnan(_method(found, "Standalone").cost("accuracy", 0.76).bytes)


def test_seeds_are_one_method_and_all_must_reach_a_target(tmp_path: Path) -> None:
    runs = [
        method_run(tmp_path, "PFedMoE", (0.5, 0.7, 0.8), seed=0),
        method_run(tmp_path, "PFedMoE", (0.7, 0.9, 0.9), seed=1),
        method_run(tmp_path, "FML", (0.1, 0.2, 0.3)),
    ]
    ours = _protocol(runs).ours
    np.testing.assert_allclose(ours.score("accuracy"), (0.85, np.std([0.8, 0.9], ddof=1)))
    assert ours.cost("accuracy", 0.7).rounds == 1.5
    assert math.isnan(ours.cost("accuracy", 0.85).rounds)
    assert _protocol(runs).target(None) == 0.3


def test_protocols_are_apart_and_reported_by_what_differs(tmp_path: Path) -> None:
    runs = [
        method_run(tmp_path, name, (0.5, 0.6), classes=classes)
        for classes in (2, 2, 4)[1:]
        for name in ("PFedMoE", "FML")
    ]
    runs.append(method_run(tmp_path, "FD", (0.5, 0.6), classes=6))  # no pFedMoE beside it
    found = protocols(runs)
    assert [one.name for one in found] == [
        "CIFAR10; partition per_client 2",
        "CIFAR10; partition per_client 4",
    ]
    assert [len(one.members) for one in found] == [2, 2]


def test_methods_meet_at_rates_of_their_own(runs: list[Run], tmp_path: Path) -> None:
    rival = method_run(tmp_path, "FedKD", (0.5, 0.6, 0.88), lr=0.3)
    slow = method_run(tmp_path, "FedKD", (0.5, 0.6, 0.7), lr=0.01, seed=1)
    labels = [method.label for method in _protocol([*runs, rival, slow]).members]
    assert labels == [
        *("pFedMoE", "FML", "FedKD (FedKD-c2-s0)", "FedKD (FedKD-c2-s1)", "FD", "Standalone")
    ]


def test_two_experiments_of_one_method_are_distinguished(runs: list[Run], tmp_path: Path) -> None:
    runs.append(method_run(tmp_path, "PFedMoE", (0.5, 0.6, 0.89), name="gates"))
    found = _protocol(runs)
    labels = [method.label for method in found.members]
    assert labels[:2] == ["pFedMoE (PFedMoE-c2-s0)", "pFedMoE (gates-c2-s0)"]
    best = found.best_other(found.ours)  # not the other pFedMoE, which is better than FD
    assert best is not None
    assert best.name == "FD"


def test_a_client_is_compared_with_itself_in_the_same_seed(tmp_path: Path) -> None:
    runs = [
        method_run(tmp_path, "PFedMoE", (0.5, 0.8), clients=(0.9, 0.7), seed=0),
        method_run(tmp_path, "PFedMoE", (0.5, 0.8), clients=(0.8, 0.8), seed=1),
        method_run(tmp_path, "PFedMoE", (0.5, 0.8), clients=(0.0, 0.0), seed=2),
        method_run(tmp_path, "FML", (0.5, 0.7), clients=(0.6, 0.8), seed=0),
        method_run(tmp_path, "FML", (0.5, 0.7), clients=(0.7, 0.7), seed=1),
        method_run(tmp_path, "FD", (0.5, 0.6), clients=(0.1, 0.1), seed=0),
    ]
    found = _protocol(runs)
    np.testing.assert_allclose(sorted(found.differences().xs(0, level="client")), (0.1, 0.3))
    np.testing.assert_allclose(
        sorted(found.differences().xs(1, level="client")), (-0.1, 0.1), atol=1e-12
    )
    figure = differences_figure(found)
    assert figure is not None
    (chart,) = figure.charts
    np.testing.assert_allclose(chart.data["y"], (20, 0), atol=1e-9)
    np.testing.assert_allclose(chart.data["high"], (30, 10))
    assert "FML, the best baseline" in figure.title


def test_a_client_below_zero_is_of_another_series(tmp_path: Path) -> None:
    runs = [
        method_run(tmp_path, "PFedMoE", (0.5, 0.8), clients=(0.9, 0.7)),
        method_run(tmp_path, "FML", (0.5, 0.7), clients=(0.6, 0.8)),
    ]
    figure = differences_figure(_protocol(runs))
    assert figure is not None
    assert figure.charts[0].data["series"].tolist() == ["ahead", "behind"]


def test_costs_have_a_bar_each_and_say_who_did_not_get_there(runs: list[Run]) -> None:
    found = _protocol(runs)
    figure = costs_figure(found, 0.8)
    assert figure is not None
    sent, work = figure.charts
    assert sent.data["x"].tolist() == [600, 900, 900]
    assert work.data["x"].tolist() == [2, 3, 3]
    assert sent.data["y"].tolist() == ["pFedMoE", "FML", "FD"]
    assert work.title == "work of all clients (kFLOPs)"
    assert figure.caption.endswith("Not reached: Standalone.")
    assert costs_figure(found, 0.99) is None


def test_robustness_has_a_line_per_method_over_the_classes(tmp_path: Path) -> None:
    runs = [
        method_run(tmp_path, name, (0.5, final), classes=classes)
        for classes, shift in ((10, 0.2), (2, 0.0))
        for name, final in (("PFedMoE", 0.7), ("FML", 0.6))
        for final in (final - shift,)
    ]
    (found,) = robustness(protocols(runs))
    assert found.name == "CIFAR10: accuracy by classes of a client"
    figure = robustness_figure(found)
    assert figure is not None
    assert drawn(figure.charts[0]) == {
        "pFedMoE": [(2, 0.7), (10, 0.5)],
        "FML": [(2, 0.6), (10, 0.4)],
    }
    assert robustness(protocols(runs[:2])) == []


def test_the_table_has_a_star_and_a_dash(runs: list[Run]) -> None:
    table = method_table(_protocol(runs), None)
    cells = {row[0]: row[1:] for row in rows_of(table)}
    assert cells["pFedMoE"][:4] == ("mutual learning", "*90.00 %", "+2.50", "+5.00")
    assert cells["Standalone"] == ("-", "75.00 %", "-15.00", "-", "3", "900 B", "3.00 kFLOPs")
    assert tuple(table.columns[-3:]) == (
        "rounds to 75.00 % personal accuracy, resolution 1 round",
        "bytes until then",
        "FLOPs until then",
    )


def test_gains_of_several_seeds_have_their_intervals(tmp_path: Path) -> None:
    finals = {"PFedMoE": (0.7, 0.8, 0.9), "FML": (0.69, 0.78, 0.87)}
    runs = [
        method_run(tmp_path, name, (0.1, final), seed=seed)
        for name, own in finals.items()
        for seed, final in enumerate(own)
    ]
    stated = "+2.00 (-0.48 to 4.48)"  # 4.3027 * .01 / sqrt(3) to both sides
    assert rows_of(method_table(_protocol(runs), None))[0][3:5] == (stated, stated)
    assert verdict(_protocol(runs)).startswith(
        "pFedMoE, final personal accuracy: +2.00 points over FML, the best baseline, "
        "95 % paired t interval -0.48 to 4.48, 3 seeds (0-2): no difference shown; "
    )


def test_the_verdict_names_both_baselines(runs: list[Run], tmp_path: Path) -> None:
    assert verdict(_protocol(runs)) == (
        "pFedMoE, final personal accuracy: "
        "+2.50 points over FD, the best baseline, 1 seed (0): one seed shows no interval; "
        "+5.00 points over FML, the best of its kind (mutual learning), 1 seed (0): "
        "one seed shows no interval."
    )
    found = _protocol([run for run in runs if run.name.startswith(("PFedMoE", "FD"))])
    assert verdict(found).endswith("; no other of its kind (mutual learning).")
    unmeasured = method_run(tmp_path, "FML", (math.nan,) * 3, name="none")
    assert verdict(_protocol([runs[0], unmeasured])) == "pFedMoE: no baseline was measured."


def test_the_kinds_are_those_of_the_paper() -> None:
    kinds = dict(METHODS.values())
    assert {name for name, kind in kinds.items() if kind == "mutual learning"} == {
        *("pFedMoE", "FML", "FedKD", "FedAPEN")
    }
    assert {name for name, kind in kinds.items() if kind == "distillation"} == {"FD", "FedProto"}
    assert kinds["LG-FedAvg"] == "model mixing"
    assert kinds["Standalone"] == ""


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
    figures = study_figures(made)
    assert [figure.name for figure in figures] == ["differences-cifar10", "costs-cifar10"]
    assert study_figures(made[:1]) == []


def _with(run: Run, **stated: Any) -> Run:
    """A run of another configuration: of its algorithm, and `lr` of its optimiser."""
    path = run.folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    if "lr" in stated:
        config["model"]["optimizer"] = {"class_path": "SGD", "init_args": {"lr": stated.pop("lr")}}
    config["model"]["algorithm"]["init_args"].update(stated)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return read(run.folder)


def test_methods_with_rates_of_their_own_are_of_one_protocol(runs: list[Run]) -> None:
    rates = (0.1, 0.03, 0.03, 0.01)
    tuned = [_with(run, lr=lr) for run, lr in zip(runs, rates, strict=True)]
    assert len(_protocol(tuned).members) == len(COURSES)


@pytest.mark.parametrize("part", [{"federate": False}, {"gate": "half"}, {"gate": "unnormalised"}])
def test_pfedmoe_is_the_whole_method_beside_parts_of_it(
    part: dict[str, Any], runs: list[Run], tmp_path: Path
) -> None:
    """A part that is better is neither pFedMoE nor a baseline."""
    whole = _with(runs[0], gate="paper", federate=True)
    other = _with(method_run(tmp_path, "PFedMoE", (0.6, 0.9, 0.95), name="a-part"), **part)
    found = _protocol([other, *runs[1:], whole])
    assert found.ours.group.runs[0].folder == whole.folder
    assert [m.name for m in found.members[:2]] == ["pFedMoE", "pFedMoE"]
    rival = found.best_other(found.ours)
    assert rival is not None
    assert rival.name == "FD"
