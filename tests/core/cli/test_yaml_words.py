"""Numbers and words of a configuration are what is written there."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from lightfed.cli.command_line import main, prepared
from lightfed.utils.errors import UserError
from lightfed.utils.yaml_text import config_text
from tests.promises.refusals.mistakes import edited

SMALL = {"model.algorithm": "FedAvg", "model.optimizer.init_args.lr": 0.1}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(edited(SMALL))
    return path


def with_value(file: Path, key: str, text: str) -> list[str]:
    """A command with a second file, in which a key has this text."""
    nested: Any = f"@{key}@"
    for part in reversed(key.split(".")):
        nested = {part: nested}
    other = file.with_name("other.yaml")
    other.write_text(yaml.safe_dump(nested).replace(f"'@{key}@'", text))
    return ["fit", "--config", str(file), "--config", str(other)]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("trainer.max_epochs", "010"),
        ("trainer.max_epochs", "08"),
        ("trainer.max_epochs", "-010"),
        ("model.optimizer.init_args.lr", "1:30"),
        ("model.optimizer.init_args.lr", "1:30.5"),
        ("trainer.max_time", "1:30:00"),
        ("trainer.name", "007"),
    ],
)
def test_a_number_that_yaml_would_convert_is_refused_by_its_key(
    key: str, text: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(with_value(file, key, text))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lightfed: error: {key}: {text}, in line ")


def test_the_command_line_has_no_numbers_of_base_60(file: Path) -> None:
    with pytest.raises(UserError) as refused:
        prepared(["fit", "--config", str(file), "--model.optimizer.init_args.lr=1:30"])
    assert refused.value.key == "model.optimizer.init_args.lr"
    assert "1:30" in refused.value.found


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("trainer.max_epochs", "10", 10),
        ("trainer.max_epochs", "1_0", 10),
        ("trainer.max_epochs", "0x10", 16),
        ("model.optimizer.init_args.lr", "1e-1", 0.1),
        ("model.optimizer.init_args.lr", "0.5", 0.5),
        ("trainer.max_epochs", "'10'", 10),
        ("trainer.name", "'007'", "007"),
        ("trainer.max_time", "'1:30:00:00'", "1:30:00:00"),
        ("model.personal", "'norms'", "norms"),
    ],
)
def test_a_value_is_what_is_written(key: str, text: str, value: Any, file: Path) -> None:
    made = prepared(with_value(file, key, text)).trainer.config  # type: ignore[union-attr]
    for part in key.split("."):
        made = made[part]
    assert made == value
    assert type(made) is type(value)


@pytest.mark.parametrize("word", ["0123", "no", "1e3", "[1, 2]", "plain", "null"])
def test_a_quoted_word_below_a_key_without_a_type_stays_a_word(word: str, file: Path) -> None:
    """Also in the configuration that the run writes, and where that is read again."""
    words = with_value(file, "trainer.plugins", f"'{word}'")
    config = prepared_config(words)
    assert config["trainer"]["plugins"] == word
    again = file.with_name("again.yaml")
    again.write_text(config_text(config))
    assert prepared_config(["fit", "--config", str(again)]) == config


class Labelled(nn.Module):
    """A network with arguments of several types, one of which is a word."""

    def __init__(
        self,
        first: int | str = 0,
        second: bool | str | None = None,
        third: dict[str, int | str] | str | None = None,
        fourth: int = 0,
    ) -> None:
        raise NotImplementedError


def test_a_quoted_word_stays_a_word_where_another_type_would_do_too(file: Path) -> None:
    arguments = '{first: "0123", second: "no", third: {a: "12", b: 12, c: "1e3"}, fourth: "12"}'
    network = f"{{class_path: {__name__}.Labelled, init_args: {arguments}}}"
    words = with_value(file, "model.clients", f"[{{count: 4, model: {network}}}]")
    config = prepared_config(words)
    assert config["model"]["clients"][0]["model"]["init_args"] == {
        "first": "0123",
        "second": "no",
        "third": {"a": "12", "b": 12, "c": "1e3"},
        "fourth": 12,  # only a number will do
    }
    again = file.with_name("again.yaml")
    again.write_text(config_text(config))
    assert prepared_config(["fit", "--config", str(again)]) == config


def prepared_config(words: list[str]) -> dict[str, Any]:
    """What a command would write to config.yaml; nothing is made of it."""
    from lightning.pytorch.cli import LightningCLI

    from lightfed.cli.federation_cli import as_written

    found: list[dict[str, Any]] = []

    class Read(BaseException):
        pass

    def stop(self: Any) -> None:
        found.append(as_written(self._parser("fit"), self.config["fit"]))
        raise Read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LightningCLI, "instantiate_classes", stop)
        with pytest.raises(Read):
            main(words)
    return found[0]
