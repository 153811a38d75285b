"""Chooses the elements that a mask keeps, drops or grows: exact counts, deterministic ties.

Exactly counts[t] candidates of every tensor t are chosen, or all if there are fewer. Ties go to the
lowest index, so that the result is the same on every device.
"""

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

from lightfed_kernels import _rows
from lightfed_kernels._select_torch import Order, select
from lightfed_kernels.segments import Segments, check_mask, check_padding

Counts = Sequence[int] | Tensor

# Seeds are below this.
_END_OF_SEEDS = 2**63


def select_by_magnitude(
    scores: Tensor, candidates: Tensor, counts: Counts, segments: Segments, *, largest: bool
) -> Tensor:
    """Choose the candidates of smallest or largest |score| in every tensor.

    Chosen are the first counts[t] of the candidates e of tensor t by (|scores[e]|, e), or by
    (-|scores[e]|, e). NaN is larger than inf, and -0 is 0.

    It cannot be captured in a CUDA graph, because counts are copied from the host.

    Args:
        scores: (P,).
        candidates: (W,) int32, a packed mask.
        counts: One number per tensor on the host, or (T,) int64 on the device, for which nothing
            waits.
        segments: The tensors of the row.
        largest: Whether to choose the largest; otherwise the smallest.

    Returns:
        (W,) int32, the packed mask of the chosen elements.

    Raises:
        ValueError: An argument does not fit; names it. Bits in padding and negative counts on a GPU
            are found only under LIGHTFED_KERNELS_CHECK=1.
    """
    _rows.check_vector("scores", scores, size=segments.size)
    check_mask("candidates", candidates, segments)
    device = _rows.check_one_device(scores=scores, candidates=candidates)
    numbers = _numbers(counts, segments, device)
    out = torch.empty_like(candidates)
    tiles = segments.tiles_on(device)
    _select(out, scores, candidates, numbers, segments.bounds, tiles, 0, largest)
    return out


def select_random(candidates: Tensor, counts: Counts, segments: Segments, *, seed: int) -> Tensor:
    """Draw counts[t] of the candidates of every tensor, uniformly without replacement.

    Chosen are the first counts[t] of the candidates e of tensor t by (h(seed, e), e). The hash

        h(seed, e) = mix(mix(e mod 2^32 ^ a) ^ mix(floor(e / 2^32) ^ b)),  (a, b) = expand(seed)

    is a bijection of 2^32 consecutive elements, which therefore never tie. mix is the 32-bit
    finalizer of MurmurHash3, and `expand` is one step of SplitMix64; both are in the public domain.
    The hash depends on nothing but the seed and the position in the row.

    It cannot be captured in a CUDA graph, because counts are copied from the host.

    Args:
        candidates: (W,) int32, a packed mask.
        counts: As for `select_by_magnitude`.
        segments: The tensors of the row.
        seed: 0 <= seed < 2^63; another one for every draw.

    Returns:
        (W,) int32, the packed mask of the chosen elements.
    """
    check_mask("candidates", candidates, segments)
    _check_seed("seed", seed)
    numbers = _numbers(counts, segments, candidates.device)
    out = torch.empty_like(candidates)
    tiles = segments.tiles_on(candidates.device)
    _select(out, None, candidates, numbers, segments.bounds, tiles, seed, False)
    return out


def prune_regrow(
    weights: Tensor, words: Tensor, counts: Counts, segments: Segments, *, regrow: Tensor | int
) -> Tensor:
    """Make DisPFL's next mask: drop counts[t] active elements of tensor t, and grow as many.

    This is algorithm 2 of the paper. Of the active elements, the counts[t] with the smallest
    |weight| are dropped. Then as many grow among all that are zero, including those just dropped:
    where |regrow| is largest, or at random. The number of active elements of a tensor stays.

    It cannot be captured in a CUDA graph, because counts are copied from the host.

    Args:
        weights: (P,) after the local training.
        words: (W,) int32, the packed mask that was trained with.
        counts: As for `select_by_magnitude`; a tensor with fewer active elements drops them all.
        segments: The tensors of the row.
        regrow: (P,) scores of the dtype of the weights, such as gradients; or a seed, as for
            `select_random`.

    Returns:
        (W,) int32, the next mask.
    """
    _rows.check_vector("weights", weights, size=segments.size)
    check_mask("words", words, segments)
    scores: Tensor | None = None
    seed = 0
    if isinstance(regrow, Tensor):
        scores = regrow
        _rows.check_vector("regrow", scores, size=segments.size)
    else:
        seed = regrow
        _check_seed("regrow", seed)
    device = _rows.check_one_device(weights=weights, words=words, regrow=scores)
    numbers = _numbers(counts, segments, device)
    out = torch.empty_like(words)
    tiles = segments.tiles_on(device)
    _prune_regrow(out, weights, scores, words, numbers, segments.bounds, tiles, seed)
    return out


