"""A module that overrides no hook of Lightning pays nothing for those that could be."""

import sys
from collections import Counter
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

from lightfed.algorithms.standalone import Standalone
from lightfed.lightning_fits.session_trainer import SessionHost
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from tests.small import fleet_of, random_data, run_round

BATCHES = 8


def fleet(epochs: int) -> Any:
    """Return two plain clients that train one after the other under a Trainer, after two rounds."""
    trainer = L.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    clients = fleet_of(
        [ClientGroup(2, partial(MLP, hidden=(6,)))], Standalone(),
        random_data([4 * BATCHES] * 2, batch_size=4), optimizer=partial(SGD, lr=0.1),
        side_by_side="off", epochs=epochs, host=SessionHost(run=trainer),
    )  # fmt: skip
    for t in range(2):
        run_round(clients, t)
    return clients


def calls(epochs: int) -> Counter[str]:
    """Count the calls of Python functions in a round, by the file that they are in."""
    clients = fleet(epochs)
    calls_of_file: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls_of_file[frame.f_code.co_filename] += 1

    sys.setprofile(note)
    try:
        run_round(clients, 2)
    finally:
        sys.setprofile(None)
    return calls_of_file


def test_no_step_calls_a_function_of_lightning_or_of_its_hooks() -> None:
    # What is called once for a session or a round is subtracted.
    of_two_more_epochs = calls(3) - calls(1)
    assert of_two_more_epochs.total() > 0

    folders = ("/lightning/", "/lightfed/lightning_fits/")
    files = [file for file in of_two_more_epochs if any(folder in file for folder in folders)]
    assert files == []


def test_a_step_runs_the_operators_of_a_bare_loop() -> None:
    def operators(epochs: int) -> int:
        clients = fleet(epochs)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            run_round(clients, 2)
        return sum(event.name.startswith("aten::") for event in profiled.events() or [])

    def bare(steps: int) -> int:
        net = MLP(3, (4,), hidden=(6,))
        optimizer = SGD(net.parameters(), lr=0.1)
        x = torch.randn(4 * BATCHES, 4)
        y = torch.zeros(4 * BATCHES, dtype=torch.int64)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(steps):
                index = torch.arange(4)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(x[index]), y[index]).backward()
                optimizer.step()
        return sum(event.name.startswith("aten::") for event in profiled.events() or [])

    # Two more epochs of two clients, and 16 more steps of a bare loop.
    of_a_step = (operators(3) - operators(1)) / (2 * 2 * BATCHES)
    of_a_bare_step = (bare(24) - bare(8)) / 16
    assert of_a_step <= of_a_bare_step
