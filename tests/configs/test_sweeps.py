"""Every line of every sweep list is a command that parses, and the lists are complete."""

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI

from lightfed.algorithms.width.control import PREFIX, with_configurations
from lightfed.cli import command_line as cli
from lightfed.utils.keys import LEVELS

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "configs").rglob("*.sweep"))


def commands(path: Path) -> list[list[str]]:
    """The words of every line that is no comment."""
    lines = path.read_text().splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]


def lines(folder: str, study: str) -> list[tuple[str, dict[str, str]]]:
    """Of every line of a list the name of its configuration, and its other arguments."""
    found = []
    for command, *words in commands(ROOT / "configs" / folder / f"{study}.sweep"):
        given = dict(zip(words[::2], words[1::2], strict=True))
        config = Path(given.pop("--config"))
        assert command == "fit"
        assert config.parent == Path("configs", folder)
        assert (ROOT / config).is_file()
        found.append((config.stem, given))
    return found


def strings(study: str) -> list[str]:
    """DATA:STRING of every line of a list."""
    path = ROOT / "configs" / "heterofl" / f"{study}.sweep"
    found = [words[words.index("--config") + 1] for words in commands(path)]
    assert all(text.startswith(PREFIX) for text in found)
    return [text.removeprefix(PREFIX) for text in found]


class Stop(BaseException):
    """The command line is parsed."""


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    """That of the command line, made once."""
    found: list[ArgumentParser] = []

    def stop(self: Any) -> None:
        found.append(self.parser)
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LightningCLI, "instantiate_classes", stop)
        with pytest.raises(Stop):
            cli.main(["fit", "--config", str(ROOT / "configs" / "quickstart.yaml")])
    return found[0]


PLAIN = {
    "--trainer.name": "run",
    "--model.seed": "0",
    "--trainer.max_epochs": "1",
    "--trainer.check_val_every_n_epoch": "1",
    "--model.algorithm.init_args.active": "1",
    "--model.algorithm.init_args.wait": "1",
    "--data.partition.init_args.classes": "1",
    "--data.partition.per_client": "2",
}


def shape(words: list[str]) -> list[str]:
    """A command without what a parser cannot get wrong: counts, names, levels beyond the first."""
    reduced = with_configurations(words)
    for place in range(1, len(reduced)):
        reduced[place] = PLAIN.get(reduced[place - 1], reduced[place])
    place = reduced.index("--config") + 1
    if words[place].startswith(PREFIX):
        reduced[place] = control_shape(reduced[place])
    else:
        reduced[place] = str(ROOT / words[place])
    if "--model.clients" in reduced:
        place = reduced.index("--model.clients") + 1
        groups = json.loads(reduced[place])
        reduced[place] = json.dumps([groups[0] | {"count": 1}])
    return reduced


def control_shape(written: str) -> str:
    """The configuration that a control string stands for, of one group."""
    config = json.loads(written)
    for group in config["model"]["clients"]:
        group["count"] = 1
        assert group.pop("level", "a") in LEVELS
        assert group.pop("name", "a") in LEVELS
        assert 0 < group.pop("rate", 1.0) <= 1
    first, *others = config["model"]["clients"]
    assert all(group == first for group in others)
    config["model"]["clients"] = [first | {"level": "a"}]
    config["trainer"]["name"] = "run"
    return json.dumps(config)


def kind(words: list[str]) -> tuple[str, ...]:
    """Equal for commands that differ in a file alone; that one parses, test_configs.py knows.

    What else is set does not depend on the file, but for arguments of its algorithm.
    """
    place = words.index("--config") + 1
    if words[place].startswith("{"):
        return tuple(words)
    algorithm = ""
    if any(word.startswith("--model.algorithm") for word in words):
        algorithm = str(yaml.safe_load(Path(words[place]).read_text())["model"]["algorithm"])
    return (algorithm, *words[:place], *words[place + 1 :])


def kinds(sweep: Path) -> list[list[str]]:
    """A command of each kind."""
    shapes = [shape(words) for words in commands(sweep)]
    return list({kind(words): words for words in shapes}.values())


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda path: path.name)
def test_the_last_line_parses(sweep: Path, parser: ArgumentParser) -> None:
    words = shape(commands(sweep)[-1])
    assert parser.parse_args(words).subcommand == "fit", words


@pytest.mark.matrix
@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda path: path.name)
def test_every_line_parses(sweep: Path, parser: ArgumentParser) -> None:
    for words in kinds(sweep):
        assert parser.parse_args(words).subcommand == "fit", words


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda path: path.name)
def test_no_line_is_there_twice_and_the_header_says_how_to_run_it(sweep: Path) -> None:
    text = sweep.read_text()
    assert set(Counter(map(tuple, commands(sweep))).values()) == {1}
    assert f"lightfed sweep {sweep.relative_to(ROOT)}" in text


@pytest.mark.parametrize(
    ("study", "field", "values"),
    [
        ("splits", 3, {"iid", "non-iid-2"}),
        ("ablation", 6, {"bn", "in", "ln", "gn", "none"}),
        ("ablation", 7, {"0", "1"}),
        ("ablation", 8, {"0", "1"}),
    ],
)
def test_a_study_varies_its_field_and_nothing_else(
    study: str, field: int, values: set[str]
) -> None:
    found: dict[tuple[str, ...], set[str]] = {}
    for text in strings(study):
        words = text.split("_")
        found.setdefault((*words[:field], *words[field + 1 :]), set()).add(words[field])
    assert all(varied == values for varied in found.values())
