"""Every algorithm of this folder runs from a configuration that names it by its dotted path."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import lightfed
from lightfed.cli.command_line import main
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from tests.small import fleet_of, random_data, run_round
from tests.strangers import ditto, fedrolex

QUIET = {"enable_progress_bar": False, "enable_page": False}
CONV: dict[str, Any] = {"class_path": "Conv", "init_args": {"hidden": [4]}}


@pytest.mark.parametrize(
    ("algorithm", "arguments", "levels"),
    [("ditto.OwnDitto", {"lam": 0.5}, "a"), ("fedrolex.OwnFedRolex", {"weights": "samples"}, "ab")],
)
def test_an_algorithm_outside_the_package(
    algorithm: str,
    arguments: dict[str, Any],
    levels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "trainer": {"max_epochs": 1, "accelerator": "cpu"} | QUIET,
        "model": {
            "algorithm": {"class_path": f"tests.strangers.{algorithm}", "init_args": arguments},
            "clients": [{"count": 2, "level": level, "model": CONV} for level in levels],
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
    assert len(metrics.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("own", "packaged"),
    [(ditto.OwnDitto, lightfed.Ditto), (fedrolex.OwnFedRolex, lightfed.FedRolex)],
)
def test_it_gives_the_bits_of_the_packaged_one(own: Any, packaged: Any) -> None:
    models = []
    for make in (own, packaged):
        groups = [ClientGroup(3, partial(MLP, hidden=(6,)))]
        fed = fleet_of(groups, make(), random_data([5, 9, 4]), clients_per_round=2)
        for t in range(2):
            run_round(fed, t)
        models.append(torch.stack([fed.row(k).floats for k in fed.participants(1)]))
    assert torch.equal(*models)
