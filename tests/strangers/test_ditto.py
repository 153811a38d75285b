"""Ditto against a recorded run of PFLlib, and the promises."""

from functools import partial

import pytest
import torch

from lightfed.testing import conformance
from tests.strangers.ditto import Ditto
from tests.strangers.golden import MATRIX, Recorded

close = partial(torch.testing.assert_close, rtol=0, atol=3e-6)


def test_the_recorded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = Ditto(weights="samples", epochs=2)
    run = Recorded("ditto", "mlp_epochs_samples", algorithm)
    algorithm.lam = run.about["lam"]
    algorithm.model.floats.copy_(run.row("init"))
    for client in range(run.fleet.clients):
        run.fleet.row(client).floats.copy_(run.row("init"))
    for t, clients in run.rounds(monkeypatch):
        close(algorithm.model.floats, run.row(f"r{t}/server"))
        for client in clients:
            close(run.fleet.row(client).floats, run.row(f"r{t}/personal/{client}"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", MATRIX)
def test_the_promises(ranks: tuple[int, ...]) -> None:
    conformance(partial(Ditto, 0.5), ranks=ranks)
