"""Every configuration parses and trains a round; the README's commands run."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from lightfed import cli
from tests.data.tiny import cifar10, mnist, wikitext2

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny files of the data sets that are not in the installation."""
    root = tmp_path_factory.mktemp("data")
    mnist(root, train=800, test=100)
    cifar10(root, per_batch=160)
    wikitext2(root)
    return root


def lightfed(*words: str) -> None:
    """Run a command that is expected to succeed."""
    if words[0] == "report":
        with pytest.raises(SystemExit, match="0"):
            cli.main(list(words))
    else:
        cli.main(list(words))


def small(config: Path, files: Path) -> list[str]:
    """One round of one batch, narrow models, data that is there."""
    options = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=1"]
    text = yaml.safe_load(config.read_text())
    if "root" in str(text["data"]["dataset"]):
        options.append(f"--data.dataset.init_args.root={files}")
        if text["data"]["dataset"]["class_path"] != "WikiText2":
            options.append("--data.dataset.init_args.verify_checksums=false")
    return options


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_configuration_trains_a_round(
    config: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lightfed("fit", "--config", str(config), *small(config, files))
    folder = tmp_path / "runs" / config.stem
    assert len((folder / "metrics.csv").read_text().splitlines()) == 2
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert (folder / "config.yaml").is_file()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_header_names_the_command_of_its_own_file(config: Path) -> None:
    header = [line for line in config.read_text().splitlines() if line.startswith("#")]
    command = f"lightfed fit --config {config.relative_to(ROOT)}"
    assert any(command in line for line in header)


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line[line.index("lightfed ") :] for line in lines if re.search(r"\blightfed \w+", line)]


def test_the_readmes_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, in one folder, as a newcomer would; with one rank and one batch a client."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    commands = readme_commands()
    assert len(commands) >= 6
    for command in commands:
        words = [w for w in shlex.split(command, comments=True)[1:] if w != "runs/*"]
        if words[0] == "report":
            words += [str(path) for path in sorted((tmp_path / "runs").iterdir()) if path.is_dir()]
        if words[0] == "fit":
            rounds = 2 if "--ckpt_path" in words else 1
            words = [w if w != "2" else "1" for w in words]
            words += [f"--trainer.max_epochs={rounds}", "--trainer.limit_train_batches=1"]
        lightfed(*words)
    assert "page: runs/quickstart/index.html" in capsys.readouterr().out
