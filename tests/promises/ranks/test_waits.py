"""A round on several ranks waits once for their sessions, and where rows are added or sent."""

import json
from pathlib import Path

import pytest

from lightfed.testing.ranks import in_new_process
from tests.promises.ranks.waits import CASES, ROUNDS, main

SESSIONS = "the end of the sessions of round {}"
ADDED = "an all-reduce"
COLLECTIVES = {
    "fedavg": [SESSIONS, ADDED],
    "heterofl": [SESSIONS, ADDED],
    # Elements under the masks, the rows, and then the sessions.
    "dispfl": [ADDED, "an exchange of rows", SESSIONS],
    # Tests; where a checkpoint goes, which is written beside training.
    "whole": [SESSIONS, ADDED, "a gather", "a broadcast"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("waits")
    in_new_process(main, made)
    return made


@pytest.mark.parametrize("name", CASES)
def test_ranks_wait_for_each_other_as_often_as_they_must(name: str, folder: Path) -> None:
    found = json.loads((folder / f"{name}.json").read_text())
    assert len(found) == ROUNDS
    # The first round may replace a journal, the last one has the end of the run.
    assert found[1] == [what.format(1) for what in COLLECTIVES[name]]
