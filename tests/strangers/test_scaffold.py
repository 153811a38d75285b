"""SCAFFOLD against recorded runs of NIID-Bench and PFLlib, and the promises."""

from functools import partial

import pytest
import torch

from lightfed.testing import conformance
from tests.strangers.golden import MATRIX, Recorded
from tests.strangers.scaffold import Scaffold

close = partial(torch.testing.assert_close, rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", ["mlp_uniform", "mlp_server_lr"])
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = Scaffold()
    run = Recorded("scaffold", name, algorithm)
    algorithm.server_lr = run.about["server_lr"]
    algorithm.model.floats.copy_(run.row("init"))
    for t, clients in run.rounds(monkeypatch):
        close(algorithm.model.floats, run.row(f"r{t}/server"))
        close(algorithm.c, run.row(f"r{t}/c_server"))
        for client in clients:
            close(algorithm.controls[client], run.row(f"r{t}/c_local/{client}"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", MATRIX)
def test_the_promises(ranks: tuple[int, ...]) -> None:
    conformance(partial(Scaffold, 0.5), ranks=ranks)
