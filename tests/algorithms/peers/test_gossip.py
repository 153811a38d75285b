"""Rows from client to client: means, packages, and that ranks do not matter."""

from collections.abc import Mapping, Sequence
from functools import partial
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
    """Return random clients: their rows, their packed masks, and the masks as bools (count, P).

    What lies outside of a mask is 0.
    """
    rng = torch.Generator().manual_seed(seed)
    live = LAYOUT.floats.live()
    entries = {entry.name: entry for entry in LAYOUT.floats}
    rows = {}
    words = {}
    masks = torch.zeros(count, LAYOUT.size, dtype=torch.bool)
    for k in range(count):
        mask = live & (torch.rand(LAYOUT.size, generator=rng) < 0.5)
        whole_tensor = ("a", "b", "c", "bias")[k % 4]
        for name in ("mean", whole_tensor):
            entry = entries[name]
            mask[entry.offset : entry.offset + entry.numel] = True
        masks[k] = mask
        words[k] = pack_mask(mask)

        values = torch.randn(LAYOUT.size, generator=rng) * mask
        rows[k] = Row(values, torch.full((LAYOUT.integers.size,), k - 3, dtype=torch.int64))
    return rows, words, masks


def copies(rows: Mapping[int, Row]) -> dict[int, Row]:
    return {k: row.clone() for k, row in rows.items()}


def oracle(rows: Mapping[int, Row], masks: Tensor, heard: Sequence[int], over: Over) -> np.ndarray:
    """Return the mean of some clients' rows, element by element in float64."""
    values = torch.stack([rows[k].floats for k in heard]).double().numpy()
    covers = masks[list(heard)].numpy()
    total = np.where(covers, values, 0.0).sum(0)
    count = covers.sum(0) if over == "covered" else np.full(LAYOUT.size, len(heard))
    return np.where(count > 0, total / np.maximum(count, 1), 0.0)


def alone(count: int) -> Exchange:
    """Return an exchange of clients on one rank."""
    return Exchange(LAYOUT, Ranks(CPU), owner=dict.fromkeys(range(count), 0), device=CPU)


# Receiver -> whom it receives from. Client 3 is heard, but receives from nobody.
HEARS = {0: [1, 2], 1: [], 2: [0, 1, 3, 4], 4: [3]}


@pytest.mark.parametrize("over", ["covered", "neighbours"])
def test_receivers_get_the_mean_of_themselves_and_whom_they_hear(over: Over) -> None:
    rows, words, masks = clients(5, seed=0)
    before = copies(rows)
    kept_by = {k: (k + 1) % 5 for k in HEARS}  # receiver k keeps what this client's mask covers
    keep = {k: words[other] for k, other in kept_by.items()}
    alone(5).mean_(rows, HEARS, masks=words, keep=keep, over=over)

    for k, heard in HEARS.items():
        mean = oracle(before, masks, [k, *heard], over)
        expected = mean * masks[kept_by[k]].numpy()
        np.testing.assert_allclose(rows[k].floats.numpy(), expected, rtol=0, atol=1e-6)
        assert rows[k].integers[0] == max([k, *heard]) - 3
    assert torch.equal(rows[3].floats, before[3].floats)


def test_without_masks_it_is_the_plain_mean_and_a_package_is_the_row() -> None:
    rows, _, _ = clients(5, seed=1)
    before = copies(rows)
    sizes = alone(5).mean_(rows, HEARS, masks=None, keep=None, over="covered")
    for k, heard in HEARS.items():
        members = sorted({k, *heard})
        expected = torch.stack([before[member].floats for member in members]).mean(0)
        torch.testing.assert_close(rows[k].floats, expected, rtol=0, atol=1e-6)
    assert set(sizes.values()) == {4 * LAYOUT.floats.numel + 8}


def test_sums_run_over_the_clients_in_ascending_order() -> None:
    """In float32 (2^25 + 1) + 1 is 2^25 and (1 + 1) + 2^25 is not."""
    large = 2.0**25
    values = {0: (large, large), 1: (1.0, 1.0), 2: (1.0, 1.0), 3: (-large, 2.0)}
    rows = {}
    for k, pair in values.items():
        rows[k] = Row(LAYOUT.floats.new_row(), torch.zeros(LAYOUT.integers.size))
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
        assert same(found[k], expected[k])


def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Return whether two clients have the same floats and integers."""
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_nobody_hears_anybody() -> None:
    rows, words, _ = clients(3, seed=0)
    before = copies(rows)
    assert alone(3).mean_(rows, {}, masks=words, keep=words, over="covered") == {}
    assert all(torch.equal(rows[k].floats, before[k].floats) for k in rows)


def run(
    ranks: Ranks,
    owner: Mapping[int, int],
    hears: Mapping[int, Sequence[int]],
    *,
    masked: bool = True,
    keep: bool = False,
    over: Over = "covered",
    whole: bool = False,
) -> tuple[dict[int, tuple[Tensor, Tensor]], dict[int, int], float]:
    """Exchange the rows of a rank's clients.

    Args:
        ranks: The rank.
        owner: The rank of each client.
        hears: Receiver -> whom it receives from.
        masked: Whether clients have masks.
        keep: Whether receivers keep only what their masks cover.
        over: What sums are divided by.
        whole: Whether the rank's rows are given as one block.

    Returns:
        The floats and integers of this rank's clients, the bytes of packages, and the bytes that
        the rank has sent.
    """
    every_row, every_mask, _ = clients(len(owner), seed=2)
    rows = {k: row for k, row in every_row.items() if owner[k] == ranks.rank}
    words = {k: mask for k, mask in every_mask.items() if owner[k] == ranks.rank}
    block = None
    if whole and rows:
        floats = torch.stack([row.floats for row in rows.values()])
        integers = torch.stack([row.integers for row in rows.values()])
        block = Row(floats, integers)
        rows = dict(zip(rows, block.each(), strict=True))

    sizes = Exchange(LAYOUT, ranks, owner=owner, device=CPU).mean_(
        rows,
        hears,
        masks=words if masked else None,
        keep=words if keep else None,
        over=over,
        block=block,
    )
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
    exchange = partial(run, hears=hears, masked=masked, keep=keep and masked, over=over)
    expected, sizes, sent = exchange(Ranks(CPU), dict.fromkeys(range(6), 0))
    assert sent == 0

    owner = dict(enumerate(owners))
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for rows, sizes_on_rank, _ in on_ranks(3, lambda ranks: exchange(ranks, owner, whole=whole)):
        found |= rows
        assert sizes_on_rank == sizes
    for k in range(6):
        assert same(found[k], expected[k])


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
    # Two clients of rank 0 hear client 2, and two of rank 1 client 1: each is sent once.
    hears = {0: [2, 3], 1: [2], 2: [1], 3: [1]}
    (_, sizes, _), _ = on_ranks(2, lambda ranks: run(ranks, owner, hears))
    assert sum(swaps) == sizes[1] + sizes[2] + sizes[3]

    _, words, masks = clients(4, seed=2)
    for k in range(4):
        gaps = [e for e in layout.floats if not masks[k][e.offset : e.offset + e.numel].all()]
        mask_words = sum(-(-e.numel // 32) for e in gaps)
        assert sizes[k] == 4 * int(unpack_mask(words[k]).sum()) + 4 * mask_words
        assert 2 <= len(gaps) <= 3
