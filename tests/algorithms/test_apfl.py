"""APFL against recorded runs of its released code, and at the ends of alpha."""

from functools import partial

import pytest
import torch
from torch.optim import SGD

from lightfed.algorithms.apfl import APFL
from lightfed.algorithms.fedavg import FedAvg
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.algorithms.recorded import Recorded, close, settings_of
from tests.small import fleet_of, random_data, run_round


@pytest.mark.parametrize("name", ["mlp_fixed_alpha", "mlp_adaptive"])
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    about = settings_of("apfl", name)
    algorithm = APFL(about["alpha0"], about["adaptive_alpha"])
    names = {f"{net}.fc{i}": f"fc{i}" for net in "wv" for i in (1, 2)}
    run = Recorded("apfl", name, algorithm, names=names)
    layout, server = run.fleet.groups[0].layout.floats, algorithm.model.layout.floats

    def recorded(prefix: str, part: str) -> dict[str, torch.Tensor]:
        found = layout.views(run.row(prefix)).items()
        return {name: view for name, view in found if name.startswith(f"net.{part}.")}

    for name, view in recorded("init", "w").items():
        server.views(algorithm.model.floats)[name].copy_(view)
    for client in range(run.fleet.clients):
        for name, view in recorded("init", "v").items():
            layout.views(run.fleet.row(client).floats)[name].copy_(view)
    for t, clients in run.rounds(monkeypatch):
        for name, view in recorded(f"r{t}/server", "w").items():
            close(server.views(algorithm.model.floats)[name], view)
        for client in clients:
            own = layout.views(run.fleet.row(client).floats)
            expected = recorded(f"r{t}/local/{client}", "w")
            for name, view in (expected | recorded(f"r{t}/personal/{client}", "v")).items():
                close(own[name], view)
            alpha = run.about["rounds"][t]["alpha"][str(client)]
            assert own["net.alpha"].item() == pytest.approx(alpha, abs=3e-6)


def test_the_server_is_fedavg() -> None:
    """Also with momentum and weight decay: a model is still while the other one learns."""
    rows = []
    optimizer = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    for algorithm in (APFL(adaptive=True), APFL(0.0), FedAvg("uniform")):
        group, data = ClientGroup(3, partial(MLP, hidden=(6,))), random_data([5, 9, 4])
        fed = fleet_of([group], algorithm, data, optimizer=optimizer, epochs=2, clients_per_round=2)
        fed.plan = type(fed.plan)(lr=0.1)
        for t in range(3):
            run_round(fed, t)
        views = algorithm.model.layout.floats.views(algorithm.model.floats)
        rows.append(torch.cat([view.flatten() for view in views.values()]))
    assert torch.equal(rows[0], rows[2])
    assert torch.equal(rows[1], rows[2])


@pytest.mark.parametrize("alpha", [-0.1, 1.5])
def test_a_wrong_share_is_refused(alpha: float) -> None:
    with pytest.raises(UserError, match=r"init_args\.alpha"):
        APFL(alpha)


def test_a_rate_that_is_not_known_is_refused() -> None:
    fed = fleet_of([ClientGroup(2, MLP)], APFL(adaptive=True), random_data([4, 4]))
    with pytest.raises(UserError, match=r"model\.optimizer"):
        run_round(fed, 0)
