"""Receivers that share tiles of rows: the bits of one receiver a program, whatever the sizes."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightfed_kernels.masked_mean import Neighbours, masked_mean
from lightfed_kernels.masks import pack_mask
from torch import Tensor

from tests.kernels import far
from tests.kernels.backends import BACKENDS, INTERPRETED, KERNELS, NOT_INTERPRETED
from tests.kernels.mean_cases import BOUNDS, banded, bits, canaries_live, run, values

Force = Callable[[bool], None]


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device of a test's tensors, where kernels run."""
    choice, device = BACKENDS[request.param]
    monkeypatch.setenv("LIGHTFED_KERNELS", choice)
    return torch.device(device)


@pytest.fixture
def force(kernels: torch.device, monkeypatch: pytest.MonkeyPatch) -> Force:
    """Chooses the kernel, whatever the sizes."""
    from lightfed_kernels.gpu import masked_mean as gpu

    return lambda tile: monkeypatch.setattr(gpu, "shared", lambda *sizes: tile)


def drawn(receivers: int, senders: int, longest: int) -> list[list[int]]:
    """Lists of all lengths, in no order, with repetitions; the second and the last are empty."""
    rng = np.random.default_rng(0)
    lists = [
        rng.integers(senders, size=rng.integers(longest + 1)).tolist() for _ in range(receivers)
    ]
    lists[0] = rng.integers(senders, size=longest).tolist()
    if receivers > 2:
        lists[1] = lists[-1] = []
    return lists


@pytest.mark.parametrize(
    ("receivers", "senders", "longest", "words"),
    [
        (1, 3, 5, 16),  # one receiver, of sixteen places
        (3, 7, 4, 9),  # a tile that begins in the one before, of every dtype
        (17, 4, 3, 8),  # one receiver in a second group, most of them no senders
        (32, 2, 2, 16),
    ],
)
@pytest.mark.parametrize("kind", ["covered", "neighbours", "kept", "plain"])
@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_tiles_give_the_bits_of_a_program_for_every_receiver(
    kernels: torch.device, force: Force, dtype: torch.dtype, kind: str,
    receivers: int, senders: int, longest: int, words: int,
) -> None:  # fmt: skip
    size = 32 * words
    x, covers = values(senders, size, dtype=dtype), bits(senders, size, density=0.5, seed=3)
    if kind != "plain":
        x[~covers] = float("nan")
    x[0, 5:9] = float("inf")
    how: dict[str, Any] = {"over": "neighbours" if kind == "neighbours" else "covered"}
    if kind != "plain":
        how["masks"] = pack_mask(covers).to(kernels)
    if kind == "kept":
        how["receivers"] = pack_mask(bits(receivers, size, density=0.5, seed=4)).to(kernels)
    neighbours = Neighbours.build(drawn(receivers, senders, longest), senders=senders)
    found = []
    for tile in (False, True):
        force(tile)
        buffer, out = banded(receivers, size, dtype, kernels)
        masked_mean(x.to(kernels), neighbours, out=out, **how)
        assert canaries_live(buffer)
        found.append(out.clone())
    assert torch.equal(found[0].isnan(), found[1].isnan())
    # As integers: the sign of a zero counts.
    of = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    one, other = (mean.nan_to_num(7.0).view(of) for mean in found)
    assert torch.equal(one, other)


@pytest.mark.parametrize("over", ["covered", "neighbours"])
def test_sizes_that_share_tiles_give_the_reference(device: torch.device, over: str) -> None:
    """Every backend; where kernels run, the rule takes tiles."""
    x, covers = values(8, 544), bits(8, 544, density=0.5, seed=3)
    lists = [[(r + k) % 8 for k in range(6 + r % 2)] for r in range(20)]
    neighbours = Neighbours.build(lists, senders=8)
    if os.environ["LIGHTFED_KERNELS"] != "torch":
        assert rule(neighbours)
    run(
        device, x, lists, masks=covers, over=over, receivers=bits(20, 544, density=0.7, seed=2)
    )  # fmt: skip


@pytest.mark.parametrize("width", [96, 256, 320])
def test_rows_are_replaced_tile_by_tile(kernels: torch.device, force: Force, width: int) -> None:
    """Blocks of less than a tile, of one, of some and a part; and the last one, of 32 columns."""
    words = pack_mask(bits(5, 352, density=0.5, seed=3)).to(kernels)
    neighbours = Neighbours.build([[0, 1, 2], [3], [4, 0, 1, 2], [2, 4], []], senders=5)
    found = []
    for tile in (False, True):
        force(tile)
        rows = values(5, 352).to(kernels)
        masked_mean(rows, neighbours, masks=words, receivers=[*words.flip(0)], width=width)
        found.append(rows)
    assert torch.equal(*found)


