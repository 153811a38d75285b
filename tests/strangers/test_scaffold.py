"""SCAFFOLD against recorded runs of NIID-Bench and PFLlib, and the promises."""

from functools import partial

import pytest
import torch

from lightfed.api.fleet import Fleet
from lightfed.testing import conformance
from tests.small import run_round
from tests.strangers.golden import Recorded
from tests.strangers.scaffold import Scaffold

close = partial(torch.testing.assert_close, rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", ["mlp_uniform", "mlp_server_lr"])
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = Scaffold()
    run = Recorded("scaffold", name, algorithm)
    algorithm.server_lr = run.about["server_lr"]
    algorithm.model.floats.copy_(run.row("init"))
    for t, told in enumerate(run.about["rounds"]):
        monkeypatch.setattr(Fleet, "participants", lambda self, t, who=told["active"]: sorted(who))
        run_round(run.fleet, t)
        torch.testing.assert_close(
            algorithm.model.floats, run.row(f"r{t}/server"), rtol=0, atol=3e-6
        )
        torch.testing.assert_close(algorithm.c, run.row(f"r{t}/c_server"), rtol=0, atol=3e-6)
        for client in told["active"]:
            close(algorithm.controls[client], run.row(f"r{t}/c_local/{client}"))


def test_the_promises() -> None:
    conformance(partial(Scaffold, 0.5), ranks=(1, 2))
