"""pFedMe against recorded runs of its released code, by hand, and its refusals."""

from functools import partial

import pytest
import torch
from torch.optim import SGD

from lightfed.algorithms.pfedme import PFedMe
from lightfed.local.client_group import ClientGroup
from lightfed.utils.errors import UserError
from tests.algorithms.recorded import Recorded, close, settings_of
from tests.small import Line, data_of, fleet_of, run_round


@pytest.mark.parametrize("name", ["mlp_all", "mlp_beta_sampled"])
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    about = settings_of("pfedme", name)
    inner = about["inner_optimizer"]
    algorithm = PFedMe(inner["lamda"], inner["K"], about["local_lr"], about["beta"])
    decaying = partial(SGD, weight_decay=inner["mu"])
    run = Recorded("pfedme", name, algorithm, optimizer=decaying, steps=about["local_rounds"])
    for t, _ in run.rounds(monkeypatch):
        close(algorithm.model.floats, run.row(f"r{t}/server"))
        for client in range(run.fleet.clients):  # all train
            close(run.fleet.row(client).floats, run.row(f"r{t}/theta/{client}"))
            close(algorithm.local[client], run.row(f"r{t}/local/{client}"))


X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
Y = torch.tensor([1, 2])


def test_two_batches_by_hand() -> None:
    lam = 2.0
    eta = 0.1
    beta = 0.5
    rate = 0.05  # of theta
    algorithm = PFedMe(lam=lam, inner_steps=3, lr=eta, beta=beta, weights="uniform")
    fed = fleet_of(
        [ClientGroup(2, Line)],
        algorithm,
        data_of(X, Y, [[0], [1]], batch_size=1),
        optimizer=partial(SGD, lr=rate),
        steps=2,
    )
    run_round(fed, 0)

    local = []
    for k in range(2):
        w = torch.zeros(2)
        theta = torch.zeros(2)
        for _ in range(2):
            for _ in range(3):
                gradient = (X[k] @ theta - Y[k]) * X[k]
                theta = theta - rate * (gradient + lam * (theta - w))
            w = w - eta * lam * (w - theta)
        local.append(w)
        torch.testing.assert_close(fed.row(k).floats[:2], theta)

    # From 0, (1 - beta) w + beta times the mean is beta times the mean.
    mean = torch.stack(local).mean(0)
    torch.testing.assert_close(algorithm.model.floats[:2], beta * mean)
    model_bytes = 8.0
    down_and_up = fed.ledger.totals[:, :2].tolist()
    assert down_and_up == [[model_bytes, model_bytes], [model_bytes, model_bytes]]


def test_clients_that_are_not_drawn_train_and_send_nothing() -> None:
    fed = fleet_of(
        [ClientGroup(2, Line)],
        PFedMe(lam=2.0, lr=0.1),
        data_of(X, Y, [[0], [1]]),
        optimizer=partial(SGD, lr=0.05),
        clients_per_round=1,
    )
    run_round(fed, 0)
    (drawn,) = fed.participants(0)
    sent = fed.ledger.totals[:, fed.ledger.UP]
    assert sent[drawn] == 8.0
    assert sent[1 - drawn] == 0.0
    for k in range(2):
        assert fed.row(k).floats[:2].abs().max() > 0  # has left the initial values, 0


@pytest.mark.parametrize("wrong", [{"lam": 0.0}, {"inner_steps": 0}, {"lr": 0.1}, {"beta": 0.0}])
def test_wrong_arguments_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=rf"init_args\.{next(iter(wrong))}"):
        PFedMe(**wrong)  # type: ignore[arg-type]
