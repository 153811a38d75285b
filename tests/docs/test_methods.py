"""The page of methods says what the code does."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lightfed
from tests.methods import methods

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    return importlib.import_module("methods")


def test_a_row_is_what_a_method_takes(page: Any) -> None:
    data = page.images()
    data.prepare(clients=page.CLIENTS, seed=0, device=torch.device("cpu"))
    found = {kind: page.answers(kind, data) for kind in (lightfed.HeteroFL, lightfed.QFFL)}
    assert all(set(row) == set(page.HEAD) for row in found.values())
    wide, fair = found.values()
    assert wide["widths"] == wide["server_step"] == wide["packs"] == "yes"
    assert "does not fit into the server model" in wide["own"]
    assert "different architectures" in fair["widths"]
    assert fair["server_step"] == lightfed.QFFL.no_server_step
    assert (wide["rows"], wide["masks"], wide["part"]) == ("-", "-", "-")


def test_every_method_has_a_row(page: Any) -> None:
    assert list(page.methods()) == methods()


@pytest.mark.matrix
def test_the_page_has_a_cell_for_every_question(page: Any) -> None:
    rows = [line for line in page.page().splitlines() if line.startswith("| `")]
    assert {line.split("`")[1] for line in rows} == set(page.methods())
    assert all(line.count("|") == len(page.HEAD) + 2 for line in rows)
