"""Rows that move where that pays change no bit."""

import json
from pathlib import Path

from lightfed.testing.ranks import in_new_process
from tests.promises.conformance.moving import ROUNDS, WORLDS, main


def test_rows_that_move_give_the_bits_of_one_rank(tmp_path: Path) -> None:
    in_new_process(main, tmp_path)
    alone, none = json.loads((tmp_path / "0-of-1.json").read_text())
    assert none == [0] * ROUNDS
    for ranks in WORLDS[1:]:
        for rank in range(ranks):
            found, moved = json.loads((tmp_path / f"{rank}-of-{ranks}.json").read_text())
            assert found == alone, (rank, ranks)
            assert moved[0] == 0  # nothing is measured yet
            assert sum(moved) > 0
