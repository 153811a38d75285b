"""Networks and settings against a bare torch loop: each case is right, or refused in one line.

The loop trains on the same order of samples and from the same seeds. Clients that train alone draw
what the loop draws, so they are compared number by number. The clients of a pack share a generator:
where the network draws, a pack may be as far from the loop as the loop is from itself with other
seeds. What trains alone under `auto` or a number has the bits of `off`.
"""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import TensorDataset
from typing_extensions import override

import lightfed as lf
from lightfed.utils.errors import UserError
from lightfed.utils.rng import derive_seed, torch_generator
from tests.promises.differential import bare
from tests.promises.differential.bare import CLASSES, Batches, Case
from tests.promises.differential.cases import CASES
from tests.tiers import by_default

ALONE, PACKED, HALF = 3e-4, 5e-4, 3e-2  # relative errors of the update; HALF in bfloat16
SIDES = ("off", "auto", 3)
TELLING = ("mlp_groups", "penalty_list", "masked_rows", "buffer_assigned", "bn_equal", "loss_slope")

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Trained:
    """The server's model; how many clients train at once, or why they do not; the run's log."""

    state: dict[str, Tensor] = field(repr=False)
    way: int | str
    notes: str = field(repr=False)


class EachRound(L.Callback):
    """Changes the clients' network at the start of a round."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        assert self.case.each_round is not None
        for group in pl_module.fleet.groups:
            self.case.each_round(group.module.net, trainer.current_epoch)


def data_module(case: Case) -> lf.FederatedDataModule:
    x, y = case.samples()
    owners = np.repeat(np.arange(len(case.sizes)), case.sizes)
    test, names = TensorDataset(x[:4].clone(), y[:4].clone()), [*map(str, range(CLASSES))]
    samples = lf.FromTorch(TensorDataset(x, y), test, classes=names, groups=list(owners))
    return lf.FederatedDataModule(
        samples, lf.Natural(), batch_size=case.batch, last_batch=case.last
    )


def batches_of(case: Case, data: lf.FederatedDataModule) -> Batches:
    """The batches of every session, as the data module cuts them."""
    found: dict[tuple[int, int], list[Tensor]] = {}
    for t, k in np.ndindex(case.rounds, len(case.sizes)):
        order = torch_generator(0, "order", t, k)
        for _ in range(case.epochs):
            plan = data.train_plan(k, order=order, augment=None, t=t)
            parts = torch.as_tensor(plan.index).split(list(plan.sizes))
            found.setdefault((t, k), []).extend(parts)
    return found


def run(case: Case, side: Any, data: lf.FederatedDataModule, folder: Path, log: Any) -> Any:
    """What lightfed trains, or the UserError that refuses it."""
    log.clear()
    clip, kind = case.clip or (None, "norm")
    try:
        federation = lf.Federation(
            lf.FedAvg(),
            clients=[lf.ClientGroup(len(case.sizes), case.built, name="g")],
            optimizer=case.optimizer,
            lr_schedule=case.schedule,
            local_epochs=case.epochs,
            evaluate=(),
            side_by_side=side,
        )
        trainer = lf.FederatedTrainer(
            name="run",
            max_epochs=case.rounds,
            accelerator="cpu",
            default_root_dir=str(folder),
            enable_checkpointing=False,
            enable_page=False,
            enable_progress_bar=False,
            gradient_clip_val=clip,
            gradient_clip_algorithm=kind,
            precision=case.precision,
            callbacks=[EachRound(case)] if case.each_round else None,
        )
        trainer.fit(federation, data)
    except UserError as refusal:
        return refusal
    way = json.loads((folder / "run" / "environment.json").read_text())["side_by_side"]["g"]
    (file,) = folder.rglob("server.safetensors")
    return Trained(load_file(file), way, log.text)


@pytest.mark.parametrize("name", by_default(CASES, *TELLING))
def test_no_case_is_silently_wrong(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    caplog.set_level(logging.INFO, logger="lightfed")
    data = data_module(case)
    runs = {side: run(case, side, data, tmp_path / str(side), caplog) for side in SIDES}
    refusals = {side: found for side, found in runs.items() if isinstance(found, UserError)}
    assert not any("\n" in str(refusal) for refusal in refusals.values()), refusals
    if case.refused or (case.may_refuse and "off" in refusals):
        assert [*refusals] == [*SIDES], runs
        assert all(each.key.endswith(case.refused or "") for each in refusals.values()), refusals
        return
    assert refusals.keys() <= {3}, refusals  # a number is refused where packs would be wrong
    faults = faults_of(case, runs, data)
    assert not faults, "; ".join(faults)


def faults_of(case: Case, runs: dict[Any, Any], data: lf.FederatedDataModule) -> list[str]:
    batches = batches_of(case, data)
    seeds = {(t, k): derive_seed(0, "session", t, k) for t, k in batches}
    start, right = case.built().state_dict(), bare.train(case, batches, seeds)
    off, faults = runs["off"].state, []
    for side, found in runs.items():
        packed = isinstance(found, Trained) and isinstance(found.way, int)
        if case.packed and side != "off" and not packed:
            faults.append(f"{side}: not packed, {getattr(found, 'way', found)}")
        if isinstance(found, UserError):
            continue
        if not packed and side != "off":
            same = all(torch.equal(off[name], found.state[name]) for name in off)
            faults += [] if same else [f"{side}: alone ({found.way}), not the bits of off"]
            continue
        bound = HALF if case.precision != "32" else PACKED if packed else ALONE
        if packed and case.draws:
            others = {session: seed + 1 for session, seed in seeds.items()}
            bound = 2 * bare.error(bare.train(case, batches, others), right, start)
        frozen = {name: start[name] for name in start.keys() - found.state.keys()}  # in no row
        error = bare.error({**frozen, **found.state}, right, start)
        warned = case.counts is not None and not packed and case.counts in found.notes
        if not error <= bound and not warned:
            faults.append(f"{side} ({found.way}): {error:.1e} off, {bound:.1e} is right")
    return faults
