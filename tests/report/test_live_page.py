"""The page of a run that goes on."""

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
    assert "3 of 9 rounds, about 9 s left" in text
    callback.on_exception(_trainer(folder, 3), module, KeyboardInterrupt())
    assert REFRESH not in page.read_text()
    assert "Not finished: 3 of 9 rounds" in page.read_text()


def test_pages_take_a_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY", 0.0)
    monkeypatch.setattr(live, "SHARE", 1e-9)
    folder = write_run(tmp_path / "run", environment={**ENVIRONMENT, "rounds": 9})
    callback = LivePage()
    callback.on_train_epoch_start(_trainer(folder, 2), Any)
    (folder / "index.html").unlink()
    callback.on_train_epoch_start(_trainer(folder, 3), Any)
    assert not (folder / "index.html").exists()


def test_a_page_that_cannot_be_built_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "EVERY", 0.0)
    LivePage().on_train_epoch_start(_trainer(tmp_path / "none", 2), Any)
    assert "the page is not built" in caplog.text
