#!/usr/bin/env bash
# jsonargparse 4.53.0: the dump of an argument of type `Callable | str` replaces the user's word by a sentence.
#
# A word that names no callable, such as a folder, is accepted and kept as a str. `dump` then writes
# "Unable to serialize instance" in front of it, as a value, with no error (only a Python warning). The file
# parses again without complaint, with the sentence as the word, so a saved configuration silently names
# another thing. With the members in the other order, `str | Callable`, the word is written as it is.
#
# Exit status 0: behaves as stated. 1: it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jsonargparse==4.53.0

cat >"$folder/roundtrip.py" <<'PYTHON'
import warnings
from collections.abc import Callable

from jsonargparse import ArgumentParser

warnings.simplefilter("ignore")
for kind in (Callable | str, str | Callable):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--model", type=kind)
    given = parser.parse_args(["--model=./checkpoints"]).model
    text = parser.dump(parser.parse_args(["--model=./checkpoints"]))
    again = parser.parse_string(text).model
    print(f"{given!r} written as {text.strip()!r} read as {again!r}")
PYTHON

cat >"$folder/stated" <<'TEXT'
'./checkpoints' written as 'model: Unable to serialize instance ./checkpoints' read as 'Unable to serialize instance ./checkpoints'
'./checkpoints' written as 'model: ./checkpoints' read as './checkpoints'
TEXT

"$folder/venv/bin/python" "$folder/roundtrip.py" | tee "$folder/found"
if ! diff "$folder/stated" "$folder/found"; then
    echo "jsonargparse has changed: see the lines above"
    exit 1
fi
echo "as stated"
