"""The files of configs/digits are complete, and differ from FedAvg's where their method must."""

from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "configs" / "digits"
FILES = sorted(FOLDER.glob("*.yaml"))

# Any method may have the arguments and the optimizer of its paper. Most also have a smaller network
# than FedAvg, because they cost more to train.
ANY = {"model.algorithm", "model.optimizer", "model.clients"}

# Clients of five architectures with two classes each, in the protocol of pFedMoE's rivals.
ARCHITECTURES = {
    "trainer.max_epochs", "model.fraction", "model.evaluate", "data.dataset", "data.partition",
    "data.personal_test", "data.batch_size", "data.last_batch",
}  # fmt: skip

# Batch normalization cannot train on a last batch of a single sample.
NORMALIZED = {"data.last_batch"}

# What else a method needs.
FURTHER = {
    "depthfl": NORMALIZED | {"model.lr_schedule"},
    "fedbn": NORMALIZED,
    # Twice as many rounds, because a round is a server step, and delays that make it asynchronous.
    "fedbuff": {"trainer.max_epochs", "model.devices", "model.fraction"},
    "feddyn": {"trainer.gradient_clip_val"},
    "fedgh": ARCHITECTURES,
    "fedmrl": ARCHITECTURES,
    # The method draws the number of epochs of each session.
    "fednova": {"model.local_epochs"},
    # HeteroFL's local training, as in configs/heterofl/digits.yaml.
    "fedrolex": NORMALIZED | {
        "trainer.max_epochs", "trainer.check_val_every_n_epoch", "trainer.gradient_clip_val",
        "model.lr_schedule", "model.local_epochs", "data.partition", "data.eval_batch_size",
    },
    "fedtgp": ARCHITECTURES,
    "fjord": NORMALIZED,
    # A session is a number of batches, with several steps on each.
    "pfedme": {"model.local_epochs", "model.local_steps"},
    # All clients train in every round: nothing is sent.
    "standalone": {"model.fraction"},
}  # fmt: skip


def read(path: Path) -> dict[str, dict[str, Any]]:
    config: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())
    return config


def differences(config: dict[str, dict[str, Any]]) -> set[str]:
    """The keys, such as `model.fraction`, whose values are not those of fedavg.yaml."""
    fedavg = read(FOLDER / "fedavg.yaml")
    found = set()
    for section in ("trainer", "model", "data"):
        for key in {*config[section], *fedavg[section]}:
            if config[section].get(key) != fedavg[section].get(key):
                found.add(f"{section}.{key}")
    return found


def test_the_table_names_files_that_exist() -> None:
    assert FURTHER.keys() <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_complete_and_differs_from_fedavg_only_where_its_method_must(path: Path) -> None:
    config = read(path)
    assert config.keys() == {"trainer", "model", "data"}
    further = differences(config) - ANY
    assert further == FURTHER.get(path.stem, set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_named_after_the_method_that_it_trains(path: Path) -> None:
    algorithm = read(path)["model"]["algorithm"]
    name = algorithm if isinstance(algorithm, str) else algorithm["class_path"]
    assert name.lower() == path.stem


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_clients_of_one_architecture_are_twenty(path: Path) -> None:
    clients = read(path)["model"]["clients"]
    expected = 10 if FURTHER.get(path.stem) == ARCHITECTURES else 20
    assert sum(group["count"] for group in clients) == expected
