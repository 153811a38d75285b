"""Run folders of FlexiFed's strategies with known courses, as the command line writes its files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]

from lightfed.lab.results.run import Run, read
from tests.lab.report.make_run import write_run

DEPTHS = (11, 13, 16, 19)
STEPS = (0.0, 0.01, 0.02, 0.03)
OPTIONS: dict[str, dict[str, Any]] = {
    "MaxCommon": {"max_common_layers": None, "share_classifier": False, "initial": "own"},
    "Standalone": {},
}


def strategy_run(
    root: Path,
    strategy: str,
    course: Sequence[float] | np.ndarray,
    *,
    seed: int = 0,
    name: str = "",
    versions: Sequence[int] = DEPTHS,
    counts: int | Sequence[int] = 2,
    options: Mapping[str, Any] | None = None,
    family: str = "VGG",
    data: str = "CIFAR10",
    partition: str = "Iid",
    batch_size: int = 64,
    metric: str = "accuracy",
    **changes: Any,
) -> Run:
    """A run whose mean over all clients is `course`; version i lies `STEPS[i]` above the first.

    Its name is the strategy by default, with the seed. `versions` are depths of the models, a
    client group each, and `counts` the clients of each, or one number for all. `options` are of
    the algorithm, and `changes` of what `write_run` is given.
    """
    each = [counts] * len(versions) if isinstance(counts, int) else list(counts)
    client_groups = dict(zip([f"{family}-{depth}" for depth in versions], each, strict=True))
    given = OPTIONS.get(strategy, {"initial": "own"}) | dict(options or {})
    algorithm = {"class_path": f"lightfed.algorithms.{strategy}"}
    config = {
        "trainer": {"name": f"{name or strategy}-s{seed}", "max_epochs": len(course), "devices": 1},
        "model": {
            "algorithm": algorithm | ({"init_args": given} if given else {}),
            "clients": [
                {
                    "count": count,
                    "model": {
                        "class_path": f"lightfed.models.{family}",
                        "init_args": {"num_classes": 10, "depth": version, "width": 1.0},
                    },
                    "name": client_group,
                }
                for version, (client_group, count) in zip(
                    versions, client_groups.items(), strict=True
                )
            ],
            "seed": seed,
        },
        "data": {
            "dataset": {"class_path": f"lightfed.data.{data}"},
            "partition": {"class_path": f"lightfed.data.{partition}"},
            "batch_size": batch_size,
        },
    }
    means = np.asarray(course, dtype=float)
    above = np.array(STEPS[: len(versions)])
    columns = {f"personal/{metric}": means}
    if len(versions) > 1:  # as an evaluation writes them
        first = means - (above * each).sum() / sum(each)
        for client_group, step in zip(client_groups, above, strict=True):
            columns[f"personal/{metric}/{client_group}"] = first + step
    environment = {
        "name": f"{name or strategy}-s{seed}",
        "algorithm": strategy,
        "dataset": data,
        "clients": sum(each),
        "groups": client_groups,
        "parameters": dict.fromkeys(client_groups, 1000),
        "seed": seed,
        "synthetic": False,
    }
    files = {
        "metrics": {key: values.tolist() for key, values in columns.items()},
        "environment": environment | changes.pop("stated", {}),
        "config": yaml.safe_dump(config, sort_keys=False),
        "evaluations": None,
        "counts": None,
    }
    return read(write_run(root / f"{name or strategy}-s{seed}", **{**files, **changes}))
