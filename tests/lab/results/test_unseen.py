"""Columns of clients that never train, in reports and comparisons."""

from pathlib import Path

import pytest

from lightfed.lab.report.sentence import result_sentence
from lightfed.lab.report.tables import key_figures
from lightfed.lab.results.run import base_name, primary_metric, read
from lightfed.lab.results.text import direction

HEAD = "round,personal/accuracy,unseen_finetuned/accuracy,gap/accuracy,gap/accuracy_half,gap/loss"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "metrics.csv").write_text(
        f"{HEAD}\n1,0.5,0.4,0.1,0.02,-0.3\n2,0.8,0.5,0.3,0.04,-0.2\n"
    )
    return tmp_path


def test_they_are_metrics_and_half_a_width_is_none(folder: Path) -> None:
    run = read(folder)
    assert run.metrics == [
        "personal/accuracy", "unseen_finetuned/accuracy", "gap/accuracy", "gap/loss",
    ]  # fmt: skip
    assert primary_metric(run) == "personal/accuracy"
    assert base_name("unseen_finetuned/accuracy") == base_name("gap/accuracy") == "accuracy"


def test_a_small_gap_is_better() -> None:
    assert direction("gap/accuracy") == direction("validation/gap/accuracy") == -1
    assert direction("gap/loss") == 1  # below 0, towards 0
    assert direction("unseen/accuracy") == direction("unseen_finetuned/accuracy") == 1


def test_the_page_has_the_gap_with_its_interval(folder: Path) -> None:
    run = read(folder)
    assert run.best("gap/accuracy") == (0.1, 1)
    figures = key_figures(run).set_index("metric")
    assert figures.loc["unseen, fine-tuned accuracy", "final"] == "50.00 %"
    assert figures.loc["gap in accuracy", "final"] == "30.00 %"
    assert "30.00 +- 4.00 % over clients" in str(figures.loc["gap in accuracy", "note"])


def test_a_run_that_tests_no_other_clients_has_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("round,unseen_finetuned/accuracy\n1,0.4\n")
    said = result_sentence(read(tmp_path))
    assert "clients that take part in no round reach 40.00 % accuracy" in said
