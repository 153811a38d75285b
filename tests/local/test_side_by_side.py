"""The list of configurations whose clients train side by side."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests import side_by_side

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


@pytest.mark.parametrize(
    ("options", "way"), [([], "no packs, 2 clients in a round"), (["--clients", "2"], "packs of 2")]
)
def test_a_line_says_how_each_group_is_trained(
    options: list[str],
    way: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(side_by_side, "stand_ins", nullcontext)  # the digits are installed
    side_by_side.main([*options, QUICKSTART])
    assert f"| quickstart | a, b, c, d, e: {way} |" in capsys.readouterr().out.splitlines()
