"""What jsonargparse 4.53 and Lightning refuse, and the line that becomes of it."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightfed.algorithms.fedprox import FedProx
from lightfed.api.algorithm import Algorithm
from lightfed.cli.catalog import subclasses
from lightfed.cli.commands import CATALOGUE
from lightfed.cli.errors import WORDS, accepted, parser_error, run_error
from lightfed.data.datamodule import FederatedDataModule
from lightfed.federation import Federation
from lightfed.lab.previews.trainer import PreviewTrainer
from lightfed.utils.errors import UserError
from tests.methods import methods

SECTIONS = {"trainer": PreviewTrainer, "model": Federation, "data": FederatedDataModule}


class Own(FedProx):
    """A user's algorithm that hands its other arguments on."""

    def __init__(self, own: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.own = own


def parsed(value: Any, annotation: Any = Algorithm) -> Any:
    """What a parser makes of a value of an argument."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--key", type=annotation)
    return parser.instantiate_classes(parser.parse_object({"key": value})).key


def refused(value: Any, annotation: Any = Algorithm) -> UserError:
    """The error of a command about a value of its argument `key`."""

    def command(key: Any) -> None:
        """A command."""

    command.__annotations__["key"] = annotation
    with pytest.raises(ArgumentError) as error:
        parsed(value, annotation)
    return parser_error(str(error.value), [], {"": command})


def own(**arguments: Any) -> dict[str, Any]:
    """The class `Own` with arguments, as a configuration has it."""
    return {"class_path": f"{__name__}.Own", "init_args": arguments}


def test_a_subclass_takes_what_its_parent_takes() -> None:
    algorithm = parsed(own(own=2.0, mu=0.5))
    assert type(algorithm).__name__ == "Own"
    assert algorithm.own == 2.0
    assert algorithm.local_penalty.mu == 0.5
    assert {"own", "mu", "weights"} <= set(accepted(Own))


@pytest.mark.parametrize(
    ("arguments", "key", "fragment"),
    [
        ({"own": 1.0, "muu": 0.5}, "key.init_args.muu", "did you mean mu?"),
        ({"own": 1.0, "mu": "x"}, "key.init_args.mu", "x; give float"),
        ({"mu": 0.5}, "key.init_args.own", "required: own; give float"),
        ({"own": 1.0}, "key.init_args.mu", "required: mu; give float"),
    ],
)
def test_a_mistake_in_an_argument_of_a_parent(
    arguments: dict[str, Any], key: str, fragment: str
) -> None:
    error = refused(own(**arguments))
    assert error.key == key
    assert fragment in str(error)


@pytest.mark.parametrize("wrap", [lambda t: t | None, lambda t: Callable[[], t]])
def test_a_mistake_within_a_choice_and_within_a_factory(wrap: Callable[[Any], Any]) -> None:
    error = refused(own(own=1.0, muu=0.5), wrap(Algorithm))
    assert error.key == "key.init_args.muu"
    assert error.fix == "did you mean mu?"


def test_a_short_name_that_several_classes_have() -> None:
    namesakes = [type("Namesake", (FedProx,), {"__module__": name}) for name in ("one", "two")]
    error = refused("Namesake")
    assert error.found == "Namesake is one.Namesake or two.Namesake"
    assert error.fix == "give the whole name"
    del namesakes


def test_the_item_at_fault_is_found_in_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "clients.yaml"
    file.write_text(
        "model:\n  clients:\n  - {count: 1, model: Conv}\n  - {count: 1, level: z, model: Conv}\n"
    )
    message = (
        'Parser key "model.clients":\n'
        "  Problem with given class_path 'lightfed.local.client_group.ClientGroup':\n"
        '    Parser key "level":\n      Something.'
    )
    for words in (["--config", str(file)], [f"--config={file}"], ["-c", str(file)]):
        assert parser_error(message, ["fit", *words], SECTIONS).key == "model.clients.1.level"

    # Without the file, the item is unknown.
    assert parser_error(message, ["fit"], SECTIONS).key == "model.clients.level"

    # A word counts more than a file.
    clients = '--model.clients=[{"count": 1, "level": "z", "model": "Conv"}]'
    words = ["fit", "--config", str(file), clients]
    assert parser_error(message, words, SECTIONS).key == "model.clients.0.level"


def test_what_is_not_understood_is_one_line_with_a_key() -> None:
    error = parser_error('Parser key "model.seed":\n  Something\n    new', ["fit"], SECTIONS)
    assert error.key == "model.seed"
    assert error.found == "Something new"
    assert parser_error("Something\nnew", ["fit"], SECTIONS).found == "Something new"


@pytest.mark.parametrize("word", WORDS)
def test_words_of_other_trainers_lead_to_keys_that_exist(word: str) -> None:
    fix = parser_error(f"unrecognized arguments: --data.{word} 1", ["fit"], SECTIONS).fix
    keys = re.findall(r"(\w+)\.(\w+)", fix)
    assert keys, fix
    for section, name in keys:
        assert name in accepted(SECTIONS[section])


@pytest.mark.parametrize(
    ("error", "key", "fragment"),
    [
        (
            MisconfigurationException("You set `Trainer(precision=8)`,\nwhich is too little."),
            "trainer.precision",
            "`, which is too little; ",
        ),
        (
            MisconfigurationException("You restored a checkpoint, but set Trainer(max_epochs=2)."),
            "trainer.max_epochs",
            "; give more",
        ),
        (MisconfigurationException("So not."), "trainer", "So not; "),
    ],
)
def test_lightning_s_own_errors(error: Exception, key: str, fragment: str) -> None:
    refused = run_error(error)
    assert refused is not None
    assert refused.key == key
    assert fragment in str(refused)


def test_an_error_of_the_program_is_not_explained_away() -> None:
    assert run_error(RuntimeError("shape mismatch")) is None


def test_an_error_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(UserError("key", "found", "fix")))
    assert str(error) == "key: found; fix"


def test_every_public_algorithm_has_a_short_name() -> None:
    # A class of this name would be found in any package that the catalogue imports.
    packages = tuple(f"{package}." for package in CATALOGUE)
    imported = {
        kind.__name__ for kind in subclasses(Algorithm) if kind.__module__.startswith(packages)
    }
    assert set(methods()) <= imported
