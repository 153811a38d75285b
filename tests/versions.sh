#!/usr/bin/env bash
# The default tier on another torch, in a new environment that goes when it ends; half an hour.
#
#     tests/versions.sh oldest [WORDS OF PYTEST]     the oldest torch that pyproject.toml allows, and its Triton
#     tests/versions.sh newest [WORDS OF PYTEST]     the newest that it allows
#     tests/versions.sh 2.15 [WORDS OF PYTEST]       one that it does not allow, over its pin
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # else every process compiles torch again
export OMP_NUM_THREADS=1

which=${1:?oldest, newest or a version of torch}
shift
pins=()
if [[ $which == oldest ]]; then
    pins=('torch==2.11.*' 'torchvision==0.26.*')
fi

environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/pip" install --quiet -e '.[dev,hf]' "${pins[@]}"
if [[ $which != oldest && $which != newest ]]; then
    # pip names the pins that this breaks, and goes on.
    "$environment/bin/pip" install --quiet "torch==$which.*"
fi

"$environment/bin/python" - <<'PY'
from lightfed.runs.environment import software

for name, version in software().items():
    print(name, version)
PY
"$environment/bin/pytest" "$@"
