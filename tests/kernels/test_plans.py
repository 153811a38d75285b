"""What the host prepares for a launch of `masked_mean` is prepared once."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightfed_kernels import _rows
from lightfed_kernels.masked_mean import Neighbours, masked_mean
from lightfed_kernels.masks import pack_mask

from tests.kernels.backends import INTERPRETED, NOT_INTERPRETED
from tests.kernels.mean_cases import bits, values

pytestmark = pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)

LISTS = [[0, 1, 2], [3], [4, 0]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[np.ndarray]]:
    """The tables that were sent to the device."""
    from lightfed_kernels.gpu import masked_mean as gpu

    tables: list[np.ndarray] = []
    real = _rows.to_device

    def noted(table: np.ndarray, device: torch.device) -> Any:
        tables.append(table)
        return real(table, device)

    monkeypatch.setenv("LIGHTFED_KERNELS", "triton")
    monkeypatch.setattr(_rows, "to_device", noted)
    gpu._plan.cache_clear()
    yield tables
    gpu._plan.cache_clear()


def test_a_table_is_sent_again_only_if_rows_masks_or_lists_change(sent: list[np.ndarray]) -> None:
    rows, words = values(5, 96), pack_mask(bits(5, 96, density=0.5, seed=3))
    neighbours = Neighbours.build(LISTS, senders=5)
    first = masked_mean(rows, neighbours, masks=words)
    rows.mul_(2)
    assert torch.equal(masked_mean(rows, neighbours, masks=words), 2 * first)
    assert len(sent) == 1

    masked_mean(rows.clone(), neighbours, masks=words)
    masked_mean(rows, neighbours, masks=words.clone())
    masked_mean(rows, neighbours)
    masked_mean(rows, Neighbours.build([[0, 1, 2], [3], [4, 1]], senders=5), masks=words)
    masked_mean(rows, neighbours, masks=words, receivers=words[:3])
    assert len(sent) == 6

    # Lists that a caller writes to are new lists.
    neighbours.index[0] = 4
    other = masked_mean(rows, neighbours, masks=words)
    assert len(sent) == 7
    assert not torch.equal(other[0], 2 * first[0])


def test_the_rule_that_is_asked_is_the_one_of_the_call(
    sent: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A benchmark replaces the rule: it must not be given what another rule has said."""
    from lightfed_kernels.gpu import masked_mean as gpu

    rows, neighbours = values(5, 352), Neighbours.build(LISTS, senders=5)
    for shares in (True, False):
        monkeypatch.setattr(gpu, "shared", lambda *sizes, shares=shares: shares)
        masked_mean(rows, neighbours)
    ends = [len(table.ravel()) for table in sent]
    assert ends[0] == ends[1] + 2 * 3  # what the longest list may read beyond the table


def test_tables_of_many_receivers_are_not_kept(
    sent: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightfed_kernels.gpu import masked_mean as gpu

    rows = values(2, 32)
    neighbours = Neighbours.build([[0], [1]], senders=2)
    monkeypatch.setattr(gpu, "_KEPT_BYTES", 8)
    masked_mean(rows, neighbours)
    masked_mean(rows, neighbours)
    assert len(sent) == 2


def test_what_is_written_apart_from_all_that_is_read_is_seen_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lightfed_kernels import _memory

    memory = torch.zeros(6, 64)
    rows, out = memory[:3], memory[3:]
    looked: list[str] = []
    real = _memory._spans

    def noted(name: str, some: Any) -> Any:
        looked.append(name)
        return real(name, some)

    monkeypatch.setattr(_memory, "_spans", noted)
    _memory.check_apart(("out", [out]), ("rows", [rows]))
    assert looked == []

    # Between each other, but in no common row: that is looked at row by row.
    _memory.check_apart(("out", [memory[::2]]), ("rows", [memory[1::2]]))
    assert looked == ["out", "rows"]
    with pytest.raises(ValueError, match="rows: shares memory with out"):
        _memory.check_apart(("out", [out]), ("rows", [memory[:4]]))
    with pytest.raises(ValueError, match="share memory; one is written twice"):
        _memory.check_apart(("out", [torch.zeros(32).expand(2, 32)]))
    with pytest.raises(ValueError, match="out: row 0 starts 4 bytes past"):
        _memory.check_apart(("out", [torch.zeros(65)[1:]]))
