#!/usr/bin/env bash
# lightning 2.6.6 with jsonargparse 4.53.0: LightningCLI does not start a run with the callback Timer, unless its interval is given.
#
# Timer's argument `interval` is annotated `str`, and its default is a member of an enumeration, Interval.step. jsonargparse
# fills in the default. Before the first step LightningCLI saves the configuration; YAML has no form for the member, and the run
# ends in a traceback. With the same value in a word, `--trainer.callbacks.interval step`, the run is trained. It is the only
# callback of Lightning with such a default.
#
# It installs torch's default build, some gigabytes with its CUDA libraries; it needs no GPU.
#
# Exit status 0: behaves as stated. 1: it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 lightning==2.6.6 'jsonargparse[signatures]==4.53.0'

cat >"$folder/program.py" <<'PYTHON'
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def train_dataloader(self):
        return DataLoader(torch.ones(4, 2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        print("trained")


LightningCLI(Module)
PYTHON

cat >"$folder/defaults.py" <<'PYTHON'
import inspect
from enum import Enum

from lightning.pytorch import callbacks

for name in callbacks.__all__:
    for argument in inspect.signature(getattr(callbacks, name).__init__).parameters.values():
        if isinstance(argument.default, Enum):
            print(f"{name}: {argument}")
PYTHON

run() {
    local words=(--trainer.callbacks+=Timer --trainer.accelerator cpu --trainer.max_epochs 1 --trainer.logger false)
    words+=(--trainer.enable_checkpointing false --trainer.enable_progress_bar false --trainer.enable_model_summary false)
    (cd "$folder" && rm -f config.yaml && venv/bin/python program.py fit "${words[@]}" "$@" 2>errors) || true
    grep -o "^yaml.representer.RepresenterError: .*" "$folder/errors" || true
}

{
    "$folder/venv/bin/python" "$folder/defaults.py"
    echo "by default:"
    run
    echo "given:"
    run --trainer.callbacks.interval step
} | tee "$folder/found"

cat >"$folder/stated" <<'TEXT'
Timer: interval: str = <Interval.step: 'step'>
by default:
yaml.representer.RepresenterError: ('cannot represent an object', <Interval.step: 'step'>)
given:
trained
TEXT

if ! diff "$folder/stated" "$folder/found"; then
    echo "lightning or jsonargparse has changed: see the lines above"
    exit 1
fi
echo "as stated"
