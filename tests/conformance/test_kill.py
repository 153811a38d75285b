"""kill -9 of the whole job loses at most the round under way."""

import json
import subprocess
import sys
from pathlib import Path

from tests.conformance.killer import KILLS, ROUNDS


def test_a_killed_job_resumes_to_the_bits_of_one_that_lived(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.conformance.killer", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "kills.json").read_text())
    kills = [(name, r["straight"], kill) for name, r in results.items() for kill in r["kills"]]
    assert len(kills) == KILLS
    for name, straight, kill in kills:
        assert kill["digest"] == straight, (name, kill["ranks"])
        assert kill["rounds"] == ROUNDS, (name, kill["ranks"])