def rule(neighbours: Neighbours) -> bool:
    from lightfed_kernels.gpu.masked_mean import shared

    return shared(np.diff(neighbours.first.numpy()), neighbours.index.numpy())


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
@pytest.mark.parametrize(
    ("receivers", "senders", "degree", "expected"),
    [
        (100, 100, 11, True),  # DisPFL's
        (100, 100, 100, True),
        (25, 100, 11, True),  # one of four ranks
        (13, 100, 11, False),  # one of eight: rows are hardly read twice
        (1, 11, 11, False),
        (100, 100, 3, False),  # a ring
        (400, 400, 11, False),  # more tiles than a cache holds
    ],
)  # fmt: skip
def test_sizes_choose_the_kernel(receivers: int, senders: int, degree: int, expected: bool) -> None:
    lists = [[(r + 7 * k) % senders for k in range(degree)] for r in range(receivers)]
    assert rule(Neighbours.build(lists, senders=senders)) == expected


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
def test_one_long_list_does_not_share_tiles_with_short_ones() -> None:
    lists = [list(range(50)) * 4, *([[0, 1]] * 99)]
    assert not rule(Neighbours.build(lists, senders=50))


def test_weights_do_not_share_tiles(kernels: torch.device, force: Force) -> None:
    force(True)
    x = values(4, 256)
    run(kernels, x, [[0, 1], [2, 3, 1]], weights=[[1.0, 2.0], [3.0, 1.0, 0.5]])


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
def test_no_list_is_read_beyond_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightfed_kernels.gpu import masked_mean as gpu

    class Spy:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return self.launched

        def launched(self, table: Tensor, *args: Any, **constants: Any) -> None:
            receivers, most = args[3], args[4]
            assert most == 9
            last = receivers + 1 + 2 * int(table[receivers]) + 2 * most
            assert len(table) >= last

    monkeypatch.setenv("LIGHTFED_KERNELS", "triton")
    monkeypatch.setattr(gpu, "mean_tile", Spy())
    monkeypatch.setattr(gpu, "shared", lambda *sizes: True)
    lists = [[0] * 9, [1], []]
    masked_mean(values(2, 256), Neighbours.build(lists, senders=2))


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
def test_a_tile_lies_beyond_32_bits() -> None:
    import triton.language as tl
    from lightfed_kernels.gpu.masked_mean import mean_tile

    # Virtual memory: only the last tile is touched. The second row of the result begins where the
    # first ends: at 2^31 elements and more.
    tile = 2**23 + 1
    words = 8 * (tile + 1)
    row = torch.empty(32 * words, dtype=torch.bfloat16)
    out = torch.empty(2, 32 * words, dtype=torch.bfloat16)
    mask, kept = (torch.empty(words, dtype=torch.int32) for _ in range(2))
    row[-256:] = values(256, dtype=torch.bfloat16)
    mask[-8:], kept[-8:] = 0x0FFFFFFF, 0x7FFFFFF0
    out[:, -256:] = float("nan")
    edge, keep = [row.data_ptr(), mask.data_ptr()], [kept.data_ptr()]
    table = torch.tensor([0, 1, 2, *edge, *edge, *keep, *keep, 0, 0])
    with far.program(tile):
        mean_tile[(1,)](
            table, out, out.stride(0), words, 2, 1, GROUP=2, WORDS=8,
            DTYPE=tl.bfloat16, ACC=tl.float32, MASKED=True, COUNTED=True, KEPT=True,
        )  # fmt: skip
    expected = masked_mean(
        [row[-256:]], Neighbours.build([[0], [0]], senders=1), masks=[mask[-8:]],
        receivers=[kept[-8:], kept[-8:]],
    )  # fmt: skip
    assert torch.equal(out[:, -256:], expected)


def test_rows_of_the_output_lie_further_apart_than_32_bits_reach(
    kernels: torch.device, force: Force
) -> None:
    # Virtual memory: only the elements of the rows are touched. A stride has 32 bits, two do not.
    force(True)
    apart = 2**30 + 64
    memory = torch.empty(2 * apart + 256, dtype=torch.bfloat16, device=kernels)
    out = memory.as_strided((3, 256), (apart, 1))
    x = values(3, 256, dtype=torch.bfloat16).to(kernels)
    masked_mean(x, Neighbours.build([[0], [1], [2]], senders=3), out=out)
    assert torch.equal(out, x)
