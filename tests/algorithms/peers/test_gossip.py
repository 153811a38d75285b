"""Rows from client to client: means, packages, and that ranks do not matter."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightfed_kernels import Layout, pack_mask, unpack_mask
from torch import Tensor

from lightfed.algorithms.peers import gossip
from lightfed.algorithms.peers.gossip import Exchange, Over
from lightfed.distributed.collectives import Ranks
from lightfed.state.rows import ModelLayout, Row
from tests.core.distributed.threads import on_ranks
from tests.small import CPU

SHAPES = [("a", (40, 5)), ("bias", (7,)), ("b", (33, 9)), ("c", (64,))]
LAYOUT = ModelLayout(
    Layout.build([*SHAPES, ("mean", (5,))]), Layout.build([("count", ())]), parameters=4
)


def clients(count: int, seed: int) -> tuple[dict[int, Row], dict[int, Tensor], Tensor]:
    """Rows, packed masks, and the masks as bools; what lies outside of a mask is 0."""
    rng = torch.Generator().manual_seed(seed)
    live = LAYOUT.floats.live()
    rows, words = {}, {}
    masks = torch.zeros(count, LAYOUT.size, dtype=torch.bool)
    for k in range(count):
        mask = live & (torch.rand(LAYOUT.size, generator=rng) < 0.5)
        for name in ("mean", ("a", "b", "c", "bias")[k % 4]):  # tensors without a gap
            entry = next(e for e in LAYOUT.floats if e.name == name)
            mask[entry.offset : entry.offset + entry.numel] = True
        values = torch.randn(LAYOUT.size, generator=rng) * mask
        rows[k] = Row(values, torch.full((LAYOUT.integers.size,), k - 3, dtype=torch.int64))
        words[k], masks[k] = pack_mask(mask), mask
    return rows, words, masks


def copies(rows: Mapping[int, Row]) -> dict[int, Row]:
    return {k: Row(row.floats.clone(), row.integers.clone()) for k, row in rows.items()}


def oracle(rows: Mapping[int, Row], masks: Tensor, heard: Sequence[int], over: Over) -> np.ndarray:
    """Element by element, in float64."""
    values = torch.stack([rows[k].floats for k in heard]).double().numpy()
    covers = masks[list(heard)].numpy()
    count = covers.sum(0) if over == "covered" else np.full(LAYOUT.size, len(heard))
    total = np.where(covers, values, 0.0).sum(0)
    return np.where(count > 0, total / np.maximum(count, 1), 0.0)


def alone(count: int) -> Exchange:
    """An exchange of clients on one rank."""
    return Exchange(LAYOUT, Ranks(CPU), owner=dict.fromkeys(range(count), 0), device=CPU)


HEARS = {0: [1, 2], 1: [], 2: [0, 1, 3, 4], 4: [3]}


@pytest.mark.parametrize("over", ["covered", "neighbours"])
def test_receivers_get_the_mean_of_themselves_and_whom_they_hear(over: Over) -> None:
    rows, words, masks = clients(5, seed=0)
    before = copies(rows)
    keep = {k: words[(k + 1) % 5] for k in HEARS}
    alone(5).mean_(rows, HEARS, masks=words, keep=keep, over=over)
    for k, heard in HEARS.items():
        expected = oracle(before, masks, [k, *heard], over) * masks[(k + 1) % 5].numpy()
        np.testing.assert_allclose(rows[k].floats.numpy(), expected, rtol=0, atol=1e-6)
        assert rows[k].integers[0] == max([k, *heard]) - 3
    assert torch.equal(rows[3].floats, before[3].floats)  # heard, but no receiver


def test_without_masks_it_is_the_plain_mean_and_a_package_is_the_row() -> None:
    rows, _, _ = clients(5, seed=1)
    before = copies(rows)
    sizes = alone(5).mean_(rows, HEARS, masks=None, keep=None, over="covered")
    for k, heard in HEARS.items():
        expected = torch.stack([before[j].floats for j in sorted({k, *heard})]).mean(0)
        torch.testing.assert_close(rows[k].floats, expected, rtol=0, atol=1e-6)
    assert set(sizes.values()) == {4 * LAYOUT.floats.numel + 8}


def test_sums_run_over_the_clients_in_ascending_order() -> None:
    """In float32 (2^25 + 1) + 1 is 2^25 and (1 + 1) + 2^25 is not."""
    large = 2.0**25
    values = {0: (large, large), 1: (1.0, 1.0), 2: (1.0, 1.0), 3: (-large, 2.0)}
    rows = {k: Row(LAYOUT.floats.new_row(), torch.zeros(LAYOUT.integers.size)) for k in values}
    for k, pair in values.items():
        rows[k].floats[:2] = torch.tensor(pair)
    hears = {3: [2, 0, 1], 1: [3, 2, 0], 2: [1]}
    alone(4).mean_(rows, hears, masks=None, keep=None, over="covered")
    # At every receiver: ((2^25 + 1) + 1) - 2^25, and ((2^25 + 1) + 1) + 2.
    for receiver in (1, 3):
        assert rows[receiver].floats[:2].tolist() == [0.0, large / 4]
    assert rows[2].floats[:2].tolist() == [1.0, 1.0]


def test_means_replace_their_rows_a_few_columns_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hears = {k: [(k + 1) % 5, (k + 2) % 5] for k in range(5)}
    owner = dict.fromkeys(hears, 0)
    expected, _, _ = run(Ranks(CPU), owner, hears, whole=True)
    monkeypatch.setattr(gossip, "BLOCK_BYTES", 0)
    monkeypatch.setattr(gossip, "LEAST_BLOCK_COLUMNS", 32)
    found, _, _ = run(Ranks(CPU), owner, hears, whole=True)
    for k in hears:
        assert all(map(torch.equal, found[k], expected[k]))


def test_nobody_hears_anybody() -> None:
    rows, words, _ = clients(3, seed=0)
    before = copies(rows)
    assert alone(3).mean_(rows, {}, masks=words, keep=words, over="covered") == {}
    assert all(torch.equal(rows[k].floats, before[k].floats) for k in rows)


def run(
    ranks: Ranks, owner: Mapping[int, int], hears: Mapping[int, Sequence[int]], **how: Any
) -> tuple[dict[int, tuple[Tensor, Tensor]], dict[int, int], float]:
    rows, words, _ = clients(len(owner), seed=2)
    rows = {k: row for k, row in rows.items() if owner[k] == ranks.rank}
    block = None
    if how.get("whole") and rows:
        floats, integers = ([getattr(r, n) for r in rows.values()] for n in ("floats", "integers"))
        block = Row(torch.stack(floats), torch.stack(integers))
        rows = dict(zip(rows, block.each(), strict=True))
    words = {k: word for k, word in words.items() if owner[k] == ranks.rank}
    swap = Exchange(LAYOUT, ranks, owner=owner, device=CPU)
    keep = words if how.get("keep") else None
    masks = words if how.get("masks", True) else None
    over = how.get("over", "covered")
    sizes = swap.mean_(rows, hears, masks=masks, keep=keep, over=over, block=block)
    return {k: (row.floats, row.integers) for k, row in rows.items()}, sizes, ranks.wire_bytes


graphs = st.lists(
    st.tuples(st.integers(0, 5), st.sets(st.integers(0, 5), max_size=5)), min_size=1, max_size=6
)


@given(
    graph=graphs,
    owners=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    masked=st.booleans(),
    keep=st.booleans(),
    whole=st.booleans(),
    over=st.sampled_from(["covered", "neighbours"]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_ranks_give_the_same_bits(
    graph: list[tuple[int, set[int]]],
    owners: list[int],
    masked: bool,
    keep: bool,
    whole: bool,
    over: Over,
) -> None:
    hears = {k: sorted(heard - {k}) for k, heard in graph}
    how = {"masks": masked, "keep": keep and masked, "over": over}
    expected, sizes, sent = run(Ranks(CPU), dict.fromkeys(range(6), 0), hears, **how)
    assert sent == 0
    owner = dict(enumerate(owners))
    parts = on_ranks(3, lambda ranks: run(ranks, owner, hears, whole=whole, **how))
    found = {k: row for rows, _, _ in parts for k, row in rows.items()}
    for k in range(6):
        assert all(map(torch.equal, found[k], expected[k]))
    assert all(of_rank == sizes for _, of_rank, _ in parts)


def test_client_bytes_are_those_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ModelLayout(LAYOUT.floats, Layout.build([]), parameters=4)
    monkeypatch.setattr("tests.algorithms.peers.test_gossip.LAYOUT", layout)
    owner = {0: 0, 1: 0, 2: 1, 3: 1}
    swaps: list[int] = []
    genuine = Ranks.swap

    def spied(ranks: Ranks, parts: Any, sizes: Any) -> list[Tensor]:
        swaps.append(sum(4 * len(part) for r, part in enumerate(parts) if r != ranks.rank))
        return genuine(ranks, parts, sizes)

    monkeypatch.setattr(Ranks, "swap", spied)
    # 2 is heard twice by rank 0, 1 by rank 1: once sent.
    parts = on_ranks(2, lambda ranks: run(ranks, owner, {0: [2, 3], 1: [2], 2: [1], 3: [1]}))
    sizes = parts[0][1]
    assert sum(swaps) == sizes[1] + sizes[2] + sizes[3]
    _, words, masks = clients(4, seed=2)
    for k in range(4):
        gaps = [e for e in layout.floats if not masks[k][e.offset : e.offset + e.numel].all()]
        mask_words = sum(-(-e.numel // 32) for e in gaps)
        assert sizes[k] == 4 * int(unpack_mask(words[k]).sum()) + 4 * mask_words
        assert 2 <= len(gaps) <= 3
