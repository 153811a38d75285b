"""FedBCD's identities, and its clouds by hand."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD

from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.algorithms.fedbcd.fedbcdi import FedBCDI
from lightfed.algorithms.standalone import Standalone
from lightfed.local.client_group import ClientGroup
from tests.algorithms.fedbcd.fedbcd_clouds import Normed, fleet, rows, servers, spread
from tests.algorithms.fedbcd.fedbcd_oracle import START, Local, Oracle, federation
from tests.small import Line, data_of, fleet_of, has_global_model, row_held, run_round


@pytest.mark.parametrize("method", [partial(FedBCD, 3, 2), partial(FedBCDI, 3, 1, 2, patience=99)])
def test_gamma_zero_trains_devices_alone(method: Any) -> None:
    algorithm = method(gamma=0.0, steps=(1, 1), unit="epoch", momentum="session")
    sgd = {"optimizer": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01)}
    together, alone = fleet(algorithm, **sgd), fleet(Standalone(), **sgd)
    before = servers(together).clone()
    for t in range(3):
        metrics = run_round(together, t)
        run_round(alone, t)
        assert metrics["participants"] == 6.0
        assert metrics["bytes_up"] == metrics["bytes_down"] == 0.0
        assert not {"server_bytes", "server_gradient"} & metrics.keys()
    assert torch.equal(rows(together), rows(alone))
    assert not has_global_model(together)  # nobody has trained a global model
    assert torch.equal(servers(together), before)
    assert not torch.equal(rows(together)[0], before[0])


def test_with_one_server_async_is_sync_bit_for_bit() -> None:
    """By its own mixing, a server goes through the decentralised path; waiting for 1 is sync."""

    def one_server(**settings: Any) -> Any:
        return fleet(FedBCD(1, 4, gamma=[0.5, 1.0], **settings), model=Normed)

    sync = one_server()
    others = [one_server(wait=1), one_server(mixing=[[1.0]])]
    for t in range(4):
        expected = run_round(sync, t)
        for fed in others:
            metrics = run_round(fed, t)
            assert torch.equal(rows(fed), rows(sync))
            assert torch.equal(servers(fed), servers(sync))
            assert metrics["virtual_time"] == expected["virtual_time"]
            assert metrics["bytes_up"] == expected["bytes_up"]


@pytest.mark.parametrize("wait", [2, 3])
def test_what_theorem_1_bounds_is_in_the_metrics(wait: int) -> None:
    """Of the devices' models after their sessions, and the servers' before their step."""
    gammas = [0.5, 1.0, 2.0]
    fed = fleet(FedBCD(3, 2, wait=wait, gamma=gammas, server_lr=0.3))
    spread(fed)
    for t in range(3):
        z = servers(fed).double()
        metrics = run_round(fed, t)
        first = [n for n in range(3) if metrics.get(f"mixed/{n}", 1.0)]
        assert len(first) == wait

        w = z[first].mean(0)
        gradient = torch.zeros_like(w)
        for n in first:
            for i in fed.algorithm.hierarchy.devices(n, fed.clients):
                gradient += gammas[i % 3] * (w - rows(fed)[i].double())
        expected = float(gradient.square().sum())
        assert metrics["server_gradient"] == pytest.approx(expected, rel=1e-4)

        after = servers(fed).double()
        largest_distance = float((after.mean(0) - after).norm(dim=1).max())
        if wait < 3:
            assert metrics["consensus"] == pytest.approx(largest_distance)
        else:
            assert "consensus" not in metrics


def test_a_server_s_gradient_is_of_the_devices_in_its_step() -> None:
    """FedBCD-I's are the active ones; with a mixing of its own, a server's model is that mean."""
    mixing = [[0.5, 0.25, 0.25], [0.25, 0.375, 0.375], [0.25, 0.375, 0.375]]
    algorithm = FedBCDI(3, 1, available=2, mixing=mixing)
    fed = fleet(algorithm)
    spread(fed)
    z = servers(fed).double()
    metrics = run_round(fed, 0)

    w = torch.tensor(mixing, dtype=torch.float64) @ z
    gradient = torch.zeros_like(w[0])
    for n, i in enumerate(algorithm.queue[:, 0].tolist()):
        gradient += 0.2 * (w[n] - rows(fed)[i].double())
    expected = float(gradient.square().sum())
    assert metrics["server_gradient"] == pytest.approx(expected, rel=1e-4)
    assert [metrics[f"mixed/{n}"] for n in range(3)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("step", ["mean", "sum"])
def test_when_all_are_waited_for_the_mean_of_the_servers_is_the_sync_model(step: Any) -> None:
    """One start, equal gamma and device counts, one round; in sums, N servers share one eta_z."""
    count = 3
    rate = 0.1
    sync = fleet(FedBCD(count, 2, server_lr=rate, server_step=step), model=Normed)

    uniform = [[1 / count] * count] * count
    own_rate = rate * count if step == "sum" else rate
    algorithm = FedBCD(count, 2, server_lr=own_rate, server_step=step, mixing=uniform)
    mixed = fleet(algorithm, model=Normed)

    run_round(sync, 0)
    run_round(mixed, 0)
    assert torch.equal(rows(sync), rows(mixed))
    torch.testing.assert_close(servers(mixed).mean(0), servers(sync)[0], rtol=0, atol=1e-6)
    assert not torch.equal(servers(mixed)[0], servers(mixed)[1])


@pytest.mark.parametrize(("step", "rate"), [("mean", 1.5), ("sum", 0.4)])
def test_all_active_devices_reach_the_minimiser_of_problem_2(step: Any, rate: float) -> None:
    """min sum_i 1/2 x_i'A_i x_i - b_i'x_i + gamma_i/2 ||x_i - z||^2 is a linear system.

    (A_i + gamma_i) x_i - gamma_i z = b_i;   sum_i gamma_i (z - x_i) = 0.
    """
    devices = 4
    gammas = [1.0, 0.5]
    local = Local(eta=0.5, zeta=0.5, box=(-50.0, 50.0))
    algorithm = FedBCD(2, 2, gamma=gammas, server_lr=rate, server_step=step, steps=(2, 3))
    fed = federation(algorithm, devices, local)
    oracle = Oracle(algorithm, devices, local)

    # The unknowns are all x_i, with two elements each, and then z.
    unknowns = 2 * devices + 2
    system = torch.zeros(unknowns, unknowns, dtype=torch.float64)
    right_side = torch.zeros(unknowns, dtype=torch.float64)
    z = slice(2 * devices, unknowns)
    for i in range(devices):
        x = slice(2 * i, 2 * i + 2)
        gamma = gammas[i % 2] * torch.eye(2)
        system[x, x] = torch.from_numpy(oracle.A[i]) + gamma
        system[x, z] = -gamma
        system[z, x] = -gamma
        system[z, z] += gamma
        right_side[x] = torch.from_numpy(oracle.b[i])
    solution = torch.linalg.solve(system, right_side).float()

    for t in range(45):
        run_round(fed, t)
    expected_rows = solution[: 2 * devices].view(devices, 2)
    torch.testing.assert_close(rows(fed)[:, :2], expected_rows, rtol=0, atol=2e-5)
    torch.testing.assert_close(servers(fed)[0, :2], solution[z], rtol=0, atol=2e-5)


def test_statistics_are_averaged_and_neither_pulled_nor_projected() -> None:
    """A box of 0.01 and a pull to z; server statistics are the gamma-weighted mean of all devices'.

    Two samples a device, in one batch: with momentum 1 its statistics are those of its features.
    """
    gammas = [1.0, 3.0]
    algorithm = FedBCD(2, 2, gamma=gammas, steps=(1, 3))
    aspg = partial(ASPG, lr=0.1, box=(-0.01, 0.01))
    fed = fleet(algorithm, model=Normed, sizes=[2] * 4, optimizer=aspg)
    for t in range(2):
        run_round(fed, t)

    layout = fed.groups[0].layout.floats
    features = fed.data.dataset.load("train").x.view(4, 2, 4)  # type: ignore[attr-defined]
    weights = torch.tensor(gammas * 2) / 8
    for name, expected in (("mean", features.mean(1)), ("var", features.var(1))):
        key = f"net.layers.0.running_{name}"
        for device in range(4):
            statistics = layout.views(fed.row(device).floats)[key]
            torch.testing.assert_close(statistics, expected[device], rtol=1e-5, atol=1e-6)
        of_server = layout.views(algorithm.clouds.of(0).floats)[key]
        torch.testing.assert_close(of_server, weights @ expected, rtol=1e-5, atol=1e-6)

    counts = [int(fed.row(k).integers[0]) for k in range(4)]
    assert int(algorithm.clouds.of(0).integers[0]) == max(counts) > 2

    trained = rows(fed)[:, : layout.span(6)]
    assert trained.abs().max() <= 0.01


def test_models_that_are_tested_and_deployed() -> None:
    """All servers' models, to each device its server's, and to be deployed its own."""
    algorithm = FedBCD(3, 1, wait=2)
    fed = fleet(algorithm)
    run_round(fed, 0)

    of_servers = algorithm.models(fed, "global", [])
    assert of_servers is not None
    assert list(of_servers.clients) == [0, 1, 2]
    assert torch.equal(of_servers.read([0, 1, 2]).floats, servers(fed))

    of_devices = algorithm.models(fed, "local", range(6))
    assert of_devices is not None
    assert torch.equal(of_devices.read(range(6)).floats, servers(fed).repeat_interleave(2, 0))

    for device in range(6):
        assert torch.equal(row_held(fed, device)[1].floats, rows(fed)[device])


@pytest.mark.usefixtures("unchecked_data")
@pytest.mark.parametrize("step", ["mean", "sum"])
def test_a_device_whose_update_is_not_finite_is_left_out_of_the_step(step: Any) -> None:
    """Device 1 has a feature that is no number; it starts again, without momentum."""
    x = torch.tensor([[0.0, 0.0], [float("nan"), 0.0], [0.0, 0.0]])
    data = data_of(x, torch.zeros(3, dtype=torch.long), [[0], [1], [2]])
    algorithm = FedBCD(1, 3, gamma=[1.0, 0.5, 2.0], server_lr=0.25, server_step=step)
    fed = fleet_of(
        [ClientGroup(3, partial(Line, START))],
        algorithm,
        data,
        optimizer=partial(ASPG, lr=1e-9, box=None),
    )
    fed.row(0).floats[0] = 4.0
    fed.row(2).floats[0] = 7.0

    metrics = run_round(fed, 0)
    assert metrics["excluded"] == 1.0
    assert fed.row(1).floats[:2].tolist() == list(START)
    assert sorted(fed.optimizers) == [0, 2]
    pulls = 1.0 * (1 - 4) + 2.0 * (1 - 7)
    expected = 1 - 0.25 * pulls / (3 if step == "mean" else 1)
    assert servers(fed)[0, 0].item() == pytest.approx(expected, rel=1e-6)


def test_to_a_device_without_a_pull_nothing_is_sent() -> None:
    """All six are active; the last three have gamma 0."""
    fed = fleet(FedBCD(1, 6, gamma=[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]))
    metrics = run_round(fed, 0)
    size = 4 * fed.groups[0].layout.floats.numel
    assert metrics["bytes_down"] == metrics["bytes_up"] == 3 * size
    assert fed.ledger.totals[:, :2].tolist() == [[size, size]] * 3 + [[0.0, 0.0]] * 3


@pytest.mark.parametrize(
    ("settings", "models"),
    [
        ({"servers": 3, "wait": 2}, 2 * 2),
        ({"servers": 2, "mixing": [[0.5, 0.5], [0.5, 0.5]]}, 2),
    ],
)
def test_statistics_go_with_a_model_between_servers(settings: Any, models: int) -> None:
    """4 bytes for each of its floats, and 8 for its counter."""
    fed = fleet(FedBCD(active=1, **settings), model=Normed)
    assert run_round(fed, 0)["server_bytes"] == models * (4 * fed.groups[0].layout.floats.numel + 8)
