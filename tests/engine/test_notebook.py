"""A notebook is one rank."""

import sys

import pytest

import lightfed as lf
from lightfed.utils.errors import UserError


def test_several_ranks_in_a_notebook_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # of a run of another test
    assert lf.FederatedTrainer(accelerator="cpu", devices=1).strategy.launcher is None
    with pytest.raises(UserError, match="lightfed fit") as refused:
        lf.FederatedTrainer(accelerator="cpu", devices=2)
    assert refused.value.key == "trainer.devices"
