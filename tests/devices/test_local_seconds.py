"""Sessions of as many steps as a device does in so many virtual seconds (`model.local_seconds`)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

import lightfed as lf
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fednova import FedNova
from lightfed.algorithms.fedrep import FedRep
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.devices.delays import Uniform
from lightfed.devices.devices import Device, Devices
from lightfed.devices.fitting import FastestFit
from lightfed.devices.policy import Policy
from lightfed.devices.timing import Timing
from lightfed.lab.previews.dry_run import DryFleet, PlannedRanks
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import LocalWork
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.small import Line, data_of, fleet_of, random_data, run_round

mlp = partial(MLP, hidden=(6,))
SLOPES = (1, 2, 4)
STEPS = (1, 2, 5)


class Counted(Line):
    """A `Line` whose FLOPs are known: a product of a (B, 2) and a (2, 1) matrix has 4 B."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w[:, None])[:, 0]


def lines(algorithm: Algorithm, **settings: Any) -> Fleet:
    """Make three clients with one sample each, whose devices do 1, 2 and 5 steps in a second.

    Client k has y = c_k x with c_k of `SLOPES`. A step goes half of the way to it.
    """
    x = torch.tensor([[1.0, 0.0]]).repeat(3, 1)
    data = data_of(x, torch.tensor(SLOPES), [[0], [1], [2]])
    groups = [ClientGroup(1, Counted, name=str(k)) for k in range(3)]
    flops = 3 * 4  # of a step, as three forward passes
    speeds = {str(k): Device(flops=float(steps * flops)) for k, steps in enumerate(STEPS)}
    settings = {"devices": Devices(groups=speeds), "seconds": 1.0} | settings
    return fleet_of(groups, algorithm, data, **settings)


def fixed_point(fed: Fleet) -> float:
    """Return the server's weight after so many rounds that it does not change any more."""
    for t in range(60):
        run_round(fed, t)
    model: Any = fed.algorithm.model
    return float(model.floats[0])


def test_every_client_takes_as_many_steps_as_its_device_does() -> None:
    fed = lines(FedAvg())
    assert fed.steps_in_time([0, 1, 2], 0) == {0: 1, 1: 2, 2: 5}

    metrics = run_round(fed, 0)
    assert metrics["virtual_time"] == pytest.approx(1.0)
    assert fed.updates.tolist() == [1, 2, 5]
    assert metrics["flops"] == 12 * (1 + 2 + 5)


def test_a_device_that_is_too_slow_takes_one_step() -> None:
    fed = lines(FedAvg(), seconds=0.25)
    assert fed.steps_in_time([0, 1, 2], 0) == {0: 1, 1: 1, 2: 1}
    assert run_round(fed, 0)["virtual_time"] == pytest.approx(1.0)


def test_fedavg_is_biased_towards_fast_clients_and_fednova_is_not() -> None:
    """After tau steps from w a client is at c + 2^-tau (w - c).

    So FedAvg rests where sum_k (1 - 2^-tau_k) (w - c_k) = 0, and FedNova, which divides a client's
    update by tau_k, where sum_k (1 - 2^-tau_k) / tau_k (w - c_k) = 0. For small learning rates
    (1 - (1 - eta)^tau) / tau goes to eta, and FedNova rests at the mean of the c_k.
    """
    moved = [1 - 2.0**-tau for tau in STEPS]
    by_speed = sum(m * c for m, c in zip(moved, SLOPES, strict=True)) / sum(moved)
    assert fixed_point(lines(FedAvg())) == pytest.approx(by_speed, rel=1e-4)

    a_step = [m / tau for m, tau in zip(moved, STEPS, strict=True)]
    normalized = sum(m * c for m, c in zip(a_step, SLOPES, strict=True)) / sum(a_step)
    assert fixed_point(lines(FedNova())) == pytest.approx(normalized, rel=1e-4)


def test_with_small_steps_fednova_rests_at_the_minimum() -> None:
    slow = {"optimizer": partial(SGD, lr=0.02)}
    minimum = sum(SLOPES) / 3
    for_fedavg = sum(tau * c for tau, c in zip(STEPS, SLOPES, strict=True)) / sum(STEPS)

    def rests_at(algorithm: Algorithm) -> float:
        fed = lines(algorithm, **slow)
        for t in range(400):
            run_round(fed, t)
        model: Any = fed.algorithm.model
        return float(model.floats[0])

    assert rests_at(FedNova()) == pytest.approx(minimum, rel=0.02)
    assert rests_at(FedAvg()) == pytest.approx(for_fedavg, rel=0.02)


