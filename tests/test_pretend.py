"""The device of `pretend.py` finds what a card would not report."""

import pytest
import torch

from tests.pretend import DEVICE, pretended_device


def sent_and_written(*, waits: bool) -> None:
    """The host copies a row to the device, and writes there before it hears of the device."""
    with pytest.MonkeyPatch.context() as patches, pretended_device(patches):
        row = torch.ones(4)
        on_device = row.to(DEVICE, non_blocking=True)
        if waits:
            on_device.sum().item()
        row.fill_(2)


def test_the_host_must_not_write_where_a_copy_is_under_way() -> None:
    with pytest.raises(AssertionError, match="wrote where copies were under way"):
        sent_and_written(waits=False)
    sent_and_written(waits=True)
