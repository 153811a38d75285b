"""Random selection: uniform, without replacement, and another draw with every seed."""

import math

import numpy as np
import pytest
import torch
from lightfed_kernels import Layout
from lightfed_kernels.masks import pack_mask, unpack_mask
from lightfed_kernels.segments import Segments
from lightfed_kernels.select import select_random
from torch import Tensor


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels choose the same bits, see test_select."""
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")


def layout_of(size: int) -> Layout:
    return Layout.build([("t", (size,))])


def drawn(mask: Tensor, count: int, layout: Layout, seeds: range) -> np.ndarray:
    """(seeds, size) bool."""
    segments = Segments.build(layout)
    words = pack_mask(mask)
    masks = [unpack_mask(select_random(words, [count], segments, seed=s)) for s in seeds]
    return torch.stack(masks).numpy()


def test_random_choice_is_uniform_and_pairs_are_independent() -> None:
    layout = layout_of(60)
    mask = torch.zeros(layout.size, dtype=torch.bool)
    mask[:60:2] = mask[1:20:2] = True
    n, k, trials = 40, 10, 3000
    chosen = drawn(mask, k, layout, range(trials))
    assert (chosen.sum(1) == k).all()
    assert not chosen[:, ~mask.numpy()].any()
    some = chosen[:, mask.numpy()].astype(np.float64)
    # How often each is chosen: chi-square with n - 1 degrees of freedom, about N(39, 2 * 39).
    p = k / n
    single = (some.sum(0) - trials * p) ** 2 / (trials * p * (1 - p)) * (n - 1) / n
    assert abs(single.sum() - (n - 1)) < 4 * math.sqrt(2 * (n - 1))
    # How often each pair is chosen.
    both = p * (k - 1) / (n - 1)
    pairs = (some.T @ some)[np.triu_indices(n, 1)]
    z = (pairs - trials * both) / math.sqrt(trials * both * (1 - both))
    assert abs(z.mean()) < 1e-9
    assert 0.85 < z.std() < 1.15
    assert np.abs(z).max() < 4.5


def test_neighbouring_seeds_draw_independently() -> None:
    layout = layout_of(4000)
    seeds = [*range(12), 2**31, 2**32, 2**33, 2**62, 2**63 - 1]
    segments = Segments.build(layout)
    masks = np.stack(
        [unpack_mask(select_random(segments.live, [1000], segments, seed=s)) for s in seeds]
    ).astype(np.float64)
    # Of 1000 of 4000, two draws share 250 with a deviation of 11.9 (hypergeometric).
    shared = (masks @ masks.T)[np.triu_indices(len(seeds), 1)]
    assert np.abs(shared - 250).max() < 4.5 * 11.9
    # In neither order nor position is one draw another one shifted.
    for shift in (1, 32, 64):
        rolled = np.roll(masks[0, :4000], shift)
        assert np.abs(masks[:, :4000] @ rolled - 250).max() < 4.5 * 11.9
