#!/usr/bin/env bash
# The default tier on another torch, in an environment of its own; half an hour.
#
#     tests/versions.sh oldest [WORDS OF PYTEST]     the oldest torch that pyproject.toml allows, and its Triton
#     tests/versions.sh newest [WORDS OF PYTEST]     the newest that it allows
#     tests/versions.sh 2.15 [WORDS OF PYTEST]       one that it does not allow, over its pin
#
# The environment goes when the script ends. `VERSIONS_ENVIRONMENT=FOLDER tests/versions.sh ...` makes it in a
# folder that stays, and uses it again if it is there. uv installs it where there is uv, otherwise pip.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # else every process compiles torch again
export OMP_NUM_THREADS=1

which=${1:?oldest, newest or a version of torch}
shift
pins=()
over=()
case $which in
oldest) pins=('torch==2.11.*' 'torchvision==0.26.*') ;;
newest) ;;
*) over=("torch==$which.*") ;;
esac

environment=${VERSIONS_ENVIRONMENT:-}
if [[ -z $environment ]]; then
    environment=$(mktemp -d)
    trap 'rm -rf "$environment"' EXIT
elif [[ -d $environment && ! -f $environment/pyvenv.cfg && -n $(ls -A "$environment") ]]; then
    # It would be emptied below.
    echo "tests/versions.sh: VERSIONS_ENVIRONMENT: $environment holds something else; name a new folder" >&2
    exit 2
fi

install() {
    if command -v uv >/dev/null; then
        uv pip install --quiet --python "$environment/bin/python" "$@"
    else
        "$environment/bin/python" -m pip install --quiet "$@"
    fi
}

# The last step of the installation leaves this file: an environment without it is made anew.
complete=$environment/lightfed-$which
if [[ -f $complete ]]; then
    install -e . --no-deps # it may have been made for another checkout
else
    "${PYTHON:-python3}" -m venv --clear "$environment"
    install -e '.[dev,hf]' "${pins[@]}"
    if [[ ${#over[@]} -gt 0 ]]; then
        # --no-deps, and the packages that torch brings by themselves: pip would only warn of the
        # pins that this breaks, and uv refuses it.
        install "${over[@]}" --no-deps
        "$environment/bin/python" - >"$environment/of-torch.txt" <<'PY'
from importlib.metadata import requires

for requirement in requires("torch"):
    if "extra ==" not in requirement:
        print(requirement)
PY
        install -r "$environment/of-torch.txt"
        # transformers imports torchaudio wherever it is installed, and torchaudio refuses this torch.
        "$environment/bin/python" -m pip uninstall --quiet --yes torchaudio
    fi
    touch "$complete"
fi

"$environment/bin/python" - <<'PY'
from lightfed.runs.environment import software

for name, version in software().items():
    print(name, version)
PY
"$environment/bin/pytest" "$@"
