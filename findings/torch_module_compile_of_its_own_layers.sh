#!/usr/bin/env bash
# torch 2.11.0: `module.compile()` compiles nothing where the module's class is one of torch's own.
#
# `nn.Sequential(...).compile()`, `nn.Linear(...).compile()` and the like return without a message, and every later call runs
# uncompiled: the backend is never asked. A class of one's own around the same layers is compiled, and so are the same
# objects by `torch.compile(module)`. So a benchmark of `compile` on a network that is one nn.Sequential compares eager with eager.
# torch 2.14.1 and 2.15.0 ask the backend in all of these cases.
#
# It installs torch's default build, some gigabytes with its CUDA libraries; it needs no GPU.
#
# Exit status 0: behaves as stated. 1: it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0

cat >"$folder/count.py" <<'PYTHON'
import torch
from torch import nn


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, x):
        return self.layers(x)


def layers():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU())


asked = []


def backend(graph, inputs):
    asked.append(graph)
    return graph.forward


x = torch.ones(4, 2)
for name, module in (
    ("nn.Linear", nn.Linear(2, 3)),
    ("nn.Sequential", layers()),
    ("a class of one's own", Own()),
):
    asked.clear()
    module.compile(backend=backend)
    module(x)
    print(f"{name}: module.compile() asked the backend {len(asked)} times")

asked.clear()
torch.compile(layers(), backend=backend)(x)
print(f"nn.Sequential: torch.compile(module) asked the backend {len(asked)} times")
PYTHON

cat >"$folder/stated" <<'TEXT'
nn.Linear: module.compile() asked the backend 0 times
nn.Sequential: module.compile() asked the backend 0 times
a class of one's own: module.compile() asked the backend 1 times
nn.Sequential: torch.compile(module) asked the backend 1 times
TEXT

"$folder/venv/bin/python" "$folder/count.py" | tee "$folder/found"
if ! diff "$folder/stated" "$folder/found"; then
    echo "torch has changed: see the lines above"
    exit 1
fi
echo "as stated"
