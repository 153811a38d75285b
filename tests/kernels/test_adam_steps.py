"""Steps of Adam on flat rows: every backend against torch.optim and the float64 reference."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightfed_kernels import _steps_torch, steps
from lightfed_kernels.masks import pack_mask
from lightfed_kernels.reference import rows as reference
from lightfed_kernels.steps import adam_numbers, adam_step_
from torch import Tensor

from tests.kernels.backends import INTERPRETED
from tests.kernels.test_row_steps import ROUNDINGS, assert_close, mask_of
from tests.kernels.test_rows import BOUNDS, DTYPES, INF, NAN, banded, canaries_live, values
from tests.kernels.test_rows import assert_close as assert_within

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
BETAS = (0.9, 0.999)


def drawn(size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A row, its gradient and moments; the second ones are not negative."""
    row, gradient, average, square = values(4, size, dtype=dtype, seed=size)
    return [row, gradient, average, square.abs()]


@settings(max_examples=6)
@given(
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([64, 1024, 1088]),
    step=st.integers(1, 30),
    decay=st.sampled_from([0.0, 0.1]),
    decoupled=st.sampled_from([0.0, 0.1]),
    masked=st.booleans(),
    scales=st.sampled_from([None, [0.25], [0.5, 0.125]]),
)
@example(torch.float32, 1088, 3, 0.1, 0.1, True, [0.25, 0.5])
@example(torch.bfloat16, 1056, 1, 0.1, 0.0, True, None)
@example(torch.float64, 1056, 2, 0.0, 0.1, False, [0.5, 2.0, 0.25])
def test_a_step_of_adam_is_the_reference(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    step: int,
    decay: float,
    decoupled: float,
    masked: bool,
    scales: list[float] | None,
) -> None:
    given_rows = drawn(size, dtype)
    mask = mask_of(size) if masked else None
    numbers = adam_numbers(step, lr=0.3, betas=BETAS, decoupled_decay=decoupled)[-1]
    flags: dict[str, Any] = {"betas": BETAS, "eps": 1e-3, "weight_decay": decay}
    buffers, (row, gradient, average, square) = banded(given_rows, device)
    words = None if mask is None else pack_mask(mask.to(device))
    scale = None if scales is None else torch.tensor(scales, device=device)
    moments = (average, square, numbers.to(device))
    found = adam_step_(row, gradient, *moments, scale=scale, words=words, **flags)
    assert found is row
    start, before, *others = given_rows
    one = torch.tensor(scales or [1.0]).double()
    scaled = before.double() * one.repeat_interleave(size // len(one))
    expected = reference.adam_step(start, scaled, *others, numbers.tolist(), mask=mask, **flags)
    for one, other in zip((row, average, square), expected, strict=True):
        assert_close(one, other, dtype)
    assert mask is None or bool((row.cpu()[~mask] == 0).all())
    assert torch.equal(gradient.cpu(), given_rows[1])
    assert canaries_live(buffers)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_equal_torch_optim(
    device: torch.device, dtype: torch.dtype, decay: float, kind: type[torch.optim.Adam]
) -> None:
    start = values(96, dtype=dtype)
    parameter = torch.nn.Parameter(start.clone())
    betas = (0.8, 0.99)
    optimizer = kind([parameter], lr=0.05, betas=betas, weight_decay=decay)
    own = kind is torch.optim.AdamW
    table = adam_numbers(5, lr=0.05, betas=betas, decoupled_decay=decay if own else 0.0)
    row = start.clone().to(device)
    moments = torch.zeros_like(row), torch.zeros_like(row)
    for step, numbers in enumerate(table.to(device)):
        gradient = values(96, dtype=dtype, seed=10 + step)
        parameter.grad = gradient.clone()
        optimizer.step()
        adam_step_(
            row, gradient.to(device), *moments, numbers, betas=betas,
            weight_decay=0.0 if own else decay,
        )  # fmt: skip
    if os.environ["LIGHTFED_KERNELS"] == "torch":
        assert torch.equal(row, parameter.detach())
    else:
        assert_within(row, parameter.detach(), 2 * ROUNDINGS * BOUNDS[dtype])


def test_numbers_of_no_steps() -> None:
    assert adam_numbers(0, lr=0.1, betas=BETAS).shape == (0, 3)


def test_padding_stays_0(device: torch.device) -> None:
    rows = [torch.zeros(64, device=device) for _ in range(4)]
    for numbers in adam_numbers(3, lr=0.1, betas=BETAS, decoupled_decay=0.1).to(device):
        adam_step_(*rows, numbers, weight_decay=0.1)
    assert not any(row.any() for row in rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_shows_where_a_mask_is_0_and_everything_elsewhere(
    device: torch.device, dtype: torch.dtype
) -> None:
    mask = mask_of(64)
    row, gradient, average, square = (x.to(device) for x in drawn(64, dtype))
    row[0::4], gradient[1::4], gradient[2::4] = NAN, NAN, INF
    bad = ~torch.isfinite(row + gradient).cpu()
    [numbers] = adam_numbers(1, lr=0.1, betas=BETAS).to(device)
    adam_step_(row, gradient, average, square, numbers, words=pack_mask(mask.to(device)))
    assert bool((row.cpu()[~mask] == 0).all())
    assert torch.equal(~torch.isfinite(row).cpu(), bad & mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_and_a_chunk_do_not_change_a_bit(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    [numbers] = adam_numbers(1, lr=0.1, betas=BETAS, decoupled_decay=0.1).to(device)
    words = pack_mask(mask_of(1056).to(device))

    def outcome() -> list[Tensor]:
        rows = [x.to(device, copy=True) for x in drawn(1056, dtype)]
        adam_step_(*rows, numbers, weight_decay=0.1, words=words)
        return rows

    expected = outcome()
    monkeypatch.setattr(_steps_torch, "CHUNK", 256)
    if os.environ["LIGHTFED_KERNELS"] != "torch":
        from lightfed_kernels.gpu import steps as gpu

        monkeypatch.setattr(gpu, "TILE", 256)
    for one, other in zip(outcome(), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
def test_columns_beyond_2_to_the_31(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last program alone; 4 GiB of address space a row, of which a few pages are touched."""
    import triton.language as tl
    from lightfed_kernels.gpu.steps import adam_kernel
    from triton.runtime.interpreter import interpreter_builder

    def last(*place: int) -> None:
        interpreter_builder.grid_idx = (2**21, 0, 0)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", last)
    size = 2**31 + 64
    w, g, a, s = (torch.empty(size, dtype=torch.bfloat16) for _ in range(4))
    words = torch.empty(size // 32, dtype=torch.int32)
    w[-64:], g[-64:], a[-64:], s[-64:], words[-2], words[-1] = 4.0, 2.0, 0.0, 0.0, -1, 0
    numbers = torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64)
    adam_kernel[(1,)](
        w, g, a, s, numbers[:1], numbers, words, size, size // 32, 0.5, 0.75, 1.0, 0.0,
        WIDE=tl.float32, SCALE=True, DECAY=False, MASK=True, WORDS=32,
    )  # fmt: skip
    assert w[-64:].tolist() == [1.5] * 32 + [0.0] * 32  # 4 / 2 - 1 / (1 + 1)
    assert (a[-1], s[-1]) == (1.0, 1.0)


R, S, T, U = (torch.zeros(64) for _ in range(4))
N = torch.ones(3, dtype=torch.float64)
ERRORS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (ValueError, "beta1: 1.0; a number", lambda: adam_step_(R, S, T, U, N, betas=(1.0, 0.9))),
    (ValueError, "beta2: nan; a number", lambda: adam_step_(R, S, T, U, N, betas=(0.9, NAN))),
    (ValueError, "eps: 0.0; a finite number above", lambda: adam_step_(R, S, T, U, N, eps=0.0)),
    (ValueError, "weight_decay: -1", lambda: adam_step_(R, S, T, U, N, weight_decay=-1)),
    (ValueError, "numbers: torch.float32 of shape [3]", lambda: adam_step_(R, S, T, U, N.float())),
    (ValueError, "numbers: torch.float64 of shape [2]", lambda: adam_step_(R, S, T, U, N[:2])),
    (ValueError, "square: rows of 32", lambda: adam_step_(R, S, T, U[:32], N)),
    (TypeError, "average: torch.float64", lambda: adam_step_(R, S, T.double(), U, N)),
    (TypeError, "words: float32", lambda: adam_step_(R, S, T, U, N, words=R[:2])),
    (ValueError, "row, average, square: rows 1 and 2", lambda: adam_step_(R, S, T, T, N)),
    (ValueError, "gradient: shares memory with row", lambda: adam_step_(R, T, T, U, N)),
]


@pytest.mark.parametrize(("kind", "message", "call"), ERRORS, ids=[m for _, m, _ in ERRORS])
def test_what_does_not_fit_is_named(
    kind: type[Exception], message: str, call: Callable[[], Any]
) -> None:
    with pytest.raises(kind) as found:
        call()
    assert str(found.value).startswith(message)
    assert "\n" not in str(found.value)


def test_empty_rows(device: torch.device) -> None:
    none = [torch.zeros(0, device=device) for _ in range(4)]
    assert adam_step_(*none, N.to(device)).shape == (0,)


def test_the_operator_is_well_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")
    words = pack_mask(mask_of(64))
    for scale, given_words, decay in ((None, None, 0.0), (torch.ones(2), words, 0.1)):
        arguments = (*drawn(64), scale, N, given_words, *BETAS, 1e-8, decay)
        torch.library.opcheck(steps._adam_step, arguments)
