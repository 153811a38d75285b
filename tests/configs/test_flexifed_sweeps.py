"""FlexiFed's sweep lists are complete, and a line means what its study says."""

import json
import re
from itertools import product
from typing import Any

import pytest
import yaml

from tests.configs.test_sweeps import ROOT, commands, lines, parser

__all__ = ["parser"]

FOLDER = ROOT / "configs" / "flexifed"
STRATEGIES = ["Standalone", "ClusteredFL", "BasicCommon", "ClusteredCommon", "MaxCommon"]
ROWS = [
    *("cifar10-vgg", "cifar10-resnet", "cinic10-vgg", "cinic10-resnet"),
    *("agnews-charcnn", "agnews-vdcnn", "speech-vgg", "speech-resnet"),
]
FIGURES = ["cifar10-vgg", "cinic10-vgg", "agnews-vdcnn", "speech-resnet"]


def groups_of(config: str) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load((FOLDER / f"{config}.yaml").read_text())["model"][
        "clients"
    ]
    return groups


@pytest.mark.parametrize("config", ROWS)
def test_the_rows_are_of_one_protocol(config: str) -> None:
    written = yaml.safe_load((FOLDER / f"{config}.yaml").read_text())
    assert [group["count"] for group in groups_of(config)] == [2, 2, 2, 2]
    assert written["model"]["local_epochs"] == written["data"]["chunks"] == 10
    assert written["data"]["batch_size"] == 64
    assert written["data"]["partition"] == {"class_path": "Iid", "init_args": {"parts": 20}}
    assert written["data"]["personal_test"] == "random"
    optimizer = written["model"]["optimizer"]["init_args"]
    assert optimizer == {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.0005}


def test_the_table_has_every_strategy_in_every_row() -> None:
    found = lines("flexifed", "table")
    assert [(config, given["--model.algorithm"]) for config, given in found] == [
        *product(ROWS, STRATEGIES)
    ]
    for config, given in found:
        assert given.keys() == {"--model.algorithm", "--trainer.name"}
        assert given["--trainer.name"].startswith(f"{config}-")


def test_clients_of_few_classes_hold_two_of_forty_shards(parser: Any) -> None:
    """The scheme takes the place of the configuration's, and nothing of that one is left."""
    found = commands(FOLDER / "noniid.sweep")
    strategies = [(words[2], words[words.index("--model.algorithm") + 1]) for words in found]
    assert strategies == [
        (f"configs/flexifed/{config}.yaml", strategy)
        for config, strategy in product(FIGURES, ("ClusteredFL", "MaxCommon"))
    ]
    assert len({re.sub(r".*--data.partition S", "", " ".join(words)) for words in found}) == 1
    words = found[0]
    parsed = parser.parse_args([*words[:2], str(ROOT / words[2]), *words[3:]]).fit
    assert parsed.data.partition.class_path == "lightfed.Shards"
    assert vars(parsed.data.partition.init_args) == {"per_client": 2, "parts": 20}
    assert parsed.model.algorithm.class_path.endswith(".ClusteredFL")
    assert parsed.model.algorithm.init_args.initial == "own"


def test_two_clients_are_unlike_and_train_together_or_alone() -> None:
    found = [
        (config, given["--model.algorithm"], given["--model.clients"])
        for config, given in lines("flexifed", "two-clients")
    ]
    assert [one[:2] for one in found] == [*product(FIGURES, ("Standalone", "MaxCommon"))]
    for config, _, text in found:
        first, *_, last = groups_of(config)
        assert json.loads(text) == [{**first, "count": 1}, {**last, "count": 1}]
