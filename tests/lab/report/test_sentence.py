"""The sentence at the top of a run's page says what was trained and how well it went."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightfed.lab.report.page import build
from lightfed.lab.report.sentence import result_sentence
from lightfed.lab.results.run import read
from tests.lab.report.make_run import ENVIRONMENT, METRICS, write_run
from tests.lab.report.read_page import ReadPage

WIDTHS = """\
model:
  algorithm: HeteroFL
  clients:
    - {count: 2, level: a, model: {class_path: lightfed.Conv}}
    - {count: 2, level: b, model: {class_path: lightfed.Conv}}
"""


def sentence(folder: Path, **files: Any) -> str:
    """The sentence of a run with these files."""
    return result_sentence(read(write_run(folder / "run", **files)))


def test_it_names_method_networks_clients_data_rounds_result_and_the_best(tmp_path: Path) -> None:
    metrics = {"global/accuracy": (0.5, 0.8, 0.75), "train_loss": (2.0, 1.0, 0.5)}
    assert sentence(tmp_path, config=WIDTHS, metrics=metrics) == (
        "HeteroFL trained 2 sizes of Conv on Digits with 4 clients for 3 rounds; the server's model"
        " reaches 75.00 % accuracy on the test set (best 80.00 % in round 2)"
    )


def test_it_is_on_the_page(tmp_path: Path) -> None:
    page = ReadPage(build(write_run(tmp_path / "run", config=WIDTHS)))
    assert "HeteroFL trained 2 sizes of Conv on Digits with 4 clients" in page.texts["p"]
    assert "reaches 75.00 % accuracy on the test set." in page.texts["p"]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ((("VGG", "{depth: 11}"), ("VGG", "{depth: 19}")), "2 variants of VGG"),
        ((("VGG", "{depth: 11}"), ("VGG", "{depth: 11}")), "VGG"),
        ((("VGG", "{}"), ("MLP", "{}")), "VGG and MLP"),
        ((("A", "{}"), ("B", "{}"), ("C", "{}"), ("D", "{}")), "4 architectures"),
    ],
)
def test_networks_are_named_by_what_differs(
    groups: tuple[tuple[str, str], ...], expected: str, tmp_path: Path
) -> None:
    lines = [
        f"    - {{count: 2, model: {{class_path: x.{name}, init_args: {arguments}}}}}"
        for name, arguments in groups
    ]
    config = "\n".join(["model:", "  clients:", *lines, ""])
    assert f"HeteroFL trained {expected} on Digits with 4 clients" in sentence(
        tmp_path, config=config
    )


def test_a_network_that_is_no_class_is_not_named(tmp_path: Path) -> None:
    config = "model: {clients: [{count: 4, model: '<function net at 0x7f>'}]}\n"
    assert "HeteroFL trained on Digits with 4 clients" in sentence(tmp_path, config=config)


def test_without_a_configuration_it_says_what_is_known(tmp_path: Path) -> None:
    found = sentence(
        tmp_path,
        metrics={"train_loss": (2.0,)},
        environment=None,
        config=None,
        evaluations=None,
        counts=None,
    )
    assert found == (
        "algorithm not known trained on data not known for 1 round; no model was tested;"
        " the training loss of the last round is 2"
    )


def test_without_a_test_set_there_is_the_training_loss(tmp_path: Path) -> None:
    metrics = {"train_loss": (2.0, 1.0, 0.5)}
    found = sentence(tmp_path, metrics=metrics, evaluations=None)
    assert found.endswith("no model was tested; the training loss of the last round is 0.5")


def test_a_tested_loss_is_told_from_the_training_loss(tmp_path: Path) -> None:
    metrics = {"train_loss": (2.0, 1.0), "global/loss": (1.5, 1.7)}
    found = sentence(tmp_path, metrics=metrics, evaluations=None)
    assert found.endswith("model ends with loss 1.7 on the test set (best 1.5 in round 1)")


def test_clients_with_one_class_each_are_said_to_have_one(tmp_path: Path) -> None:
    counts = np.array([[20, 0, 0], [0, 5, 0], [10, 0, 0], [0, 0, 5]])
    found = sentence(tmp_path, counts=counts)
    assert "Digits with 4 clients of one class each for 3 rounds" in found


def test_data_without_classes_are_not_said_to_have_one(tmp_path: Path) -> None:
    counts = np.array([[20], [5], [10], [5]])
    assert "one class" not in sentence(tmp_path, counts=counts, classes=("all",))


def test_a_run_that_was_cut_says_so(tmp_path: Path) -> None:
    found = sentence(tmp_path, environment={**ENVIRONMENT, "rounds": 60})
    said = "HeteroFL has so far trained on Digits with 4 clients for 3 of 60 rounds;"
    assert found.startswith(said)


def test_a_run_that_ended_early_has_finished(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "rounds": 60, "finished": {"rounds": 3, "limits": {}}}
    found = sentence(tmp_path, environment=environment)
    assert found.startswith("HeteroFL trained on Digits with 4 clients for 3 of 60 rounds;")


def test_a_diverged_run_says_so(tmp_path: Path) -> None:
    metrics = {"global/perplexity": (9.0, 8.0, "nan"), "train_loss": (2.0, 1.0, "nan")}
    found = sentence(tmp_path, metrics=metrics)
    assert found.endswith(
        "the run diverged: its last global perplexity is not finite (best 8 in round 2)"
    )


def test_an_accuracy_of_a_diverged_run_is_not_left_alone(tmp_path: Path) -> None:
    """An accuracy stays finite when the weights are not."""
    metrics = {"global/accuracy": (0.5, 0.1), "train_loss": (1.0, "nan")}
    found = sentence(tmp_path, metrics=metrics)
    assert found.endswith("(best 50.00 % in round 1); the training loss is no longer finite")


def test_personal_models_alone_are_not_the_servers(tmp_path: Path) -> None:
    metrics = {"personal/accuracy": (0.5, 0.6), "train_loss": (1.0, 0.5)}
    found = sentence(tmp_path, metrics=metrics)
    assert found.endswith(
        "the clients' models reach 60.00 % accuracy on average, each on its own test samples"
    )


def test_personal_models_can_be_tested_on_the_whole_test_set(tmp_path: Path) -> None:
    metrics = {"personal/accuracy": (0.5, 0.6), "train_loss": (1.0, 0.5)}
    config = "data: {personal_test: all}\n"
    found = sentence(tmp_path, metrics=metrics, config=config)
    assert found.endswith("reach 60.00 % accuracy on average on the whole test set")


def test_the_round_of_the_last_test_is_named_if_it_is_not_the_last(tmp_path: Path) -> None:
    metrics = {**METRICS, "global/accuracy": (0.5, 0.75, "")}
    assert sentence(tmp_path, metrics=metrics).endswith(
        "accuracy on the test set in round 2, when it was last tested"
    )
