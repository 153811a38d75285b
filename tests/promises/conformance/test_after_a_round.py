"""What a user does with a run of any case: fine-tune, export, load what is exported, predict."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightfed.lab.previews.trainer import PreviewTrainer
from lightfed.testing.digest import fit
from lightfed.utils.errors import UserError
from tests.promises.conformance.cases import CASES
from tests.small import has_global_model

# Their clients keep rows though the class of the method says nothing of it.
KEEPING = (
    "devices_late", "devices_late_host", "fedavg_local_statistics", "fedbn", "feddpa",
    "feddpa_host", "fedper", "fedsalora", "late_fednova", "late_fedper", "late_moon", "late_qffl",
    "late_rankmean", "moon",
)  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("name", [n for n in CASES if n != "metric_objects"])  # no forward
def test_a_model_is_planned_tuned_exported_and_predicts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is exported, and its accuracy, is in tests/core/runs/test_exported_models.py."""
    case = CASES[name]
    keeps = case.algorithm().stateful or name in KEEPING
    kinds = ["global", "personal"] + ["finetuned"] * (not keeps)
    settings = {"export": ["server", "clients"], "evaluate": kinds}
    case = replace(case, federation=case.federation | settings)
    trainer, federation = fit(case, tmp_path, rounds=1, limit_train_batches=2)
    fleet = federation.fleet
    entries = json.loads((tmp_path / "run" / "models" / "models.json").read_text())
    assert {f"client{client}" for client in range(fleet.clients)} <= entries.keys()
    for client in (0, fleet.clients - 1):
        data = case.data()
        outputs = trainer.predict(federation, datamodule=data, client=client)
        assert sum(map(len, outputs)) == len(data.test_index(client))
        assert all(torch.isfinite(each).all() for each in outputs)
    if has_global_model(fleet):
        assert len(torch.cat(trainer.predict(federation, datamodule=case.data()))) > 0
    else:
        with pytest.raises(UserError):
            trainer.predict(federation, datamodule=case.data())
    planner = PreviewTrainer(accelerator="cpu", enable_progress_bar=False, **case.trainer)
    planner.plan(case.federation_of(), case.data(), world_size=2, rounds=2)
    assert "2 ranks" in capsys.readouterr().out
