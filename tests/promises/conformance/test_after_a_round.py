"""What a user does with a run of any case: fine-tune, export, load what is exported, predict."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightfed.testing.digest import fit
from lightfed.utils.errors import UserError
from tests.promises.conformance.cases import CASES
from tests.small import has_global_model, module_of

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.mark.matrix
@pytest.mark.parametrize("name", [n for n in CASES if n != "metric_objects"])  # no forward
def test_a_model_is_tuned_exported_and_predicts(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    kinds = ["global", "personal"] + ["finetuned"] * (not case.algorithm().stateful)
    settings = {"export": ["server", "clients"], "evaluate": kinds}
    case = replace(case, federation=case.federation | settings)
    trainer, federation = fit(case, tmp_path, rounds=1, limit_train_batches=2)
    fleet, (folder,) = federation.fleet, tmp_path.glob("run/models")
    for client in (0, fleet.clients - 1):
        saved = load_file(folder / f"client{client}.safetensors")
        base = folder / "base.safetensors"
        saved |= load_file(base) if base.is_file() else {}
        held = module_of(fleet, client).state_dict()
        names = {n if n in saved else n.removeprefix("net.") for n in held}
        # HeteroFL estimates statistics of batch norms for a test; they are in no row.
        assert set(saved) == {n for n in names if n in saved or not n.endswith(STATISTICS)}
        data = case.data()
        outputs = trainer.predict(federation, datamodule=data, client=client)
        assert sum(map(len, outputs)) == len(data.test_index(client))
        assert all(torch.isfinite(each).all() for each in outputs)
    if has_global_model(fleet):
        assert len(torch.cat(trainer.predict(federation, datamodule=case.data()))) > 0
    else:
        with pytest.raises(UserError):
            trainer.predict(federation, datamodule=case.data())
