"""Ditto against a recorded run of PFLlib, and the promises."""

from functools import partial

import pytest
import torch

from lightfed.api.fleet import Fleet
from lightfed.testing import conformance
from tests.small import run_round
from tests.strangers.ditto import Ditto
from tests.strangers.golden import Recorded

close = partial(torch.testing.assert_close, rtol=0, atol=3e-6)


def test_the_recorded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = Ditto(weights="samples", epochs=2)
    run = Recorded("ditto", "mlp_epochs_samples", algorithm)
    algorithm.lam = run.about["lam"]
    algorithm.model.floats.copy_(run.row("init"))
    for client in range(run.fleet.clients):
        run.fleet.row(client).floats.copy_(run.row("init"))
    for t, told in enumerate(run.about["rounds"]):
        monkeypatch.setattr(Fleet, "participants", lambda self, t, who=told["active"]: sorted(who))
        run_round(run.fleet, t)
        close(algorithm.model.floats, run.row(f"r{t}/server"))
        for client in told["active"]:
            close(run.fleet.row(client).floats, run.row(f"r{t}/personal/{client}"))


def test_the_promises() -> None:
    conformance(partial(Ditto, 0.5), ranks=(1, 2))
