#!/usr/bin/env bash
# Builds the distributions, and does what the docs promise with the wheel alone: in an empty folder, and in an environment that
# goes when this ends. Six minutes, and 6 GB of disk.
#
#     tests/wheel.sh [FOLDER]     FOLDER: where the distributions are kept; by default nowhere
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
unset PYTHONDONTWRITEBYTECODE PYTHONPATH # else every process compiles torch again, or finds the checkout
export OMP_NUM_THREADS=1

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
distributions=${1:-$scratch/dist}

step() {
    printf '\n== %s (%d s)\n' "$1" "$SECONDS"
}

# make_environment FOLDER PACKAGE...
make_environment() {
    local folder=$1
    shift
    if [[ -n $(command -v uv) ]]; then
        uv venv --quiet --seed --python "${PYTHON:-python3}" "$folder"
        uv pip install --quiet --python "$folder/bin/python" "$@"
    else
        "${PYTHON:-python3}" -m venv "$folder"
        "$folder/bin/pip" install --quiet "$@"
    fi
}

step "sdist and wheel"
make_environment "$scratch/tools" build twine
"$scratch/tools/bin/python" -m build --outdir "$distributions" . >"$scratch/build.log" 2>&1 || {
    tail -n 20 "$scratch/build.log"
    exit 1
}
tail -n 1 "$scratch/build.log"
"$scratch/tools/bin/twine" check --strict "$distributions"/*

step "an environment with the wheel and nothing else of this checkout"
make_environment "$scratch/venv" "$(ls "$distributions"/*.whl)" tensorboard # the tutorial has a line with it
export PATH=$scratch/venv/bin:$PATH
mkdir "$scratch/empty"
cd "$scratch/empty"
du -sh --apparent-size "$scratch/venv" | cut -f 1
lightfed --version
python - "$checkout" <<'PY'
import sys

import lightfed
import lightfed_kernels

for package in (lightfed, lightfed_kernels):
    print(package.__file__)
    assert not package.__file__.startswith(sys.argv[1]), "the checkout is imported"
PY

step "quickstart"
lightfed fit --config lightfed:quickstart | tail -n 4
test -s runs/quickstart/index.html

step "tutorial"
mkdir ../tutorial
cd ../tutorial
python - "$checkout/docs/tutorial.md" <<'PY'
import re
import sys
from pathlib import Path

commands = "set -euo pipefail\n"
for language, block in re.findall(r"```(\w+)\n(.*?)```", Path(sys.argv[1]).read_text(), re.DOTALL):
    named = re.match(r"# (mine\.\w+)\n", block)
    if named:
        Path(named[1]).write_text(block)
    elif language == "sh":
        commands += block
    else:
        Path("data.py").write_text(block)
Path("commands.sh").write_text(commands)
PY
bash -x commands.sh >output 2>&1 || {
    tail -n 20 output
    exit 1
}
grep -E '^\+ lightfed|^page' output
test -s runs/mine/index.html
test -n "$(find tensorboard -name 'events.*')"
python data.py

step "compare: one file, one change"
lightfed compare mine.yaml mine.yaml --set-b model.local_epochs=2 --seeds 0-1 | tail -n 3

step "a study of one's own"
cat >own-study.yaml <<'YAML'
title: two methods on digits
seconds: 5
seeds: 0-1
metric: global/accuracy
columns: [global/accuracy]
common:
  trainer: {max_epochs: 2, accelerator: cpu, enable_page: false}
  model:
    algorithm: FedAvg
    clients: [{count: 4, model: {class_path: mine.Net}}]
  data: {dataset: Digits, partition: Iid}
methods:
  FedAvg: {}
  FedProx: {model.algorithm: {class_path: FedProx, init_args: {mu: 0.1}}}
claims:
  - {better: FedProx, than: FedAvg, metric: global/accuracy}
YAML
lightfed study own-study.yaml | tail -n 12

step "a sweep of one's own"
mkdir ../sweep
cd ../sweep
printf 'fit --config lightfed:digits/%s --model.seed %s\n' fedavg 0 fedavg 1 standalone 0 standalone 1 >mine.sweep
lightfed sweep mine.sweep --jobs 2 --trainer.max_epochs 2 | tail -n 4
lightfed compare runs/* | tail -n 4

step "the scripts for a cluster"
lightfed slurm copy
for script in slurm/*.sh slurm/*.sbatch; do
    bash -n "$script"
done

step "tests of an algorithm of one's own"
cp "$checkout/examples/own_algorithm.py" .
cat >check.py <<'PY'
from lightfed.testing import conformance
from own_algorithm import FedAvgM

if __name__ == "__main__":
    conformance(FedAvgM)
    print("the same bits on 1, 2 and 4 ranks, and after a stop and a restart")
PY
python check.py 2>/dev/null | tail -n 1

step "done"