def test_delays_of_steps_count() -> None:
    """A step of client 2 takes .2 s and its delay of .3 s: two fit into a second."""
    devices = Devices(flops=60.0, step_delay=Uniform(0.3, 0.3 + 1e-9))
    fed = lines(FedAvg(), devices=devices)
    assert fed.steps_in_time([0, 1, 2], 0) == {0: 1, 1: 1, 2: 1}
    fed = lines(FedAvg(), devices=devices, seconds=1.01)
    assert fed.steps_in_time([2], 0) == {2: 2}
    assert run_round(fed, 0)["virtual_time"] == pytest.approx(1.0)


def test_a_client_that_leaves_completes_a_share_of_these_steps() -> None:
    fed = lines(FedAvg(), policy=Policy(dropout=0.9, partial="keep"), seconds=4.0)
    run_round(fed, 0)
    shares = fed.clock.leaving([0, 1, 2], 0)
    assert shares
    expected = {
        k: max(1, int(4 * STEPS[k] * shares[k])) if k in shares else 4 * STEPS[k] for k in range(3)
    }
    assert fed.updates.tolist() == list(expected.values())


def test_packs_train_sessions_of_unequal_numbers_of_steps() -> None:
    """In packs and alone the model is the same, within rounding."""

    def model(side_by_side: Any) -> Tensor:
        speeds = {str(k): Device(flops=3e3 * (k + 1)) for k in range(2)}
        fed = fleet_of(
            [ClientGroup(4, mlp, name="0"), ClientGroup(4, mlp, name="1")],
            FedAvg(),
            random_data([5, 9, 4, 7, 6, 8, 5, 5]),
            devices=Devices(groups=speeds),
            seconds=1.0,
            side_by_side=side_by_side,
        )
        run_round(fed, 0)
        assert len(set(fed.updates.tolist())) > 1
        server: Any = fed.algorithm.model
        return server.floats.clone()

    torch.testing.assert_close(model(4), model("off"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"devices": None}, "given, and a step of client 0 takes no time"),
        ({"devices": Devices(up=9.0)}, "given, and a step of client 0 takes no time"),
        ({"seconds": 0.1}, "0.1, and the fastest device needs 0.2 for a step"),
    ],
)
def test_seconds_without_effect_are_refused(settings: Mapping[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"model.local_seconds: {words}"):
        lines(FedAvg(), **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 3}, "1, and local_steps 3"),
        ({"epochs": 3}, "1, and local_epochs 3"),
        ({"seconds": 0.0}, "0.0; give seconds above 0"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(settings: Mapping[str, Any], words: str) -> None:
    work = LocalWork(**{"seconds": 1.0} | settings)
    with pytest.raises(UserError, match=f"model.local_seconds: {words}"):
        work.check(3)


class Epochs(FedAvg):
    """A method that says itself how many steps a client takes."""

    @override
    def round(self, fed: Fleet, t: int) -> None:
        fed.train([0, 1, 2], t, steps={0: 1, 1: 1, 2: 1})


def test_a_method_with_lengths_of_its_own_is_refused() -> None:
    fed = lines(Epochs())
    with pytest.raises(UserError, match=r"model.local_seconds: given, and Epochs says itself"):
        run_round(fed, 0)

    groups = [ClientGroup(2, mlp)]
    fed = fleet_of(
        groups,
        FedRep("net.layers.3."),
        random_data([5, 9]),
        devices=Devices(flops=1e5),
        seconds=1.0,
    )
    with pytest.raises(UserError, match=r"model.local_seconds: given, and FedRep says itself"):
        run_round(fed, 0)


def test_seconds_and_a_rule_that_asks_how_long_a_session_takes() -> None:
    with pytest.raises(UserError, match=r"model.local_seconds: given together with model.assign"):
        lf.Federation(
            FedAvg(),
            clients=[ClientGroup(2, mlp)],
            optimizer=partial(SGD, lr=0.1),
            devices=Devices(flops=1e5),
            assign=FastestFit(deadline=1.0),
            local_seconds=1.0,
        )


def test_a_plan_counts_the_same_steps() -> None:
    fed = lines(FedAvg())
    dry = DryFleet(
        [state.group for state in fed.groups],
        FedAvg(),
        fed.data,
        ranks=PlannedRanks(1),
        work=fed.work,
        timing=Timing(fed.clock.devices),
    )
    dry.run(1)
    done = run_round(fed, 0)
    assert dry.sums["flops"] == done["flops"] == 12 * (1 + 2 + 5)
    assert dry.sums["virtual_time"] == done["virtual_time"]
