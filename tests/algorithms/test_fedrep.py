"""FedRep against recorded runs of its released code and PFLlib."""

from collections.abc import Iterable
from typing import Any

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
    """Return the optimizer of the released code, in which biases do not decay."""
    weights = []
    biases = []
    for parameter in parameters:
        if parameter.dim() > 1:
            weights.append(parameter)
        else:
            biases.append(parameter)
    groups = [{"params": weights, "weight_decay": 1e-4}, {"params": biases}]
    return SGD(groups, lr=lr, momentum=0.5)


def follow(algorithm: FedRep | FedPer, run: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the recorded rounds and compare bodies and heads.

    A recording may end with a phase in which all clients train their heads. It is a round there,
    and the end of the last round here.
    """
    fleet = run.fleet
    rounds = list(run.about["rounds"])
    head_phase = None
    if rounds[-1].get("final_head_phase"):
        head_phase = rounds.pop()
    fleet.rounds = len(rounds)

    tensors_of = fleet.one_layout("").floats.views
    for t, recorded in enumerate(rounds):
        active = sorted(recorded["active"])
        monkeypatch.setattr(Fleet, "participants", lambda self, t, active=active: active)
        run_round(fleet, t)

        server = tensors_of(algorithm.model.floats)
        for name, expected in tensors_of(run.row(f"r{t}/server")).items():
            if not name.startswith(tuple(algorithm.heads)):
                close(server[name], expected)
        is_last = t + 1 == len(rounds)
        if not (is_last and head_phase):
            for client in active:
                close(fleet.row(client).floats, run.row(f"r{t}/local/{client}"))

    if head_phase:
        for client in head_phase["active"]:
            close(fleet.row(client).floats, run.row(f"r{len(rounds)}/local/{client}"))


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


@pytest.mark.parametrize(("limit", "of_epochs", "of_steps"), [(None, 6, 2), (4, 4, 2), (0.5, 3, 1)])
def test_the_length_of_a_phase(limit: Any, of_epochs: int, of_steps: int) -> None:
    """An epoch has three batches."""
    work = LocalWork() if limit is None else LocalWork(limit=limit)
    assert work.phase(Phase(epochs=2), 3) == of_epochs
    assert work.phase(Phase(steps=2, epochs=5), 3) == of_steps
