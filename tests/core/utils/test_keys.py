"""One table says of every key what depends on it: resuming and reports cannot disagree."""

from copy import deepcopy
from inspect import signature
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

import lightfed as lf
from lightfed.lab.results.groups import grouped
from lightfed.lab.results.run import read
from lightfed.utils.keys import COLUMNS, KEYS, column_of, digest, experiment, flat, identity, key_of
from tests.core.data.test_digests import Drawn, Net
from tests.small import SGD_HALF, fit

SECTIONS = {"trainer": lf.FederatedTrainer, "model": lf.Federation, "data": lf.FederatedDataModule}


def test_the_table_has_every_key_and_no_other() -> None:
    named = {
        f"{section}.{name}"
        for section, owner in SECTIONS.items()
        for name in signature(owner).parameters
        if name not in ("args", "kwargs")
    }
    assert named == {key for key in KEYS if "." in key}


CONFIG = {
    "trainer": {"max_epochs": 5, "precision": "32", "devices": 1, "callbacks": []},
    "model": {
        "algorithm": {"class_path": "FedProx", "init_args": {"mu": 0.1}},
        "clients": [{"count": 3, "level": "a", "model": {"class_path": "Conv"}}],
        "side_by_side": "auto",
        "seed": 0,
    },
    "data": {
        "dataset": {"class_path": "MNIST", "init_args": {"root": "/a", "download": False}},
        "partition": {"class_path": "Iid"},
    },
}
ROOT = "data.dataset.init_args.root"
DOWNLOAD = "data.dataset.init_args.download"


def with_value(key: str, value: object) -> dict[str, Any]:
    """Return the configuration with another value for a dotted key."""
    config: Any = deepcopy(CONFIG)
    *path, last = key.split(".")
    section = config
    for step in path:
        section = section[int(step)] if isinstance(section, list) else section.setdefault(step, {})
    section[last] = value
    return config


@pytest.mark.parametrize(
    ("key", "value", "resumes", "pools"),
    [
        (DOWNLOAD, True, True, True),
        (ROOT, "/b", True, True),
        ("data.dataset.init_args.train.init_args.root", "/b", True, True),
        ("data.dataset.init_args.cropped", True, False, False),
        ("data.resident", "host", True, True),
        ("trainer.devices", 4, True, True),
        ("trainer.deterministic", True, True, True),
        ("trainer.limit_train_batches", 2, False, False),
        ("model.export", ["clients"], True, True),
        ("model.side_by_side", 8, False, False),
        ("model.pack_memory", 8, False, False),
        ("model.eval_clients", 2, False, False),
        ("model.algorithm.init_args.mu", 1.0, False, False),
        ("model.clients.0.level", "b", False, False),
        ("model.clients.0.model.init_args", {"norm": "none"}, False, False),
        ("model.lr_schedule", {"class_path": "StepLR"}, False, False),
        # another draw of the same experiment; a longer run of the same bits
        ("model.seed", 1, False, True),
        ("data.dataset.init_args.split_seed", 1, False, True),
        ("trainer.max_epochs", 9, True, False),
        ("trainer.check_val_every_n_epoch", 2, True, True),
        ("trainer.callbacks", [{"class_path": "EarlyStopping"}], True, False),
    ],
)
def test_a_key_is_of_the_run_and_of_the_experiment(
    key: str, value: object, resumes: bool, pools: bool
) -> None:
    changed = with_value(key, value)

    def experiment_of(config: dict[str, Any]) -> str:
        text: str = experiment(dict(flat(config)))["digest"]
        return text

    assert (digest(identity(changed)) == digest(identity(CONFIG))) == resumes
    assert (experiment_of(changed) == experiment_of(CONFIG)) == pools

    # What the roles promise.
    resumes_and_pools = {
        "result": (False, False),
        "seed": (False, True),
        "extent": (True, False),
        "how": (True, True),
    }
    assert resumes_and_pools[key_of(key).role] == (resumes, pools)


class Fetched(Drawn):
    """Drawn once for all; says where it would be fetched from."""

    def __init__(self, *, download: bool, scale: float = 1.0) -> None:
        super().__init__(0, scale=scale)


def test_a_run_goes_on_with_another_download_and_is_one_experiment_with_it(tmp_path: Path) -> None:
    """`last` finds the run with any `download`, and not with other samples."""
    for rounds, options in ((1, {"download": False}), (2, {"download": True})):
        made = lf.Federation(lf.FedAvg(), [lf.ClientGroup(2, Net)], optimizer=SGD_HALF, export=[])
        data = lf.FederatedDataModule(Fetched(**options), lf.Iid())
        fit(made, data, tmp_path, rounds=rounds, ckpt_path="last")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not read(tmp_path / "run").environment.get("reconfigured")
    made = lf.Federation(lf.FedAvg(), [lf.ClientGroup(2, Net)], optimizer=SGD_HALF, export=[])
    other = lf.FederatedDataModule(Fetched(download=False, scale=2.0), lf.Iid())
    fit(made, other, tmp_path, rounds=2, ckpt_path="last")
    folders = sorted(tmp_path.iterdir())
    assert [path.name for path in folders] == ["run", "run-2"]
    assert len(grouped([read(path) for path in folders])) == 2


def test_names_of_keys_in_reports() -> None:
    names = {
        "model.optimizer.init_args.lr": "lr",
        "model.optimizer.class_path": "optimizer",
        "model.clients.0.rate": "clients 0 rate",
        "data.partition.init_args.alpha": "partition alpha",
        "trainer.max_epochs": "max_epochs",
    }
    assert {key: column_of(key) for key in names} == names


def test_the_docs_list_every_key_and_column() -> None:
    pytest.importorskip("sphinx")
    page = run_path(str(Path(__file__).parents[3] / "docs" / "conf.py"))["keys_page"]()
    cells = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `")]
    assert cells == [f"`{name}`" for name in (*KEYS, *COLUMNS)]
    assert "| `model.seed` | yes | no |" in page
    assert "| `bytes_up` | metrics, clients | B |" in page
