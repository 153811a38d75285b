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


def test_two_batches_by_hand() -> None:
    x, y = torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([1, 2])
    data = data_of(x, y, [[0], [1]], batch_size=1)
    algorithm = PFedMe(lam=2.0, inner_steps=3, lr=0.1, beta=0.5, weights="uniform")
    fed = fleet_of(
        [ClientGroup(2, Line)], algorithm, data, optimizer=partial(SGD, lr=0.05), steps=2
    )
    run_round(fed, 0)
    local = []
    for k in range(2):
        w, theta = torch.zeros(2), torch.zeros(2)
        for _ in range(2):
            for _ in range(3):
                theta = theta - 0.05 * ((x[k] @ theta - y[k]) * x[k] + 2.0 * (theta - w))
            w = w - 0.1 * 2.0 * (w - theta)
        local.append(w)
        torch.testing.assert_close(fed.row(k).floats[:2], theta)
    torch.testing.assert_close(algorithm.model.floats[:2], 0.5 * torch.stack(local).mean(0))
    assert fed.ledger.totals[:, :2].tolist() == [[8.0, 8.0]] * 2


def test_clients_that_are_not_drawn_train_and_send_nothing() -> None:
    x, y = torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([1, 2])
    algorithm = PFedMe(lam=2.0, lr=0.1)
    data = data_of(x, y, [[0], [1]])
    fed = fleet_of(
        [ClientGroup(2, Line)], algorithm, data, optimizer=partial(SGD, lr=0.05),
        clients_per_round=1,
    )  # fmt: skip
    run_round(fed, 0)
    (drawn,) = fed.participants(0)
    assert fed.ledger.totals[:, 0].tolist() == [8.0 * (k == drawn) for k in range(2)]
    assert all(fed.row(k).floats[:2].abs().max() > 0 for k in range(2))


@pytest.mark.parametrize("wrong", [{"lam": 0.0}, {"inner_steps": 0}, {"lr": 0.1}, {"beta": 0.0}])
def test_wrong_arguments_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=rf"init_args\.{next(iter(wrong))}"):
        PFedMe(**wrong)  # type: ignore[arg-type]
