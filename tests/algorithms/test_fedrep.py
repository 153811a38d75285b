"""FedRep against recorded runs of its released code and PFLlib."""

from collections.abc import Iterable

import pytest
from torch import nn
from torch.optim import SGD, Optimizer

from lightfed.algorithms.fedper import FedPer
from lightfed.algorithms.fedrep import FedRep
from lightfed.api.fleet import Fleet
from lightfed.local.local_work import LocalWork, Phase
from tests.algorithms.recorded import Recorded, close, settings_of
from tests.small import run_round


def released(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """The optimiser of the released code: biases do not decay."""
    weights, biases = [], []
    for p in parameters:
        (weights if p.dim() > 1 else biases).append(p)
    groups = [{"params": weights, "weight_decay": 1e-4}, {"params": biases}]
    return SGD(groups, lr=lr, momentum=0.5)


def follow(algorithm: FedRep | FedPer, run: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the recorded rounds and compare bodies and heads."""
    fleet, rounds = run.fleet, run.about["rounds"]
    last = next((r for r in rounds if r.get("final_head_phase")), None)
    fleet.rounds = len(rounds) - (last is not None)
    body = fleet.one_layout("").floats.views
    for t, recorded in enumerate(rounds[: fleet.rounds]):
        active = sorted(recorded["active"])
        monkeypatch.setattr(Fleet, "participants", lambda self, t, who=active: who)
        run_round(fleet, t)
        for name, expected in body(run.row(f"r{t}/server")).items():
            if not name.startswith(tuple(algorithm.heads)):
                close(body(algorithm.model.floats)[name], expected)
        if last is None or t + 1 < fleet.rounds:
            for client in active:
                close(fleet.row(client).floats, run.row(f"r{t}/local/{client}"))
    for client in last["active"] if last is not None else ():
        close(fleet.row(client).floats, run.row(f"r{fleet.rounds}/local/{client}"))


@pytest.mark.parametrize("name", ["mlp_uniform", "mlp_samples"])
def test_the_released_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    about = settings_of("fedrep", name)
    algorithm = FedRep(
        "net.fc3.", about["head_epochs"], about["body_epochs"], 10, about["model_average"], False
    )
    follow(algorithm, Recorded("fedrep", name, algorithm, optimizer=released), monkeypatch)


def test_the_run_of_pfllib(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = FedRep("net.fc3.", head_epochs=2, body_epochs=1, weights="samples")
    names = {"fc1": "base.0", "fc2": "base.2", "fc3": "head"}
    follow(algorithm, Recorded("fedrep", "mlp_plain_sgd", algorithm, names=names), monkeypatch)


def test_the_length_of_a_phase() -> None:
    epochs, steps = Phase(epochs=2), Phase(steps=2, epochs=5)
    assert [LocalWork().phase(phase, 3) for phase in (epochs, steps)] == [6, 2]
    assert [LocalWork(limit=4).phase(phase, 3) for phase in (epochs, steps)] == [4, 2]
    assert [LocalWork(limit=0.5).phase(phase, 3) for phase in (epochs, steps)] == [3, 1]
