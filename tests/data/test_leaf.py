"""Natural owners end to end: LEAF's writers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]

from lightfed.cli import command_line
from lightfed.results.run import Run, read
from tests.data import tables
from tests.small import quiet

SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}


def trained(
    dataset: dict[str, Any], model: dict[str, Any], optimizer: dict[str, Any], rounds: int = 1
) -> Run:
    """Three clients, one of each owner or two, trained by the command."""
    config = {
        "trainer": {"max_epochs": rounds, "accelerator": "cpu", "enable_progress_bar": False},
        "model": {
            "algorithm": "FedAvg",
            "clients": [{"count": 3, "model": model}],
            "optimizer": optimizer,
        },
        "data": {"dataset": dataset, "partition": "Natural", "batch_size": 8},
    }
    Path("natural.yaml").write_text(yaml.safe_dump(config))
    quiet()
    command_line.main(["fit", "--config", "natural.yaml"])
    return read(Path("runs/natural"))


@pytest.mark.parametrize("form", ["leaf", "parquet"])
def test_a_client_per_writer(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    users: dict[str, Any] = {
        f"f{k:04}_{k:02}": (
            rng.random((6 + k, 784)).round(2).tolist(),
            [i % 3 for i in range(6 + k)],
        )
        for k in range(3)
    }
    dataset: dict[str, Any] = {"path": "femnist", "features": "x", "shape": [1, 28, 28]}
    tables.leaf(tmp_path / "femnist", train=users, test=users)
    if form == "parquet":
        rows = [
            {"x": x, "y": y, "user": user}
            for user, (xs, ys) in users.items()
            for x, y in zip(xs, ys, strict=True)
        ]
        datasets.Dataset.from_list(rows).to_parquet("femnist.parquet")
        dataset |= {"path": "femnist.parquet", "test": 0.25}
    hub = {"class_path": "Hub", "init_args": dataset | {"group": "user"}}
    conv = {"class_path": "Conv", "init_args": {"hidden": [4]}}
    run = trained(hub, conv, SGD)
    with np.load(run.folder / "partition.npz") as split:
        sizes = np.diff(split["train_offsets"]).tolist()
        classes = split["train_counts"].sum(1).tolist()
    given = [len(y) for _, y in users.values()]
    assert sizes == (given if form == "leaf" else [5, 5, 5])  # of 21, or 15 that are not held out
    assert classes == sizes
    assert len(run.clients.query("round == 1")) == 3
