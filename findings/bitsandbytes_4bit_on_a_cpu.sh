#!/usr/bin/env bash
# bitsandbytes 0.50.2 with torch 2.14.1: after one evaluation on a CPU, nothing below a 4-bit layer is trained any more.
#
# On a CPU with AVX512-BF16 the first call of a Linear4bit in eval mode, on an input without gradients, packs its
# weight in place for another kernel, also for calls in training. That kernel has no backward pass. In later
# training steps the loss still falls to whatever lies behind the layer; what lies before it, such as the adapters of
# earlier layers, gets no gradient (None), without an error or a warning. Before that call all gradients are there.
#
# Exit status 0: behaves as stated. 1: it has changed. 2: this CPU has no AVX512-BF16, so that nothing is packed.
# It installs torch, which takes some minutes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 bitsandbytes==0.50.2

cat >"$folder/packed.py" <<'PYTHON'
import sys

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import has_avx512bf16
from torch import nn

if not has_avx512bf16():
    sys.exit(2)


class Adapted(nn.Module):
    """A low-rank adapter before a frozen 4-bit layer, and a head behind it."""

    def __init__(self):
        super().__init__()
        self.A = nn.Linear(128, 8, bias=False)
        self.B = nn.Linear(8, 128, bias=False)
        self.layer = bnb.nn.Linear4bit(
            128, 128, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16
        )
        self.layer.requires_grad_(False)
        self.head = nn.Linear(128, 1)

    def forward(self, x):
        return self.head(self.layer(x + self.B(self.A(x))).float())


def trained(net, x):
    """Names of the layers that get a gradient in a training step."""
    net.zero_grad(set_to_none=True)
    net.train()
    net(x).square().sum().backward()
    return [name for name in ("A", "B", "head") if getattr(net, name).weight.grad is not None]


torch.manual_seed(0)
net = Adapted().to("cpu")  # this quantizes the layer
x = torch.randn(4, 128)
print("shape of the weight:", tuple(net.layer.weight.shape), "trained:", *trained(net, x))
net.eval()
with torch.no_grad():
    net(x)
print("after an evaluation:", tuple(net.layer.weight.shape), "trained:", *trained(net, x))
PYTHON

cat >"$folder/stated" <<'TEXT'
shape of the weight: (8192, 1) trained: A B head
after an evaluation: (128, 64) trained: head
TEXT

status=0
"$folder/venv/bin/python" "$folder/packed.py" 2>"$folder/errors" >"$folder/found" || status=$?
if [ "$status" = 2 ]; then
    echo "this CPU has no AVX512-BF16: nothing can be shown here"
    exit 2
fi
cat "$folder/found"
if ! diff "$folder/stated" "$folder/found"; then
    cat "$folder/errors"
    echo "bitsandbytes or torch has changed: see the lines above"
    exit 1
fi
echo "as stated"
