"""The parser's messages, as jsonargparse 4.53 words them, and the one line that each becomes."""

import inspect
from pathlib import Path

import lightning.pytorch as L
import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

import lightfed.cli.catalog  # noqa: F401 - the classes that are offered are those that are imported
from lightfed.api.algorithm import Algorithm
from lightfed.cli.messages import explain, lightning_error
from lightfed.cli.vocabulary import (
    ABSENT,
    SECTIONS,
    annotation,
    arguments,
    described,
    item_of,
    offered,
)
from lightfed.cli.written import Written
from lightfed.local.client_group import Cohort
from lightfed.utils.errors import UserError

FACTORY = (
    "collections.abc.Callable[[collections.abc.Iterable[torch.nn.parameter.Parameter]], "
    "torch.optim.optimizer.Optimizer]"
)


def _told(message: str, *argv: str) -> tuple[str, str, str]:
    error = explain(message, argv)
    return error.key, error.found, error.fix


def test_a_key_that_no_section_has() -> None:
    message = "Subcommand 'fit' does not accept option 'trainer.max_epoch'"
    assert _told(message) == (
        "trainer.max_epoch",
        "no such key",
        "did you mean trainer.max_epochs?",
    )


def test_an_unknown_option_of_the_command_line_has_the_name_of_a_key() -> None:
    message = "unrecognized arguments: --trainer.sync_batchnorm=true --model.seed 3"
    assert _told(message) == ("trainer.sync_batchnorm", *ABSENT["trainer.sync_batchnorm"])


def test_a_wrong_value_two_classes_deep() -> None:
    message = (
        'Parser key "model.cohorts":\n'
        "  Problem with given class_path 'lightfed.local.client_group.Cohort':\n"
        '    Parser key "model":\n'
        "      Type collections.abc.Callable[[], torch.nn.modules.module.Module] expects "
        'a function or a callable class: Parser key "norm":\n'
        "        Expected a typing.Literal['bn', 'in', 'ln', 'gn', 'none']. Got value: batch. "
        "Got value: Namespace(class_path='lightfed.models.networks.cnn.Conv', "
        "init_args=Namespace(norm='batch'))"
    )
    # Without the configuration nobody knows which cohort it is.
    key, found, fix = _told(message)
    assert key == "model.cohorts.model.init_args.norm"
    assert (found, fix) == ("batch", "give one of bn, in, ln, gn, none")


def test_an_argument_that_a_factory_does_not_take() -> None:
    message = (
        'Parser key "model.optimizer":\n'
        "  Does not validate against any of the Union subtypes\n"
        f"  Subtypes: [{FACTORY}, <class 'NoneType'>]\n"
        "  Errors:\n"
        f"    - Type {FACTORY} expects a function or a callable class: "
        "Option 'lrr' is not accepted. Got value: "
        "Namespace(class_path='torch.optim.SGD', init_args=Namespace(lrr='0.1'))\n"
        "    - Expected a <class 'NoneType'>\n"
        "  Given value type: <class 'jsonargparse._util.NestedArg'>\n"
        "  Given value: NestedArg(key='lrr', val='0.1')"
    )
    key, found, fix = _told(message)
    assert key == "model.optimizer.init_args.lrr"
    assert (found, fix) == ("no such argument of SGD", "did you mean lr?")


def test_a_choice_within_a_choice() -> None:
    message = (
        'Parser key "model.optimizer":\n'
        "  Does not validate against any of the Union subtypes\n"
        f"  Subtypes: [{FACTORY}, <class 'NoneType'>]\n"
        "  Errors:\n"
        f'    - Type {FACTORY} expects a function or a callable class: Parser key "lr":\n\n'
        "        - Expected a path but abc either not accessible or invalid\n"
        "        - Does not validate against any of the Union subtypes\n"
        "        Subtypes: [<class 'float'>, <class 'torch.Tensor'>]\n"
        "        Errors:\n"
        "          - Expected a <class 'float'>\n"
        "          - Expected a dot import path string: abc\n"
        "        Given value type: <class 'str'>\n"
        "        Given value: abc. Got value: "
        "Namespace(class_path='torch.optim.SGD', init_args=Namespace(lr='abc'))\n"
        "    - Expected a <class 'NoneType'>\n"
        "  Given value type: <class 'jsonargparse._util.NestedArg'>\n"
        "  Given value: NestedArg(key='lr', val='abc')"
    )
    key, found, fix = _told(message)
    assert (key, found) == ("model.optimizer.init_args.lr", "abc")
    assert fix.startswith("give a number")


def test_the_item_of_a_list_that_is_at_fault_is_found_in_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "cohorts.yaml"
    file.write_text(
        "model:\n  cohorts:\n  - {count: 1, model: Conv}\n  - {count: 1, level: z, model: Conv}\n"
    )
    message = 'Parser key "model.cohorts":\n  whatever is said of the whole list'
    key, found, fix = _told(message, "fit", "--config", str(file))
    assert (key, found) == ("model.cohorts.1.level", "z")
    assert fix == "give one of a, b, c, d, e or null"


