"""On a CUDA device: the federations of the kit train, in every precision and store."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightfed.testing.digest import digest, fit
from tests.promises.conformance.cases import CASES, Case

pytestmark = pytest.mark.gpu


def trained(case: Case, folder: Path, **flags: object) -> dict[str, float]:
    trainer, federation = fit(case, folder, rounds=8, accelerator="gpu", **flags)
    assert not torch.distributed.is_initialized()  # one rank needs no group; nccl.py gives it one
    assert all(v.isfinite().all() for v in federation.state_dict().values())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_case_trains_and_repeats_its_bits(name: str, tmp_path: Path) -> None:
    digests = []
    for run in ("a", "b"):
        ended = fit(CASES[name], tmp_path / run, accelerator="gpu")
        digests.append(digest(*ended))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("store", ["device", "host"])
@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_precisions_and_stores_learn(precision: str, store: str, tmp_path: Path) -> None:
    case = CASES["heterofl"]
    case = replace(case, federation=case.federation | {"store": store, "local_epochs": 4})
    assert trained(case, tmp_path, precision=precision)["global/accuracy"] > 0.3


def test_host_rows_give_the_bits_of_device_rows(tmp_path: Path) -> None:
    case = CASES["standalone"]
    host = replace(case, federation=case.federation | {"store": "host"})
    kept = digest(*fit(case, tmp_path / "device", accelerator="gpu"))
    assert digest(*fit(host, tmp_path / "host", accelerator="gpu")) == kept
