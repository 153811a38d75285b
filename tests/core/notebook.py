"""The cells of the example on two forked ranks and on one; mistakes and Ctrl-C in between.

`python -m tests.core.notebook` runs in an empty folder, as a process that looks interactive.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file
from torch.multiprocessing.spawn import ProcessException
from typing_extensions import override

import lightfed as lf
from lightfed.utils import signals
from lightfed.utils.errors import UserError
from tests.small import quiet

CELLS = json.loads((Path(__file__).parents[2] / "examples/own_module.ipynb").read_text())["cells"]


def run_cells(devices: int) -> dict[str, Any]:
    """The names that the cells leave."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "clear the outputs"
            exec("".join(cell["source"]).replace("devices=2", f"devices={devices}"), names)
    return names


class Stops(Callback):
    """Interrupts the notebook after the first round, or makes a mistake."""

    def __init__(self, mistake: BaseException | None = None) -> None:
        self.mistake = mistake

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.mistake is not None:
            raise self.mistake
        if trainer.current_epoch == 1 and trainer.is_global_zero:
            os.kill(os.getppid(), signal.SIGINT)
            while not signals.asked():  # until it is passed on
                time.sleep(0.01)


def trainer_of(*callbacks: Callback, devices: int = 2, **flags: Any) -> lf.FederatedTrainer:
    return lf.FederatedTrainer(
        name="stops", max_epochs=3, accelerator="cpu", devices=devices, callbacks=list(callbacks),
        enable_progress_bar=False, enable_page=False, **flags,
    )  # fmt: skip


def federation() -> lf.Federation:
    groups = [lf.ClientGroup(4, partial(lf.MLP, hidden=[8]))]
    sgd = partial(torch.optim.SGD, lr=0.1)
    return lf.Federation(lf.Standalone(), clients=groups, optimizer=sgd)


def check_cells() -> None:
    """Two forked ranks leave in the notebook what one rank leaves."""
    two, one = run_cells(2), run_cells(1)
    folders = [Path(names["trainer"].run_logger.folder) for names in (two, one)]
    tables = [(folder / "clients.csv").read_text() for folder in folders]
    assert tables[0] == tables[1]
    assert json.loads((folders[0] / "environment.json").read_text())["ranks"] == 2
    states = [names["federation"].state_dict() for names in (two, one)]
    assert all(torch.equal(state, states[1][name]) for name, state in states[0].items())
    (saved,) = (load_file(path) for path in (folders[0] / "models").glob("*.safetensors"))
    held = torch.cat([saved[name].flatten() for name in saved if saved[name].is_floating_point()])
    (floats,) = (v for k, v in states[0].items() if k.endswith("model.floats"))
    assert held[held != 0].sort().values.equal(floats[floats != 0].sort().values)  # it is padded
    assert torch.equal(torch.cat(two["outputs"]), torch.cat(one["outputs"]))
    assert two["trainer"].callback_metrics == one["trainer"].callback_metrics
    assert two["trainer"].current_epoch == one["trainer"].current_epoch == 3
    assert two["last"]["accuracy"].mean() > 0.3
    with pytest.raises(UserError, match="model: a Federation that has run"):
        trainer_of().fit(two["federation"], two["data"])


def check_mistakes() -> None:
    """Errors of ranks arrive in the notebook; what cannot work is refused before."""
    data = lf.FederatedDataModule(lf.Digits(), lf.Dirichlet(0.5), batch_size=32)
    with pytest.raises(UserError, match=r"trainer\.enable_checkpointing"):
        trainer_of(enable_checkpointing=False).fit(federation(), data)
    with pytest.raises(UserError, match="its key: found; its fix"):
        trainer_of(Stops(UserError("its key", "found", "its fix"))).fit(federation(), data)
    with pytest.raises(ProcessException, match="ZeroDivisionError: of a rank"):
        trainer_of(Stops(ZeroDivisionError("of a rank"))).fit(federation(), data)
    gpus = trainer_of()
    gpus.strategy.forks = [torch.device("cuda", i) for i in range(2)]
    with pytest.raises(UserError, match=r"trainer\.devices: 2 in a notebook.*no GPU"):
        gpus.fit(federation(), data)


def check_interrupt() -> None:
    """Ctrl-C saves, and the next cell goes on with the bits of a run that was never stopped."""
    data = lf.FederatedDataModule(lf.Digits(), lf.Dirichlet(0.5), batch_size=32)
    with pytest.raises(SystemExit, match="130"):
        trainer_of(Stops()).fit(federation(), data)
    again, straight = trainer_of(), trainer_of(devices=1)
    again.fit(federation(), data, ckpt_path="last")
    straight.fit(federation(), data)
    clients = [trainer.results.clients for trainer in (again, straight)]
    assert again.resumes_from is not None
    assert clients[0].equals(clients[1])
    for client in range(4):
        outputs = [
            t.predict(t.federation, datamodule=data, client=client) for t in (again, straight)
        ]
        assert torch.equal(torch.cat(outputs[0]), torch.cat(outputs[1]))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in the background
    quiet()
    sys.ps1 = ">>> "
    check_cells()
    check_mistakes()
    check_interrupt()
