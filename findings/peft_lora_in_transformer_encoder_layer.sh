#!/usr/bin/env bash
# peft 0.21.2 with torch 2.14.1: LoRA on the linear layers of nn.TransformerEncoderLayer has no effect in evaluation.
#
# In training the adapters take part. In eval mode torch's fast path computes the layer from
# `linear1.weight` and `linear2.weight`, and a wrapped layer of peft gives its base weight under that name.
# The outputs are then those of the base model to the bit, without an error or a warning: every evaluation
# and every prediction of the fine-tuned model is of the base. With
# torch.backends.mha.set_fastpath_enabled(False) both modes agree.
#
# Exit status 0: behaves as stated. 1: it has changed. It installs torch, which takes some minutes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 peft==0.21.2

cat >"$folder/encoder.py" <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x)


torch.manual_seed(0)
config = LoraConfig(r=4, target_modules=["linear1", "linear2"], init_lora_weights=False)
model = get_peft_model(Encoder(), config)
x = torch.randn(2, 5, 16)
with torch.no_grad():
    model.train()
    trained = model(x)
    model.eval()
    evaluated = model(x)
    with model.disable_adapter():
        base = model(x)
    torch.backends.mha.set_fastpath_enabled(False)
    slow = model(x)

print("evaluation equals the base model:", torch.equal(evaluated, base))
print("evaluation differs from training:", float((evaluated - trained).abs().max()) > 0.1)
print("without the fast path it does not:", float((slow - trained).abs().max()) < 1e-5)
PYTHON

cat >"$folder/stated" <<'TEXT'
evaluation equals the base model: True
evaluation differs from training: True
without the fast path it does not: True
TEXT

"$folder/venv/bin/python" "$folder/encoder.py" | tee "$folder/found"
if ! diff "$folder/stated" "$folder/found"; then
    echo "peft or torch has changed: see the lines above"
    exit 1
fi
echo "as stated"