def test_a_short_name_of_two_classes() -> None:
    message = (
        'Parser key "data.dataset":\n  Multiple subclasses with name Digits. '
        "Give the full class path to avoid ambiguity: one.Digits, two.Digits."
    )
    assert _told(message) == (
        "data.dataset",
        "Digits is the name of several classes",
        "write one.Digits or two.Digits",
    )


def test_all_that_is_missing_is_named() -> None:
    message = "the following arguments are required: fit.data.dataset, fit.data.partition"
    assert _told(message, "fit", "--config=x.yaml")[:2] == (
        "data.dataset",
        "is not given, nor data.partition",
    )


def test_a_sub_command_that_is_none_as_newer_pythons_word_it() -> None:
    message = "argument subcommand: invalid choice: 'tran' (choose from fit, validate)"
    assert _told(message) == (
        "lightfed tran",
        "no such sub-command",
        "known: fit, validate, plan, report, control, latency",
    )


def test_what_is_not_understood_is_one_line_with_a_key() -> None:
    key, found, fix = _told('Something new about "model.store":\n  in\n   two lines')
    assert key == "model.store"
    assert found == 'Something new about "model.store": in two lines'
    assert fix == "see lightfed fit --help"
    key, found, _ = _told('Parser key "model.store":\n  Something\n    new')
    assert (key, found) == ("model.store", "Something new")


def test_every_flag_of_lightning_is_there_or_told_why_not() -> None:
    theirs = set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}
    ours = set(arguments(SECTIONS["trainer"]))
    absent = {key.removeprefix("trainer.") for key in ABSENT if key.startswith("trainer.")}
    assert theirs - ours == absent
    assert not absent & ours


def test_annotations_in_words() -> None:
    assert described(annotation("trainer.max_epochs")) == "a whole number"
    assert described(annotation("model.store")) == "one of device, host"
    kinds = "global, personal, local, trained, aggregated, finetuned"
    assert described(annotation("model.evaluate")) == f"a list, each one of {kinds}"
    assert described(annotation("model.algorithm")) == "a class (Algorithm)"
    assert item_of(annotation("model.cohorts")) is Cohort
    assert item_of(annotation("trainer.callbacks")) is L.Callback
    assert item_of(annotation("model.seed")) is None


def test_classes_that_are_offered_can_be_used() -> None:
    assert {"FedAvg", "FedProx", "HeteroFL", "Standalone"} <= set(offered(Algorithm))
    networks = offered(nn.Module)
    assert {"Conv", "SimpleCNN", "Torchvision"} <= set(networks)
    assert "Scaler" not in networks
    assert "FedAvg" not in networks


def test_the_last_word_on_a_key_counts(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("model: {seed: 1, cohorts: [{count: 4}]}")
    (tmp_path / "two.yaml").write_text("model: {seed: 2}")
    argv = ["fit", "-c", str(tmp_path / "one.yaml"), f"--config={tmp_path / 'two.yaml'}"]
    assert Written(argv).get("model.seed") == 2
    assert Written([*argv, "--model.seed", "3"]).get("model.seed") == 3
    assert Written(argv).get("model.cohorts.0.count") == 4
    assert Written(argv).get("model.cohorts.1.count") is None
    assert Written([]).files == []


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            RuntimeError(
                "Early stopping conditioned on metric `x` which is not available. "
                "Pass in or modify your `EarlyStopping` callback to use any of the following: "
                "`a`, `b/c`"
            ),
            "trainer.callbacks: nothing called x is measured; monitor one of a, b/c",
        ),
        (
            MisconfigurationException(
                "`ModelCheckpoint(monitor='x')` could not find the monitored key in the returned "
                "metrics: ['a', 'b/c']. HINT: Did you call `log('x', value)`?"
            ),
            "trainer.callbacks: nothing called x is measured; monitor one of a, b/c",
        ),
        (
            MisconfigurationException("You set `Trainer(precision=8)`,\nwhich is too little."),
            "trainer.precision: You set `Trainer(precision=8)`, which is too little; "
            "see lightfed fit --help",
        ),
        (MisconfigurationException("So not."), "trainer: So not; see lightfed fit --help"),
    ],
)
def test_lightning_s_own_errors(error: Exception, line: str) -> None:
    assert str(lightning_error(error, [])) == line


def test_an_error_of_the_program_is_not_explained_away() -> None:
    assert lightning_error(RuntimeError("shape mismatch"), []) is None


def test_an_error_survives_the_way_between_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(UserError("key", "found", "fix")))
    assert str(error) == "key: found; fix"
