"""What a user does in a folder of their own, without the repository."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightfed.cli.catalog import without_namesakes
from lightfed.cli.command_line import main, prepared
from lightfed.cli.errors import class_error
from lightfed.cli.federation_cli import run_name
from lightfed.lab import study
from lightfed.runs.run_folder import RunFolder
from tests.lab.test_study import STUDY
from tests.promises.refusals.mistakes import edited

SMALL = {"model.algorithm": "FedAvg", "model.optimizer.init_args.lr": 0.1}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_study_is_a_file_of_ones_own(folder: Path) -> None:
    path = folder / "own" / "mine.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(STUDY))
    read = study.read_study("own/mine.yaml")
    assert read.title == STUDY["title"]
    methods = study.methods_of("own/mine.yaml", read, "short")
    assert all(f"--trainer.name=mine-short-{method.name}" in method.words for method in methods)
    assert study.digest("own/mine.yaml") == study.digest(str(path))


def test_the_scripts_for_slurm_can_be_copied(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["slurm", "copy"])
    assert ended.value.code == 0
    assert (folder / "slurm" / "sweep.sbatch").is_file()
    assert (folder / "slurm" / "train.sbatch").is_file()
    assert (folder / "slurm" / "logs").is_dir()
    assert "PATH=" in (folder / "slurm" / "site.sh").read_text()

    with pytest.raises(SystemExit) as ended:
        main(["slurm", "copy"])
    assert ended.value.code == 2
    assert "slurm exists" in capsys.readouterr().err


def test_a_short_name_is_that_of_lightfeds_own_class() -> None:
    paths = ["torchvision.ops.misc.MLP", "lightfed.networks.mlp.MLP", "other.Net"]
    assert without_namesakes(paths) == paths[1:]


def test_mlp_means_lightfeds_own(folder: Path) -> None:
    groups = [{"count": 2, "model": {"class_path": "MLP"}}]
    (folder / "run.yaml").write_text(edited({**SMALL, "model.clients": groups}))
    config: Any = prepared(["fit", "--config", "run.yaml"]).trainer.config  # type: ignore[union-attr]
    assert config["model"]["clients"][0]["model"]["class_path"] == "lightfed.MLP"


def test_a_plan_is_of_one_rank_by_default(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [{"count": 2, "model": {"class_path": "Conv", "init_args": {"hidden": [4]}}}]
    (folder / "run.yaml").write_text(edited({**SMALL, "model.clients": groups}))
    main(["plan", "--config", "run.yaml"])
    assert "on 1 rank" in capsys.readouterr().out


def test_a_missing_tensorboard_is_named_with_its_extra() -> None:
    error = ModuleNotFoundError(
        "Neither `tensorboard` nor `tensorboardX` is available. Try `pip install`ing either."
    )
    refused = class_error(error)
    assert refused is not None
    assert refused.key == "trainer.logger"
    assert "pip install tensorboard" in refused.fix


def test_a_name_that_another_method_has_taken_is_told_apart(folder: Path) -> None:
    def named(method: str) -> str:
        place = RunFolder(folder, "mine")
        place.method = method
        name = place._create()
        (folder / name / "environment.json").write_text(f'{{"algorithm": "{method}"}}')
        return name

    methods = ("FedAvg", "FedProx", "FedAvg", "FedProx")
    names = [named(method) for method in methods]
    assert names == ["mine", "fedprox-mine", "mine-2", "fedprox-mine-2"]


@pytest.mark.parametrize(
    ("file", "method", "name"),
    [
        ("mine.yaml", "FedAvg", "mine"),
        ("configs/quickstart.yaml", "HeteroFL", "quickstart"),
        ("configs/digits/fedavg.yaml", "FedAvg", "fedavg-digits"),
        ("configs/digits/fedprox.yaml", "FedProx", "fedprox-digits"),
        ("configs/digits/fedavg.yaml", "FedProx", "fedprox-digits"),
        ("configs/heterofl/mnist.yaml", "HeteroFL", "heterofl-mnist"),
        ("digits/try7.yaml", "FedAvg", "try7"),  # no test has an algorithm of this name
        ("mine/fedavg.yaml", "FedAvg", "fedavg"),
        ("configs/dispfl/digits-fedavg.yaml", "FedAvg", "digits-fedavg"),
        ("configs/fedbcd/digits-i.yaml", "FedBCDI", "fedbcdi-digits-i"),
        ("configs/fedbcd/digits-fedprox.yaml", "CloudFedAvg", "digits-fedprox"),
        ("mine/digits-other.yaml", "Other", "digits-other"),
        ("configs/devices/digits-fedbuff.yaml", "FedBuff", "digits-fedbuff"),
        ("configs/lora/base.yaml", "FedAvg", "base"),
    ],
)
def test_a_run_is_named_by_its_file_and_in_configs_by_method_and_data(
    file: str, method: str, name: str
) -> None:
    assert run_name(Path(file), method) == name


def test_runs_of_two_shipped_methods_say_which_is_which(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    named = []
    for method in ("fedavg", "fedprox"):
        made = prepared(["fit", "--config", f"lightfed:digits/{method}"])
        assert made.trainer.run_logger is not None
        named.append(made.trainer.run_logger.place.base)
    assert named == ["fedavg-digits", "fedprox-digits"]
