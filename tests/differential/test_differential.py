"""Networks and settings against a bare torch loop: each case is right, or refused in one line.

The loop trains on the same order of samples and from the same seeds. Clients that train alone draw
what the loop draws, so they are compared number by number. The clients of a pack share a generator:
where the network draws, a pack may be as far from the loop as the loop is from itself with other
seeds. What trains alone under `auto` or a number has the bits of `off`.
"""

import json
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import TensorDataset

import lightfed as lf
from lightfed.utils.errors import UserError
from lightfed.utils.rng import derive_seed, torch_generator
from tests.differential import bare
from tests.differential.bare import Batches, Case
from tests.differential.cases import CASES
from tests.tiers import by_default

ALONE, PACKED = 3e-4, 5e-4  # relative errors of the update, in float32
HALF = 3e-2  # the same in bfloat16, of either

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Run:
    """What a run of lightfed gives: a model, or the line that refuses it.

    `way` is how many clients train at once, or why they do not.
    """

    state: dict[str, Tensor] | None = None
    way: int | str = ""
    line: str = ""
    key: str = ""
    notes: str = ""


class EachRound(L.Callback):
    """Changes the clients' network at the start of a round."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        assert self.case.each_round is not None
        for group in pl_module.fleet.groups:
            self.case.each_round(group.module.net, trainer.current_epoch)


def data_module(case: Case) -> lf.FederatedDataModule:
    x, y = case.samples()
    owners = np.repeat(np.arange(len(case.sizes)), case.sizes)
    test = TensorDataset(x[:4].clone(), y[:4].clone())
    names = [str(label) for label in range(bare.CLASSES)]
    return lf.FederatedDataModule(
        lf.FromTorch(TensorDataset(x, y), test, classes=names, groups=list(owners)),
        lf.Natural(),
        batch_size=case.batch,
        last_batch=case.last,
    )


def orders(case: Case, data: lf.FederatedDataModule) -> Batches:
    """The batches of every session, as the data module cuts them."""
    found = {}
    for t in range(case.rounds):
        for k in range(len(case.sizes)):
            order = torch_generator(0, "order", t, k)
            found[t, k] = batches = []
            for _ in range(case.epochs):
                plan = data.train_plan(k, order=order, augment=None, t=t)
                batches += torch.as_tensor(plan.index).split(list(plan.sizes))
    return found


def lightfed_run(
    case: Case, side: Any, folder: Path, data: lf.FederatedDataModule, caplog: Any
) -> Run:
    caplog.clear()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            federation = lf.Federation(
                lf.FedAvg(),
                clients=[lf.ClientGroup(len(case.sizes), case.built, name="g")],
                optimizer=case.optimizer,
                lr_schedule=case.schedule,
                local_epochs=case.epochs,
                evaluate=(),
                side_by_side=side,
            )
            clip, kind = case.clip or (None, "norm")
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
        return Run(line=str(refusal), key=refusal.key)
    way = json.loads((folder / "run" / "environment.json").read_text())["side_by_side"]["g"]
    (file,) = folder.rglob("server.safetensors")
    notes = [record.getMessage() for record in caplog.records]
    notes += [str(warning.message) for warning in warned]
    return Run(load_file(file), way, notes="\n".join(notes))


TELLING = (
    "mlp_groups",
    "penalty_list",
    "masked_rows",
    "buffer_assigned",
    "bn_equal",
    "frozen_later",
)


@pytest.mark.parametrize("name", by_default(CASES, *TELLING))
def test_no_case_is_silently_wrong(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    caplog.set_level(logging.INFO, logger="lightfed")
    data = data_module(case)
    sides: tuple[Any, ...] = ("off", "auto", 3)
    runs = {side: lightfed_run(case, side, tmp_path / str(side), data, caplog) for side in sides}
    faults = _faults(case, runs, data)
    print(f"{name}: " + "; ".join(f"{side}: {run.way or run.line}" for side, run in runs.items()))
    assert not faults, "; ".join(faults)


def _faults(case: Case, runs: dict[Any, Run], data: lf.FederatedDataModule) -> list[str]:
    off = runs["off"]
    if case.refused or off.state is None:
        expected = case.refused or ("" if case.may_refuse else "no refusal")
        odd = {s: r for s, r in runs.items() if r.state is not None or not r.key.endswith(expected)}
        return [f"{side}: {run.line or 'not refused'}" for side, run in odd.items()]
    batches = orders(case, data)
    seeds = {(t, k): derive_seed(0, "session", t, k) for t, k in batches}
    start, right = case.built().state_dict(), bare.train(case, batches, seeds)
    half = case.precision == "bf16-mixed"
    faults = []
    for side, run in runs.items():
        if run.state is None:
            if side == "auto":
                faults.append(f"auto refuses what off trains: {run.line}")
            continue
        if isinstance(run.way, str) and side != "off":
            same = all(torch.equal(off.state[name], run.state[name]) for name in off.state)
            faults += [] if same else [f"{side}: alone ({run.way}), not the bits of off"]
            continue
        packed = isinstance(run.way, int)
        bound = HALF if half else PACKED if packed else ALONE
        if packed and case.draws:
            other = {each: seed + 1 for each, seed in seeds.items()}
            bound = 2 * bare.error(bare.train(case, batches, other), right, start)
        found = bare.error(run.state, right, start)
        told = case.counts is not None and not packed and case.counts in run.notes
        if not found <= bound and not told:
            faults.append(f"{side} ({run.way}): {found:.1e} off, {bound:.1e} is right")
    if case.packed and not isinstance(runs["auto"].way, int):
        faults.append(f"auto: not packed, {runs['auto'].way}")
    return faults
