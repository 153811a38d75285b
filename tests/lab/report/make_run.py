"""Run folders with known figures, written as a run writes them."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml  # type: ignore[import-untyped]
from safetensors.numpy import save_file

from lightfed.lab.drawing.marks import Chart, Figure
from lightfed.utils.keys import experiment, flat

METRICS = {
    "train_loss": (2.0, 1.0, 0.5),
    "global/accuracy": (0.5, "", 0.75),
    "global/loss": (1.5, "", 0.8),
    "personal/accuracy": (0.55, "", 0.65),
    "personal/accuracy_std": (0.05, "", 0.25),
    "personal/accuracy_worst10": (0.4, "", 0.3),
    "personal/loss": (1.2, "", 0.9),
    "personal/accuracy/a": (0.6, "", 0.9),
    "personal/accuracy/b": (0.5, "", 0.4),
    "bytes_up": (1000, 1000, 1000),
    "bytes_down": (2000, 2000, 2000),
    "flops": (4e9, 4e9, 4e9),
    "wire_bytes": (0, 0, 0),
    "participants": (4, 4, 4),
    "excluded": (0, 0, 1),
    "seconds": (2.0, 1.0, 1.5),
    "lr-SGD": (0.125, 0.125, 0.125),
}
CLIENTS = "round,client,group,samples,accuracy,loss,bytes_up,bytes_down,flops"
EVALUATIONS = (
    (1, 0, "a", 30, 0.7, 1.0, 250, 500, 1e9),
    (1, 1, "a", 20, 0.5, 1.0, 250, 500, 1e9),
    (1, 2, "b", 10, 0.6, 1.0, 250, 500, 1e9),
    (1, 3, "b", 5, 0.4, 1.0, 250, 500, 1e9),
    (3, 0, "a", 30, 1.0, 0.5, 1000, 2000, 4e9),
    (3, 1, "a", 20, 0.8, 0.7, 1000, 2000, 4e9),
    (3, 2, "b", 10, 0.5, 1.1, 500, 1000, 2e9),
    (3, 3, "b", 5, 0.3, 1.3, 500, 1000, 2e9),
)
COSTS = ((2000, 4000, 8e9), (1000, 2000, 4e9))  # of each group: bytes up, down, FLOPs
COUNTS = np.array([[20, 10, 0], [0, 5, 15], [10, 0, 0], [0, 0, 5]])
ENVIRONMENT = {
    "name": "known",
    "algorithm": "HeteroFL",
    "dataset": "Digits",
    "clients": 4,
    "groups": {"a": 2, "b": 2},
    "rounds": 3,
    "seed": 7,
    "ranks": 2,
    "synthetic": False,
    "versions": {"torch": "2.12.1"},
}
CONFIG = "seed_everything: 7\ndata:\n  name: Digits\n  batch_size: 32\n"


def write_run(
    folder: Path,
    *,
    metrics: Mapping[str, Sequence[Any]] = METRICS,
    environment: Mapping[str, Any] | None = ENVIRONMENT,
    config: str | None = CONFIG,
    evaluations: Sequence[Sequence[Any]] | None = EVALUATIONS,
    costs: Sequence[Sequence[float]] | None = COSTS,
    counts: np.ndarray | None = COUNTS,
    classes: Sequence[str] = ("zero", "one", "two"),
    client_columns: str = CLIENTS,
) -> Path:
    """Writes a run folder; None leaves a file out."""
    folder.mkdir(parents=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["round", *metrics])
        rows.writerows([i + 1, *row] for i, row in enumerate(zip(*metrics.values(), strict=True)))
    if evaluations is not None:
        with (folder / "clients.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(client_columns.split(","))
            rows.writerows(evaluations)
    if evaluations is not None and costs is not None:
        np.savez(folder / "costs.npz", round=np.array(evaluations[-1][0]), sums=np.array(costs))
    if environment is not None:
        stated = dict(environment)
        if config is not None:
            stated = {"experiment": recorded(config), **stated}
        (folder / "environment.json").write_text(json.dumps(stated))
    if config is not None:
        (folder / "config.yaml").write_text(config)
    if counts is not None:
        write_partition(folder, counts, classes=classes)
    return folder


def recorded(config: str) -> dict[str, Any]:
    """What environment.json says of the experiment; a configuration that is no mapping has none."""
    values = yaml.load(config, Loader=yaml.BaseLoader)
    return experiment(dict(flat(values)) if isinstance(values, dict) else {})


def write_partition(folder: Path, counts: np.ndarray, *, classes: Sequence[str]) -> None:
    meta = {"scheme": "Shards(2)", "seed": 7, "dataset": "Digits", "classes": list(classes)}
    np.savez(
        folder / "partition.npz",
        train_counts=counts.astype(np.int32),
        test_counts=counts.astype(np.int32),
        meta=np.array(json.dumps(meta)),
    )


def write_masks(folder: Path, masks: Mapping[int, np.ndarray]) -> None:
    """Masks of clients, (P,) bool each, P a multiple of 32: bit i of word w is `mask[32 w + i]`."""
    (folder / "masks").mkdir()
    for client, mask in masks.items():
        words = np.packbits(mask, bitorder="little").view("<i4").astype(np.int32)
        save_file({"mask": words}, folder / "masks" / f"client{client}.safetensors")


def write_gates(folder: Path, personal: np.ndarray, *, number: int = 3) -> None:
    """Mean weights of the private experts, (clients, classes), those of the shared one the rest."""
    own = personal.astype(np.float32)
    np.savez(folder / "gate.npz", round=np.array(number), general=1 - own, personal=own)


def rows_of(table: pd.DataFrame) -> tuple[tuple[str, ...], ...]:
    """The cells of a table of text."""
    return tuple(table.itertuples(index=False, name=None))


def drawn(chart: Chart) -> dict[str, list[tuple[Any, Any]]]:
    """The points of each series, rounded."""
    return {
        str(name): [(x, round(y, 6)) for x, y in zip(own["x"], own["y"], strict=True)]
        for name, own in chart.data.groupby("series", sort=False)
    }


def by_title(figure: Figure | None) -> dict[str, Chart]:
    assert figure is not None
    return {chart.title: chart for chart in figure.charts}


def append(path: Path, text: str) -> None:
    with path.open("a", newline="") as file:
        file.write(text)
