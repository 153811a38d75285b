"""FedNova against recorded runs of its released code and NIID-Bench, as FedAvg, and refused.

The released code's rule for a proximal term with momentum is not offered, nor recorded here.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fednova import FedNova
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import RoundPlan
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.algorithms.recorded import Recorded, close, settings_of
from tests.small import fleet_of, random_data, run_round

CASES = ["mlp_sgd", "mlp_momentum", "mlp_momentum_sampled", "mlp_prox", "mlp_server_momentum"]


@pytest.mark.parametrize("name", CASES)
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    about = settings_of("fednova", name)
    algorithm = FedNova(about.get("proximal_mu", 0.0))
    run = Recorded("fednova", name, algorithm)
    server_momentum = about.get("server_momentum_gmf")
    if server_momentum:
        run.fleet.server_step.make = partial(SGD, lr=1.0, momentum=server_momentum)

    def recorded_steps(_: FedNova, fed: Any, clients: list[int], t: int) -> dict[int, int]:
        epochs = about["rounds"][t].get("local_epochs", [about.get("local_epochs")] * 4)
        return {k: epochs[k] * fed.data.num_batches(k) for k in clients}

    monkeypatch.setattr(FedNova, "steps", recorded_steps)
    for t, clients in run.rounds(monkeypatch):
        close(algorithm.model.floats, run.row(f"r{t}/server"))
        for client in clients:
            close(run.fleet.row(client).floats, run.row(f"r{t}/local/{client}"))

        if algorithm.mu:  # then it is tau_k, the steps, and not recorded
            continue
        lengths = about["rounds"][t]["normalising_a"]  # l_k of all clients, or of participants
        for position, client in enumerate(clients):
            length = lengths[client] if len(lengths) == 4 else lengths[position]
            assert algorithm.updates[client][-1].item() == pytest.approx(length, rel=1e-6)


def trained(algorithm: FedAvg, optimizer: Any, sizes: list[int]) -> Tensor:
    """Return the server's model after three rounds of clients with these numbers of samples."""
    group = ClientGroup(len(sizes), partial(MLP, hidden=(6,)))
    fed = fleet_of([group], algorithm, random_data(sizes, batch_size=4), optimizer=optimizer)
    fed.plan = RoundPlan(lr=0.1)
    for t in range(3):
        run_round(fed, t)
    return algorithm.model.floats


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_clients_of_as_many_steps_are_averaged(momentum: float) -> None:
    optimizer = partial(SGD, lr=0.1, momentum=momentum)

    two_steps_each = [8, 6, 7]
    nova = trained(FedNova(), optimizer, two_steps_each)
    average = trained(FedAvg(), optimizer, two_steps_each)
    torch.testing.assert_close(nova, average)

    three_two_two = [12, 6, 7]
    nova = trained(FedNova(), optimizer, three_two_two)
    average = trained(FedAvg(), optimizer, three_two_two)
    assert not torch.allclose(nova, average, atol=1e-3)


def test_the_length_is_how_far_equal_gradients_move_a_model() -> None:
    """With momentum and a pull."""
    algorithm = FedNova(0.5)
    group = ClientGroup(2, partial(MLP, hidden=()))
    optimizer = partial(SGD, lr=0.1, momentum=0.9)
    fed = fleet_of([group], algorithm, random_data([12, 4], batch_size=4), optimizer=optimizer)
    fed.plan = RoundPlan(lr=0.1)
    run_round(fed, 0)

    # Three steps of a number whose loss has the gradient -1, besides the pull to 0.
    x = torch.nn.Parameter(torch.zeros(()))
    sgd = SGD([x], lr=0.1, momentum=0.9)
    for _ in range(3):
        sgd.zero_grad()
        (-x + 0.5 / 2 * x**2).backward()
        sgd.step()
    length = x.item() / 0.1

    *_, tau = algorithm.updates[0]
    assert tau == 3  # steps
    d = algorithm.updates[0][:-1]
    moved = fed.groups[0].initial.floats - fed.row(0).floats
    torch.testing.assert_close(d * length, moved[: len(d)])


def test_drawn_epochs_differ_by_client_and_round() -> None:
    algorithm = FedNova(epochs=(1, 5))
    group = ClientGroup(8, partial(MLP, hidden=(6,)))
    data = random_data([8] * 8, batch_size=4)  # two steps an epoch
    fed = fleet_of([group], algorithm, data)

    steps_of_rounds = []
    for t in range(3):
        steps = algorithm.steps(fed, list(range(8)), t)
        assert steps is not None
        steps_of_rounds.append(steps)
    assert steps_of_rounds[0] != steps_of_rounds[1]
    every_number = {number for steps in steps_of_rounds for number in steps.values()}
    assert every_number == {2, 4, 6, 8, 10}

    fed.plan = RoundPlan(lr=0.1)
    run_round(fed, 0)
    taken = {k: int(algorithm.updates[k][-1]) for k in range(8)}
    assert taken == steps_of_rounds[0]


@pytest.mark.parametrize("wrong", [{"mu": -1.0}, {"epochs": (2, 1)}, {"epochs": (0, 3)}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"init_args\.{next(iter(wrong))}"):
        FedNova(**wrong)


@pytest.mark.parametrize("optimizer", [Adam, partial(SGD, lr=0.1, momentum=0.9, nesterov=True)])
def test_optimisers_of_unknown_weights_are_refused(optimizer: Any) -> None:
    with pytest.raises(UserError, match=r"model\.optimizer"):
        trained(FedNova(), optimizer, [4, 4])


def test_a_pull_beyond_the_received_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"init_args\.mu"):
        trained(FedNova(10.0), partial(SGD, lr=0.1), [4, 4])
