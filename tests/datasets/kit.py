"""What tests of data sets share: a module that is ready, and the line of an error."""

from collections.abc import Callable
from typing import Any

import pytest

from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.dataset import Dataset
from lightfed.data.partition.schemes import Iid, Partitioner
from lightfed.utils.errors import UserError
from tests.small import CPU

INIT = "data.dataset.init_args"


def prepared(
    dataset: Dataset,
    partition: Partitioner | None = None,
    *,
    clients: int = 2,
    seed: int = 0,
    **given: Any,
) -> FederatedDataModule:
    """The data of a run; by default every client has as much."""
    data = FederatedDataModule(dataset, partition or Iid(), **given)
    data.prepare(clients=clients, seed=seed, device=CPU)
    return data


def refused(key: str, make: Callable[..., object], *args: Any, **given: Any) -> str:
    """What is said, in one line, of an argument of the data set."""
    with pytest.raises(UserError) as error:
        make(*args, **given)
    assert error.value.key == f"{INIT}.{key}"
    assert "\n" not in str(error.value)
    return str(error.value)
