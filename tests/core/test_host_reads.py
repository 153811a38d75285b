"""Sessions and tests of clients do not wait for a device: no value of a tensor is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightfed.engine.evaluation import Evaluation
from lightfed.local.packed.rules import Packed
from tests.core.host_reads import host_reads, within_sessions
from tests.core.packs import Smooth, after, fleet

NAMES = [
    "clipped", "momentum", "static bn",
    *(pytest.param(name, marks=pytest.mark.matrix)
      for name in ("fedprox", "dropout", "bn", "gn", "vmap", "phases")),
]  # fmt: skip


@pytest.mark.parametrize("side_by_side", ["off", 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_session_reads_nothing(name: str, side_by_side: Any) -> None:
    with host_reads() as reads:
        after(fleet(name, side_by_side))
    assert reads == []


@pytest.mark.parametrize("name", ["mlp", "standalone", "static bn"])
def test_an_evaluation_of_many_clients_reads_nothing(name: str) -> None:
    made = fleet(name, 3)
    after(made, rounds=1)
    evaluation = Evaluation(made, made.data, kinds=("local", "personal"), packed=Packed(3))
    evaluation.start()
    with host_reads() as reads:
        for job in evaluation.jobs:
            evaluation.run(job)
    evaluation.finish()
    assert reads == []


class Curious(Smooth):
    """Looks at its loss and at how many samples have some labels."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        x, y = batch
        if loss > 0 and loss.tolist() and len(x[y > 0]):
            loss.detach().cpu()
        return loss


def test_reads_are_seen() -> None:
    with host_reads() as reads:
        after(fleet("mlp", "off", model=Curious), rounds=1)
    assert {read.split()[0] for read in reads} == {
        "aten._local_scalar_dense.default", "tolist", "aten.index.Tensor", "cpu",
    }  # fmt: skip


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("side_by_side", ["off", 3])
@pytest.mark.parametrize("name", ["momentum", "clipped", "gn"])
def test_a_session_on_a_gpu_does_not_wait(name: str, side_by_side: Any) -> None:
    made = fleet(name, side_by_side, device=torch.device("cuda"))
    after(made, rounds=1)  # compiles, and allocates
    with within_sessions(waiting_is_an_error):
        after(made, rounds=1)
