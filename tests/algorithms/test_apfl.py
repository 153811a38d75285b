"""APFL against recorded runs of its released code, and at the ends of alpha."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightfed.algorithms.apfl import APFL
from lightfed.algorithms.fedavg import FedAvg
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import RoundPlan
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.algorithms.recorded import Recorded, close, settings_of
from tests.small import fleet_of, random_data, run_round


@pytest.mark.parametrize("name", ["mlp_fixed_alpha", "mlp_adaptive"])
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    about = settings_of("apfl", name)
    algorithm = APFL(about["alpha0"], about["adaptive_alpha"])
    names = {"w.fc1": "fc1", "w.fc2": "fc2", "v.fc1": "fc1", "v.fc2": "fc2"}
    run = Recorded("apfl", name, algorithm, names=names)
    layout = run.fleet.groups[0].layout.floats

    def recorded(prefix: str, net: str) -> dict[str, Tensor]:
        """Return recorded tensors by the names that they have in w or v."""
        views = layout.views(run.row(prefix))
        return {name: view for name, view in views.items() if name.startswith(f"net.{net}.")}

    def server() -> dict[str, Tensor]:
        return algorithm.model.layout.floats.views(algorithm.model.floats)

    def client_tensors(client: int) -> dict[str, Tensor]:
        return layout.views(run.fleet.row(client).floats)

    for name, value in recorded("init", "w").items():
        server()[name].copy_(value)
    for client in range(run.fleet.clients):
        for name, value in recorded("init", "v").items():
            client_tensors(client)[name].copy_(value)

    for t, clients in run.rounds(monkeypatch):
        for name, value in recorded(f"r{t}/server", "w").items():
            close(server()[name], value)
        for client in clients:
            tensors = client_tensors(client)
            for name, value in recorded(f"r{t}/local/{client}", "w").items():
                close(tensors[name], value)
            for name, value in recorded(f"r{t}/personal/{client}", "v").items():
                close(tensors[name], value)
            alpha = run.about["rounds"][t]["alpha"][str(client)]
            assert tensors["net.alpha"].item() == pytest.approx(alpha, abs=3e-6)


def test_the_server_is_fedavg() -> None:
    """Also with momentum and weight decay: a model is still while the other one learns."""

    def trained(algorithm: APFL | FedAvg) -> Tensor:
        """Return the elements of the server's model, without padding."""
        fed = fleet_of(
            [ClientGroup(3, partial(MLP, hidden=(6,)))],
            algorithm,
            random_data([5, 9, 4]),
            optimizer=partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
            epochs=2,
            clients_per_round=2,
        )
        fed.plan = RoundPlan(lr=0.1)
        for t in range(3):
            run_round(fed, t)
        views = algorithm.model.layout.floats.views(algorithm.model.floats)
        return torch.cat([view.flatten() for view in views.values()])

    fedavg = trained(FedAvg("uniform"))
    assert torch.equal(trained(APFL(adaptive=True)), fedavg)
    assert torch.equal(trained(APFL(0.0)), fedavg)


@pytest.mark.parametrize("alpha", [-0.1, 1.5])
def test_a_wrong_share_is_refused(alpha: float) -> None:
    with pytest.raises(UserError, match=r"init_args\.alpha"):
        APFL(alpha)


def test_a_rate_that_is_not_known_is_refused() -> None:
    fed = fleet_of([ClientGroup(2, MLP)], APFL(adaptive=True), random_data([4, 4]))
    with pytest.raises(UserError, match=r"model\.optimizer"):
        run_round(fed, 0)
