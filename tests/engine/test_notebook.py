"""A notebook is one rank."""

import sys

import pytest

import lightfed as lf
from lightfed.utils.errors import UserError


@pytest.mark.parametrize("devices", [1, 2])
def test_several_ranks_in_a_notebook_are_refused(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # of a run of another test
    if devices == 1:
        assert lf.FederatedTrainer(accelerator="cpu", devices=1).strategy.launcher is None
        return
    with pytest.raises(UserError, match="lightfed fit") as refused:
        lf.FederatedTrainer(accelerator="cpu", devices=devices)
    assert refused.value.key == "trainer.devices"
