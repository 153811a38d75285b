"""The page of a run that goes on."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightfed.report import live
from lightfed.report.live import LivePage
from tests.report.make_run import ENVIRONMENT, write_run

REFRESH = '<meta http-equiv="refresh"'


def _trainer(folder: Path, epoch: int) -> Any:
    logger = SimpleNamespace(folder=folder)
    return SimpleNamespace(run_logger=logger, is_global_zero=True, current_epoch=epoch)


def test_a_page_reloads_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY", 0.0)
    folder = write_run(tmp_path / "run", environment={**ENVIRONMENT, "rounds": 9})
    page, callback, module = folder / "index.html", LivePage(), Any
    callback.on_train_epoch_start(_trainer(folder, 0), module)
    assert not page.exists()
    callback.on_train_epoch_start(_trainer(folder, 3), module)
    text = page.read_text()
    assert REFRESH in text
    assert "3 of 9 rounds, about 9.00 s left" in text
    assert 'data-written="' in text
    assert ">running<" in (tmp_path / "index.html").read_text()
    callback.on_exception(_trainer(folder, 3), module, KeyboardInterrupt())
    assert REFRESH not in page.read_text()
    assert "not finished: 3 of 9 rounds" in page.read_text()
    assert ">not finished<" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize(
    ("seconds", "cost", "oldest"),
    [(30.0, 0.1, 30.0), (1.0, 0.1, live.EVERY), (1.0, 0.9, 45.0), (4.0, 0.0, live.EVERY)],
)
def test_a_page_is_as_old_as_a_round_ten_seconds_or_fifty_builds(
    monkeypatch: pytest.MonkeyPatch, seconds: float, cost: float, oldest: float
) -> None:
    """A clock of its own: rounds last `seconds`, and building a page `cost`."""
    clock, pages = [0.0], []
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    callback = LivePage()

    def build(trainer: Any, *, live: bool) -> None:
        pages.append(clock[0])
        clock[0] += cost

    monkeypatch.setattr(callback, "_build", build)
    for number in range(100):
        callback.on_train_epoch_start(_trainer(Path(), number), Any)
        clock[0] += seconds
    ages = [later - earlier for earlier, later in pairwise(pages)]
    assert max(ages) <= oldest + cost + 1e-6
    assert min(ages) > oldest - seconds - cost


def test_a_page_that_cannot_be_built_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "EVERY", 0.0)
    LivePage().on_train_epoch_start(_trainer(tmp_path / "none", 2), Any)
    assert "the page is not built" in caplog.text