def prune_counts(nonzeros: Sequence[int], rate: float) -> list[int]:
    """Return how many elements of every tensor to drop: ceil(rate * nonzeros), in float64."""
    if not 0 <= rate <= 1:
        raise ValueError(f"rate: {rate}; a share of the active elements lies in [0, 1]")
    return [ceil(rate * number) for number in nonzeros]


@torch.library.custom_op("lightfed::select", mutates_args=("out",))
def _select(
    out: Tensor,
    scores: Tensor | None,
    candidates: Tensor,
    counts: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    seed: int,
    largest: bool,
) -> None:
    """Write the mask of the chosen candidates into `out`.

    `bounds` and `tiles` are those of Segments.
    """
    _check_values("candidates", candidates, counts, bounds)
    order = Order(scores, largest=largest, seed=expand_seed(seed))
    _choose(out, candidates, counts, bounds, tiles, order)


@torch.library.custom_op("lightfed::prune_regrow", mutates_args=("out",))
def _prune_regrow(
    out: Tensor,
    weights: Tensor,
    scores: Tensor | None,
    words: Tensor,
    counts: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    seed: int,
) -> None:
    """Write the next mask into `out`; `bounds` and `tiles` are those of Segments."""
    _check_values("words", words, counts, bounds)
    # Drop the smallest active weights: their bits become 0.
    pruned = torch.empty_like(words)
    taken = _choose(pruned, words, counts, bounds, tiles, Order(weights), toggle=True)

    # Grow as many among the zeros: their bits become 1.
    at_random = Order(None, seed=expand_seed(seed))
    growth = at_random if scores is None else Order(scores, largest=True)
    _choose(out, pruned, taken, bounds, tiles, growth, free=True, toggle=True)


for _operator in (_select, _prune_regrow):
    _operator.register_fake(lambda *arguments: None)


def _choose(
    out: Tensor,
    words: Tensor,
    counts: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    order: Order,
    *,
    free: bool = False,
    toggle: bool = False,
) -> Tensor:
    """Choose candidates on the backend of the tensors.

    Args:
        out: (W,) int32 for the result.
        words: (W,) int32, the mask from which the candidates follow.
        counts: (T,) int64.
        bounds: (T, 2), as of Segments.
        tiles: (N, 4), as of Segments.
        order: The order of choice.
        free: Whether the candidates are the zeros of `words`, not its ones.
        toggle: Whether `out` is `words` with the chosen bits inverted; else the chosen bits.

    Returns:
        How many were chosen of every tensor, (T,) int64.
    """
    if words.numel() == 0:
        return torch.zeros_like(counts)
    if _rows.backend(words, counts) == "triton":
        from lightfed_kernels.gpu.select import launch_select

        return launch_select(out, words, counts, tiles, order, free=free, toggle=toggle)
    return select(out, words, counts, bounds, order, free=free, toggle=toggle)


def expand_seed(seed: int) -> tuple[int, int]:
    """Return one step of SplitMix64 as two signed 32-bit numbers, the lower half first.

    SplitMix64 is by Sebastiano Vigna, in the public domain.
    """
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    return _signed(z % 2**32), _signed(z >> 32)


def _signed(number: int) -> int:
    """Return the signed 32-bit number with the bits of an unsigned one."""
    return number - 2**32 * (number >> 31)


def _numbers(counts: Counts, segments: Segments, device: torch.device) -> Tensor:
    """Return the counts as (T,) int64 on the device.

    Raises:
        ValueError: There is not one number for each tensor, or they are on another device.
        TypeError: They are a tensor of another dtype.
    """
    if isinstance(counts, Tensor):
        if counts.dtype != torch.int64:
            raise TypeError(f"counts: {counts.dtype}; numbers of elements are int64")
        if counts.dim() != 1 or counts.shape[0] != len(segments):
            raise ValueError(
                f"counts: of shape {list(counts.shape)}; one of each of {len(segments)} tensors"
            )
        if counts.device != device:
            raise ValueError(f"counts: on {counts.device}, but the rows are on {device}")
        return counts.contiguous()
    if len(counts) != len(segments):
        raise ValueError(f"counts: {len(counts)} numbers for {len(segments)} tensors")
    numbers = torch.tensor(list(counts), dtype=torch.int64)
    return numbers.to(device, non_blocking=True)


def _check_seed(name: str, seed: int) -> None:
    """Refuse a seed that does not fit into 63 bits."""
    if not 0 <= seed < _END_OF_SEEDS:
        raise ValueError(f"{name}: {seed}; a seed lies in [0, 2^63)")


def _check_values(name: str, words: Tensor, counts: Tensor, bounds: Tensor) -> None:
    """Refuse ones in padding and negative counts.

    On a GPU this would wait, and is done only under LIGHTFED_KERNELS_CHECK=1.
    """
    check_padding(name, words, bounds)
    if words.is_cuda and not _rows.checking():
        return
    if (counts < 0).any():
        tensor = int(torch.nonzero(counts < 0)[0])
        raise ValueError(f"counts: {int(counts[tensor])} of tensor {tensor}; at least 0 is chosen")
