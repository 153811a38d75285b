"""The configurations of a paper are of one protocol: its methods differ in what a method is."""

from pathlib import Path
from typing import Any

import pytest
import yaml

CONFIGS = Path(__file__).parents[2] / "configs"
FEDBCD = sorted(name for name in (CONFIGS / "fedbcd").glob("*.yaml") if "figure" not in name.stem)
FLEXIFED = [
    *("cifar10-vgg", "cifar10-resnet", "cinic10-vgg", "cinic10-resnet"),
    *("agnews-charcnn", "agnews-vdcnn", "speech-vgg", "speech-resnet"),
]
CLOUDS = ["-fedavg", "-fedprox", "", "-i", "-standalone"]
RIVALS = ["", "-fml", "-fedkd", "-fedapen", "-fd", "-fedproto", "-lgfedavg", "-standalone"]


def read(paper: str, name: str) -> Any:
    return yaml.safe_load((CONFIGS / paper / f"{name}.yaml").read_text())


@pytest.mark.parametrize("path", FEDBCD, ids=lambda path: path.stem)
def test_a_hundred_devices_of_ten_servers_are_tested_on_their_classes(path: Path) -> None:
    config = read("fedbcd", path.stem)
    algorithm = config["model"]["algorithm"]["init_args"]
    assert [group["count"] for group in config["model"]["clients"]] == [100]
    assert not {"servers", "active", "steps", "unit"} & set(algorithm)  # the paper's
    alone = path.stem.endswith("-standalone")
    assert algorithm.get("gamma") == (0.0 if alone else None)
    devices = config["model"]["devices"]
    assert devices["delay"] == devices["step_delay"]
    assert config["data"]["personal_test"] == "labels"
    assert config["data"]["batch_size"] == 32
    assert config["model"]["optimizer"]["init_args"]["lr"] == 0.005
    assert config["trainer"]["max_epochs"] % config["trainer"]["check_val_every_n_epoch"] == 0


@pytest.mark.parametrize("data", ["digits", "mnist", "cifar10"])
def test_methods_in_clouds_differ_in_algorithm_and_optimizer_alone(data: str) -> None:
    configs = [read("fedbcd", f"{data}{method}") for method in CLOUDS]
    for config in configs:
        del config["model"]["algorithm"]
        del config["model"]["optimizer"]
    assert all(config == configs[0] for config in configs)


@pytest.mark.parametrize("name", FLEXIFED)
def test_the_rows_of_flexifeds_table_are_of_one_protocol(name: str) -> None:
    config = read("flexifed", name)
    assert [group["count"] for group in config["model"]["clients"]] == [2, 2, 2, 2]
    assert config["model"]["local_epochs"] == config["data"]["chunks"] == 10
    assert config["data"]["batch_size"] == 64
    assert config["data"]["partition"] == {"class_path": "Iid", "init_args": {"parts": 20}}
    assert config["data"]["personal_test"] == "random"
    optimizer = config["model"]["optimizer"]["init_args"]
    assert optimizer == {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.0005}


@pytest.mark.parametrize("data", ["cifar10", "digits"])
def test_pfedmoes_rivals_differ_in_algorithm_and_learning_rate_alone(data: str) -> None:
    configs = []
    for method in RIVALS:
        config = read("pfedmoe", f"{data}{method}")
        config["model"].pop("algorithm")
        config["model"]["optimizer"]["init_args"].pop("lr")
        configs.append(config)
    assert all(config == configs[0] for config in configs)


def test_client_k_has_cnn_k_mod_five() -> None:
    groups = read("pfedmoe", "cifar10")["model"]["clients"]
    assert [group["model"]["init_args"]["variant"] for group in groups] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["cifar10", "cifar10-practical", "cifar100"])
def test_samples_and_clipping_are_those_of_pfedmoes_authors(name: str) -> None:
    config = read("pfedmoe", name)
    assert config["data"]["dataset"]["init_args"]["preset"] == "pfedmoe"
    assert config["trainer"]["gradient_clip_algorithm"] == "network"
