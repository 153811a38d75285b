"""The optimizer and the schedule of a run, against a loop of torch alone."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, Muon
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from lightfed.algorithms.fedavg import FedAvg
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from tests.small import fit, random_data, server_row

ROUNDS, CLIENTS, STEPS = 4, 2, 3


def matrices(num_classes: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, num_classes, bias=False)
    )


CYCLES = partial(CyclicLR, base_lr=0.05, max_lr=0.2, step_size_up=2, cycle_momentum=True)
RUNS: dict[str, tuple[Any, Any]] = {
    "momentum": (
        partial(SGD, lr=0.1, momentum=0.9),
        partial(OneCycleLR, max_lr=0.2, total_steps=4),
    ),
    "betas": (partial(Adam, lr=0.1), partial(OneCycleLR, max_lr=0.2, total_steps=4)),
    "cycles": (partial(SGD, lr=0.1, momentum=0.9), CYCLES),
    "matrices": (partial(Muon, lr=0.02), None),  # which refuses parameters of other shapes
}


@pytest.mark.parametrize("side_by_side", ["off", 2])
@pytest.mark.parametrize("given", RUNS.values(), ids=RUNS)
def test_rounds_have_the_settings_of_torchs_schedule(
    given: Any, side_by_side: Any, tmp_path: Path
) -> None:
    """Both clients have the same samples, so that their mean is that of a single one."""
    optimizer, schedule = given
    data = random_data([6, 6])
    data.partition.parts = [range(6), range(6)]  # type: ignore[attr-defined]
    federation = Federation(
        FedAvg(),
        [ClientGroup(CLIENTS, matrices)],
        optimizer=optimizer,
        lr_schedule=schedule,
        local_epochs=STEPS,
        side_by_side=side_by_side,
        evaluate=(),
    )
    fit(federation, data, tmp_path, rounds=ROUNDS, enable_checkpointing=False)

    twin = federation.fleet.groups[0].group.build(data, position=0, seed=0)
    ((x, y),) = data.batches(data.client_plan(0, 6))
    counter = optimizer(twin.parameters())
    rates = None if schedule is None else schedule(counter)
    for _ in range(ROUNDS):
        settings = {k: v for k, v in counter.param_groups[0].items() if k != "params"}
        session = optimizer(twin.parameters())
        session.param_groups[0].update(settings)
        for _ in range(STEPS):
            session.zero_grad()
            F.cross_entropy(twin(x), y).backward()
            session.step()
        if rates is not None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(counter, "_opt_called", True, raising=False)
                rates.step()
    views = federation.fleet.groups[0].layout.floats.views(server_row(federation))
    for name, p in twin.named_parameters():
        torch.testing.assert_close(views[name], p.detach(), rtol=1e-4, atol=1e-5)
