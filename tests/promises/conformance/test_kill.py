"""kill -9 of the whole job loses at most the round under way."""

import json
from pathlib import Path

import pytest

from tests.forked import in_new_process
from tests.promises.conformance.killer import ROUNDS, main


@pytest.mark.parametrize(
    ("number", "group"),
    [
        (3, "plain"),
        pytest.param(6, "hooked", marks=pytest.mark.matrix),
        pytest.param(7, "beyond", marks=pytest.mark.matrix),
        pytest.param(10, "plain", marks=pytest.mark.matrix),
    ],
)
def test_a_killed_job_resumes_to_the_bits_of_one_that_lived(
    number: int, group: str, tmp_path: Path
) -> None:
    in_new_process(main, tmp_path, number, group)
    results = json.loads((tmp_path / "kills.json").read_text())
    kills = [(name, r["straight"], kill) for name, r in results.items() for kill in r["kills"]]
    assert len(kills) == number
    for name, straight, kill in kills:
        assert kill["digest"] == straight, (name, kill["ranks"])
        assert kill["rounds"] == ROUNDS, (name, kill["ranks"])
