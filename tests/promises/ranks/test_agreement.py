"""Ranks agree on the clients' networks before the first round, and a step calls no collective."""

import json
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.distributed.steps import refuse_in_step, step_under_way
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.models import agreement
from lightfed.testing.ranks import in_new_process, start_job, wait
from lightfed.utils.errors import UserError
from tests.small import fit, random_data

RANKS = 2
CLIENTS = (6, 5, 4, 7)


def first_rank() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


class Heads(nn.Module):
    """A layer and heads, in an order of this rank's own where the test wants one."""

    def __init__(self, num_classes: int = 3, kind: str = "alike") -> None:
        super().__init__()
        own = kind if not first_rank() else "alike"
        self.layer = nn.Linear(4, num_classes)
        names = ["b", "a"] if own == "order" else ["a", "b"]
        width = 5 if own == "shape" else 3
        dtype = torch.float64 if own == "type" else torch.float32
        self.heads = nn.ModuleDict({n: nn.Linear(3, width, dtype=dtype) for n in names})
        for p in self.heads["a"].parameters():
            p.requires_grad_(own != "frozen")
        if kind == "drawn":
            rng = np.random.default_rng()
            for p in self.parameters():
                p.data = torch.tensor(rng.standard_normal(p.shape)).float()
            self.register_buffer("noise", torch.tensor(rng.random()), persistent=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Talks(L.LightningModule):
    """A client whose steps call a collective."""

    def __init__(self, how: str, stage: str = "train") -> None:
        super().__init__()
        self.layer, self.how, self.stage = nn.Linear(4, 3), how, stage

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return self.talk(loss) if self.stage == "train" else loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.talk(F.cross_entropy(self(batch[0]), batch[1])))

    def talk(self, loss: Tensor) -> Tensor:
        strategy = self.trainer.strategy
        if self.how == "reduce":
            loss = loss + 0 * strategy.reduce(loss.detach())
        elif self.how == "all_gather":
            loss = loss + 0 * self.all_gather(loss.detach()).mean()
        elif self.how == "barrier":
            strategy.barrier()
        elif self.how == "broadcast":
            strategy.broadcast(1)
        elif self.how == "decision":
            strategy.reduce_boolean_decision(True)
        elif self.how == "allreduce":
            dist.all_reduce(loss.detach().clone())
        elif self.how == "objects":
            dist.all_gather_object([None] * RANKS, 1)
        return loss


UNLIKE = {
    "order": r"rank 0 has net.heads.a.weight (3, 3) float32 where rank 1 has net.heads.b.weight",
    "shape": r"net.heads.a.weight (3, 3) float32 where rank 1 has net.heads.a.weight (5,",
    "type": r"where rank 1 has net.heads.a.weight (3, 3) float64",
    "frozen": r"where rank 1 has net.heads.a.weight (3, 3) float32, not trained",
}
OF_LIGHTNING = ("reduce", "all_gather", "barrier", "broadcast", "decision")
OF_TORCH = ("allreduce", "objects")


def federation_of(model: Any, **given: Any) -> Federation:
    groups = [ClientGroup(len(CLIENTS), model, name="g")]
    return Federation(FedAvg(), groups, optimizer=partial(SGD, lr=0.0), **given)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def play(rank: int, name: str, folder: Path) -> None:
    """What a rank does and writes: its error, what it logged, and its clients' start values."""
    model = (
        partial(Talks, name)
        if name in ("silent", *OF_LIGHTNING, *OF_TORCH)
        else partial(Heads, kind=name)
    )
    federation, handler, error = federation_of(model, evaluate=()), Lines(), ""
    logging.getLogger("lightfed").addHandler(handler)
    try:
        trainer = fit(federation, random_data(CLIENTS), folder / name, devices=RANKS)
    except UserError as refused:
        error = str(refused)
    found: dict[str, Any] = {"error": error, "lines": handler.lines}
    if not error:
        (state,) = federation.fleet.groups
        found["start"] = state.initial.floats.tolist()
        found["noise"] = float(getattr(getattr(state.module, "net", None), "noise", 0.0))
        found["loss"] = float(trainer.callback_metrics["train_loss"])
        found["end"] = federation.fleet.deployed(None).row(0).floats.tolist()
    (folder / f"{name}-{rank}.json").write_text(json.dumps(found))


JOBS = (*UNLIKE, "drawn", "alike", "silent", *OF_LIGHTNING, *OF_TORCH)


def main(folder: Path) -> None:
    for name in JOBS:
        assert wait(start_job(RANKS, partial(play, name=name, folder=folder))), name


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("agreement")
    in_new_process(main, folder)
    return {
        name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]
        for name in JOBS
    }


@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_tensors_are_one_line_on_every_rank(name: str, found: Any) -> None:
    for rank in found[name]:
        assert rank["error"].startswith("model.clients.0.model: ")
        assert UNLIKE[name] in rank["error"]


def test_unlike_start_values_are_those_of_rank_0(found: Any) -> None:
    first, second = found["drawn"]
    assert first["start"] == second["start"] == first["end"] == second["end"]
    assert first["noise"] == second["noise"] != 0.0
    assert any("cannot be repeated" in line for line in first["lines"])
    assert second["lines"] == []


def test_equal_networks_need_no_line(found: Any) -> None:
    for rank in found["alike"]:
        assert (rank["error"], rank["lines"]) == ("", [])


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_collective_in_a_step_is_refused_by_name(name: str, found: Any) -> None:
    said = {"objects": "allgather"}.get(name, name)
    for rank in found[name]:
        assert rank["error"].startswith("model.clients: a step calls ")
        assert said in rank["error"]


@pytest.mark.parametrize("name", OF_LIGHTNING)
def test_lightnings_collectives_are_those_of_a_fit_of_one_process(name: str, found: Any) -> None:
    """A session is one: there is nobody to add up with, whatever ranks train other clients."""
    first, second = found[name]
    assert (first["error"], second["error"]) == ("", "")
    assert first["loss"] == second["loss"] == found["silent"][0]["loss"]


@pytest.mark.parametrize("name", OF_LIGHTNING)
@pytest.mark.parametrize("stage", ["train", "validate"])
def test_so_they_are_on_one_rank(name: str, stage: str, tmp_path: Path) -> None:
    fit(federation_of(partial(Talks, name, stage)), random_data(CLIENTS), tmp_path)


@pytest.mark.parametrize(("kind", "lines"), [("alike", 0), ("drawn", 1)])
def test_one_rank_says_that_a_run_cannot_be_repeated(
    kind: str, lines: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(federation_of(partial(Heads, kind=kind), evaluate=()), random_data(CLIENTS), tmp_path)
    said = [r for r in caplog.records if r.name == agreement.__name__]
    assert len(said) == lines
    assert all("group g" in r.getMessage() for r in said)


def test_only_a_step_is_refused_a_collective() -> None:
    refuse_in_step("reduce")
    with step_under_way(), step_under_way():
        pass
    refuse_in_step("reduce")
    with step_under_way(), pytest.raises(UserError, match="a step calls reduce"):
        refuse_in_step("reduce")
