"""FedBuff against recorded runs of FLSim, and the promises."""

from functools import partial

import pytest
import torch

from lightfed.simulation.clock import VirtualClock
from lightfed.testing import conformance
from tests.small import run_round
from tests.strangers.fedbuff import FedBuff
from tests.strangers.golden import RANKS, Recorded

close = partial(torch.testing.assert_close, rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", ["mlp_poly_sum", "mlp_constant_momentum"])
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = FedBuff(buffer=2)
    run = Recorded("fedbuff", name, algorithm)
    algorithm.exponent = run.about["staleness_weight"]["exponent"] or 0.0
    algorithm.beta = run.about["server"]["momentum"]
    # FLSim sums where the paper divides by K, and its weights are 1 at a staleness of 1.
    algorithm.server_lr = run.about["server"]["lr"] * 2 * 2**algorithm.exponent
    algorithm.model.floats.copy_(run.row("init"))
    uploads = [upload["client"] for upload in run.about["uploads"]]

    def advance(clock: VirtualClock, _: object) -> list[int]:
        """The recorded clients are the first."""
        first = sorted(uploads[:2])
        del uploads[:2]
        clock.free.fill_(False)
        clock.free[first] = True
        return first

    monkeypatch.setattr(VirtualClock, "advance", advance)
    for t, step in enumerate(run.about["server_steps"]):
        if not step["flush"]:  # the last one, of a buffer that is not full
            run_round(run.fleet, t)
            close(algorithm.model.floats, run.row(f"r{t}/server"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", RANKS)
def test_the_promises(ranks: tuple[int, ...]) -> None:
    conformance(partial(FedBuff, 3, beta=0.5), ranks=ranks)
