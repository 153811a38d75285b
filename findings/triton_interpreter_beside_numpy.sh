#!/usr/bin/env bash
# triton 3.6.0 (which torch 2.11.0 requires): its interpreter cannot run a loop to a bound known at run time
# beside numpy 2.4.6, which pip installs by default.
#
# The interpreter holds scalars in arrays of one element and calls int() on them. numpy 2.4 refuses that for
# arrays that are not 0-dimensional, so a kernel with `for i in range(count)` ends in a TypeError under
# TRITON_INTERPRET=1. Beside numpy 2.3.5 the same kernel gives 6.0.
#
# Exit status 0: behaves as stated. 1: it has changed. It installs torch, which takes some minutes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"

cat >"$folder/loop.py" <<'PYTHON'
import numpy
import torch
import triton
import triton.language as tl


@triton.jit
def add_up(values, out, count):
    total = tl.zeros((), tl.float32)
    for i in range(count):
        total += tl.load(values + i)
    tl.store(out, total)


values = torch.arange(4, dtype=torch.float32)
out = torch.zeros(1)
try:
    add_up[(1,)](values, out, 4)
    result = out.item()
except Exception as error:
    result = repr(error.__cause__ or error)
print(f"triton {triton.__version__}, numpy {numpy.__version__}: {result}")
PYTHON

cat >"$folder/stated" <<'TEXT'
triton 3.6.0, numpy 2.4.6: TypeError('only 0-dimensional arrays can be converted to Python scalars')
triton 3.6.0, numpy 2.3.5: 6.0
TEXT

"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.4.6
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/loop.py" | tee "$folder/found"
"$folder/venv/bin/pip" install --quiet numpy==2.3.5
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/loop.py" | tee -a "$folder/found"
if ! diff "$folder/stated" "$folder/found"; then
    echo "triton or numpy has changed: see the lines above"
    exit 1
fi
echo "as stated"
