"""A method has one colour and dash on a page: figures of studies take those of the comparison."""

from pathlib import Path

from lightfed.lab.report.figures import comparison_figures
from lightfed.lab.results.groups import grouped, singles
from lightfed.lab.studies.figures import study_figures
from tests.lab.studies.test_clouds import _study
from tests.lab.studies.test_pfedmoe import method_run


def test_the_first_experiment_of_each_method_comes_before_all_others(tmp_path: Path) -> None:
    order = ["FML", "FML", "FD", "PFedMoE", "FD"]
    runs = [method_run(tmp_path, m, (0.5, 0.6), name=f"{m}{i}") for i, m in enumerate(order)]
    for rows in (grouped(runs), singles(runs)):
        assert [row.place for row in rows] == [0, 3, 1, 2, 4]


def test_clouds_keep_the_colours_of_their_experiments(tmp_path: Path) -> None:
    runs = _study(tmp_path)
    (studied,) = [figure.series for figure in study_figures(runs) if "times" in figure.name]
    by_label = {row.runs[0].name: row.place for row in grouped(runs)}
    compared = comparison_figures(grouped(runs), "personal/accuracy")[0].series
    assert compared.keys() == {row.label for row in grouped(runs)}
    assert studied == {
        **{f"FedBCD, wait {b}": by_label[f"b{b}-s0"] for b in (3, 5, 7, 10)},
        "FedBCDI": by_label["FedBCDI-s0"],
        "CloudFedAvg, mu 0.0": by_label["fedavg-s0"],
        "CloudFedAvg, mu 5.0": by_label["fedprox-s0"],
    }
