"""Every algorithm of this folder runs from a configuration that names it by its dotted path."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightfed.cli.command_line import main

CONV: dict[str, Any] = {"class_path": "Conv", "init_args": {"hidden": [4]}}
DEPTHS: dict[str, Any] = {"class_path": "tests.strangers.test_depthfl.Convolutions"}


@pytest.mark.parametrize(
    ("algorithm", "arguments", "levels", "network"),
    [
        ("depthfl.DepthFL", {}, "ab", DEPTHS),
        ("ditto.Ditto", {"lam": 0.5}, "a", CONV),
        ("fedbuff.FedBuff", {"buffer": 2}, "a", CONV),
        ("fedrep.FedRep", {"head": "net.blocks.6."}, "a", CONV),
        ("fedrolex.FedRolex", {"weights": "samples"}, "ab", CONV),
        ("scaffold.Scaffold", {"server_lr": 0.5}, "a", CONV),
    ],
)
def test_an_algorithm_outside_the_package(
    algorithm: str,
    arguments: dict[str, Any],
    levels: str,
    network: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False},
        "model": {
            "algorithm": {"class_path": f"tests.strangers.{algorithm}", "init_args": arguments},
            "clients": [{"count": 2, "level": level, "model": network} for level in levels],
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05}},
        },
        "data": {
            "dataset": "Digits",
            "partition": {"class_path": "Dirichlet", "init_args": {"alpha": 0.5}},
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "run.yaml"])
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert len(metrics.read_text().splitlines()) == 3
