"""kill -9 of the whole job loses at most the round under way."""

import json
from pathlib import Path

import pytest

from lightfed.testing.ranks import in_new_process
from tests.promises.conformance import killed_packs, killer


@pytest.mark.parametrize("number", [3, pytest.param(10, marks=pytest.mark.matrix)])
def test_a_killed_job_resumes_to_the_bits_of_one_that_lived(number: int, tmp_path: Path) -> None:
    in_new_process(killer.main, tmp_path, number)
    results = json.loads((tmp_path / "kills.json").read_text())
    kills = [(name, r["straight"], kill) for name, r in results.items() for kill in r["kills"]]
    assert len(kills) == number
    for name, straight, kill in kills:
        assert kill["digest"] == straight, (name, kill["ranks"])
        assert kill["rounds"] == killer.ROUNDS, (name, kill["ranks"])


@pytest.mark.matrix
@pytest.mark.timeout(1500)
def test_packs_of_any_size_on_any_ranks_survive_a_kill_within_one(tmp_path: Path) -> None:
    in_new_process(killed_packs.main, tmp_path)
    for size, runs in json.loads((tmp_path / "digests.json").read_text()).items():
        for name, found in runs.items():
            assert found == runs["1 ranks"], (size, name)
