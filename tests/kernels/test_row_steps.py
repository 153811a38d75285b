"""Steps of local training: every backend against torch.optim.SGD and the float64 reference."""

import itertools
import json
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
from lightfed_kernels.steps import aspg_step_, sgd_step_
from safetensors.torch import load_file
from torch import Tensor

from tests.kernels.backends import INTERPRETED
from tests.kernels.test_rows import (
    BOUNDS,
    CANARY,
    DTYPES,
    INF,
    NAN,
    banded,
    bound,
    canaries_live,
    values,
)
from tests.kernels.test_rows import assert_close as assert_within
from tests.small import GOLDEN

# Roundings of a step: products and sums in the rows' own precision.
ROUNDINGS = 8


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    limit = bound(dtype) if dtype == torch.bfloat16 else ROUNDINGS * bound(dtype)
    assert_within(found, expected, limit)


def mask_of(size: int, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(size, generator=generator) < 0.5


@settings(max_examples=8)
@given(
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([64, 1024, 1088]),
    momentum=st.sampled_from([0.0, 0.9]),
    nesterov=st.booleans(),
    decay=st.sampled_from([0.0, 0.1]),
    prox=st.sampled_from([0.0, 0.3]),
    scale=st.sampled_from([None, [0.25], [0.5, 0.125]]),
    masked=st.booleans(),
)
@example(torch.float32, 1088, 0.9, True, 0.1, 0.3, [0.25, 0.5], True)
@example(torch.bfloat16, 1056, 0.9, False, 0.1, 0.3, [0.25], True)
@example(torch.float64, 1056, 0.9, True, 0.1, 0.3, [0.5, 2.0, 0.25], True)
@example(torch.float32, 1056, 0.0, False, 0.0, 0.0, None, False)
def test_a_step_of_sgd_is_the_reference(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    momentum: float,
    nesterov: bool,
    decay: float,
    prox: float,
    scale: list[float] | None,
    masked: bool,
) -> None:
    row, gradient, buffer, anchor = values(4, size, dtype=dtype, seed=size)
    mask = mask_of(size) if masked else None
    flags = {
        "lr": 0.3,
        "momentum": momentum,
        "nesterov": nesterov and momentum != 0,
        "weight_decay": decay,
        "prox": prox,
    }
    buffers, (found, g, b, a) = banded([row, gradient, buffer, anchor], device)
    given_scale = None if scale is None else torch.tensor(scale, device=device)
    words = None if mask is None else pack_mask(mask.to(device))
    returned = sgd_step_(found, g, buffer=b, anchor=a, scale=given_scale, words=words, **flags)
    assert returned is found
    one = torch.tensor(scale or [1.0]).double()
    one = one.repeat_interleave(size // len(one))
    expected, moved = reference.sgd_step(
        row, gradient, buffer=buffer, anchor=anchor, scale=one, mask=mask, **flags
    )
    assert_close(found, expected, dtype)
    assert_close(b, buffer.double() if momentum == 0 or moved is None else moved, dtype)
    assert mask is None or bool((found.cpu()[~mask] == 0).all())
    assert torch.equal(g.cpu(), gradient)
    assert torch.equal(a.cpu(), anchor)
    assert canaries_live(buffers)


COMBINATIONS = [
    (momentum, nesterov, decay)
    for momentum, nesterov, decay in itertools.product((0.0, 0.9), (False, True), (0.0, 5e-4))
    if momentum or not nesterov
]


@pytest.mark.parametrize(("momentum", "nesterov", "decay"), COMBINATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_equal_torch_optim_sgd(
    device: torch.device, dtype: torch.dtype, momentum: float, nesterov: bool, decay: float
) -> None:
    start = values(96, dtype=dtype)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD(
        [parameter], lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=decay
    )
    row = start.clone().to(device)
    buffer = torch.zeros_like(row)
    for step in range(4):
        gradient = values(96, dtype=dtype, seed=10 + step)
        parameter.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = lr = 0.1 * 0.9**step
        optimizer.step()
        sgd_step_(
            row, gradient.to(device), lr=lr, momentum=momentum, buffer=buffer,
            nesterov=nesterov, weight_decay=decay,
        )  # fmt: skip
    if os.environ["LIGHTFED_KERNELS"] == "torch":
        assert torch.equal(row, parameter.detach())
    else:
        assert_within(row, parameter.detach(), ROUNDINGS * BOUNDS[dtype])


def test_prox_is_the_gradient_of_fedprox(device: torch.device) -> None:
    start, anchor, gradient = values(3, 64)
    w = start.clone().requires_grad_()
    (0.3 / 2 * (w - anchor).square().sum() + (gradient * w).sum()).backward()
    assert w.grad is not None
    row = start.clone().to(device)
    sgd_step_(row, gradient.to(device), lr=0.5, prox=0.3, anchor=anchor.to(device))
    assert_within(row, start - 0.5 * w.grad, 1e-6)


def test_a_scale_clips(device: torch.device) -> None:
    start, gradient = values(2, 64)
    w = torch.nn.Parameter(start.clone())
    w.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([w], 0.5)
    torch.optim.SGD([w], lr=0.1).step()
    for dtype in (torch.float32, torch.float64):
        scale = (0.5 / (norm + 1e-6)).clamp(max=1.0).to(device, dtype)
        for number in (scale, scale[None]):
            row = start.clone().to(device)
            sgd_step_(row, gradient.to(device), lr=0.1, scale=number)
            assert_within(row, w.detach(), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_size_on_the_device_has_the_bits_of_a_number(
    device: torch.device, dtype: torch.dtype
) -> None:
    rate = torch.zeros((), dtype=torch.float64, device=device)
    for lr in (0.1, 1 / 3, 0.0):
        row, gradient = values(2, 1056, dtype=dtype).to(device)
        expected = sgd_step_(row.clone(), gradient, lr=lr)
        assert torch.equal(sgd_step_(row, gradient, lr=rate.fill_(lr)), expected)
        point, anchor = values(2, 1056, dtype=dtype, seed=1).to(device)
        rows, settings = (row, gradient, anchor), NUMBERS | {"box": None}
        expected = aspg_step_(point.clone(), row.clone(), *rows[1:], **settings | {"lr": lr})
        assert torch.equal(aspg_step_(point, *rows, **settings | {"lr": rate}), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_shows_where_a_mask_is_0_and_everything_elsewhere(
    device: torch.device, dtype: torch.dtype
) -> None:
    mask = mask_of(64)
    row, gradient = (values(2, 64, dtype=dtype)).to(device)
    row[0::4], gradient[1::4], gradient[2::4] = NAN, NAN, INF
    bad = ~torch.isfinite(row + gradient).cpu()
    sgd_step_(row, gradient, lr=0.1, words=pack_mask(mask.to(device)))
    assert bool((row.cpu()[~mask] == 0).all())
    assert torch.equal(~torch.isfinite(row).cpu(), bad & mask)


@pytest.mark.parametrize("covered", [False, True])
def test_masks_of_one_kind(device: torch.device, covered: bool) -> None:
    row, gradient = values(2, 96).to(device)
    expected = row - 0.5 * gradient if covered else torch.zeros_like(row)
    words = pack_mask(torch.full((96,), covered, device=device))
    sgd_step_(row, gradient, lr=0.5, words=words)
    assert torch.equal(row, expected)


def test_what_is_off_is_not_touched(device: torch.device) -> None:
    row, gradient, buffer = values(3, 64).to(device)
    anchor, before = torch.full_like(row, NAN), buffer.clone()
    sgd_step_(row, gradient, lr=0.1, buffer=buffer, anchor=anchor)
    assert bool(row.isfinite().all())
    assert torch.equal(buffer, before)
    # No decay of what is infinite: 0 * inf would be NaN.
    row[0] = INF
    sgd_step_(row, gradient, lr=0.0)
    assert row[0] == INF


@settings(max_examples=5)
@given(
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([32, 1024, 1056]),
    gamma=st.sampled_from([0.0, 1.0, 0.2]),
    extrapolation=st.sampled_from([0.0, 0.9]),
    box=st.sampled_from([None, (-0.5, 0.5), (-0.25, 2.0)]),
)
@example(torch.float32, 1056, 0.2, 0.9, (-0.5, 0.25))
@example(torch.bfloat16, 1056, 0.2, 0.9, None)
@example(torch.float64, 1056, 0.2, 0.9, (0.0, 0.5))
def test_a_step_of_fedbcd_is_the_reference(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    gamma: float,
    extrapolation: float,
    box: tuple[float, float] | None,
) -> None:
    rows = values(4, size, dtype=dtype, seed=size)
    buffers, (point, x, gradient, anchor) = banded(list(rows), device)
    numbers = {"lr": 0.3, "gamma": gamma, "extrapolation": extrapolation, "box": box}
    assert aspg_step_(point, x, gradient, anchor, **numbers) is x
    expected_point, expected = reference.aspg_step(*rows, **numbers)
    assert_close(point, expected_point, dtype)
    assert_close(x, expected, dtype)
    assert torch.equal(gradient.cpu(), rows[2])
    assert torch.equal(anchor.cpu(), rows[3])
    assert box is None or (float(x.min()) >= box[0] and float(x.max()) <= box[1])
    assert canaries_live(buffers)


def test_a_box_bounds_infinity_and_shows_nan(device: torch.device) -> None:
    point, x, gradient, anchor = values(4, 64).to(device)
    gradient[0], gradient[1], gradient[2] = NAN, INF, -INF
    aspg_step_(point, x, gradient, anchor, lr=0.1, gamma=0.5, extrapolation=0.5, box=(-2.0, 3.0))
    assert bool(x[0].isnan())
    assert x[1:3].tolist() == [-2.0, 3.0]
    assert bool(x[1:].isfinite().all())
    assert torch.nonzero(point.isnan()).flatten().tolist() == [0]


def test_fedbcd_meets_the_derived_iterates(device: torch.device) -> None:
    """Eq. (4a) and (4b) on a quadratic function, in float64; a row is padded to 32 elements."""
    folder = GOLDEN / "fedbcd"
    cases = json.loads((folder / "aspg_quadratic.json").read_text())
    golden = load_file(folder / "aspg_quadratic.safetensors", device=str(device))
    low, high = cases["box"]
    length = golden["b"].shape[0]

    def padded(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, 32 - length))

    for name, case in cases["cases"].items():
        x, anchor = padded(golden["x0"]), padded(golden["z"])
        point = x + case["zeta"] * (x - padded(golden["xm1"]))
        for step in range(1, 9):
            gradient = padded(golden["A"] @ point[:length] - golden["b"])
            aspg_step_(
                point, x, gradient, anchor, lr=case["eta"], gamma=case["gamma"],
                extrapolation=case["zeta"], box=(low, high),
            )  # fmt: skip
            torch.testing.assert_close(x[:length], golden[f"{name}/x{step}"], rtol=0, atol=1e-12)


def outcomes(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    row, gradient, buffer, anchor, x = values(5, 1056, dtype=dtype).to(device)
    sgd_step_(
        row, gradient, lr=0.1, momentum=0.9, buffer=buffer, weight_decay=0.1, nesterov=True,
        prox=0.3, anchor=anchor, scale=torch.tensor([0.7, 0.4, 0.2], device=device),
        words=pack_mask(mask_of(1056).to(device)),
    )  # fmt: skip
    point = row.clone()
    aspg_step_(point, x, gradient, anchor, lr=0.1, gamma=0.2, extrapolation=0.9, box=(-1.0, 1.0))
    return [row, buffer, point, x]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_and_a_chunk_do_not_change_a_bit(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = outcomes(device, dtype)
    for repeat in range(2):
        if repeat:
            monkeypatch.setattr(_steps_torch, "CHUNK", 256)
            if os.environ["LIGHTFED_KERNELS"] != "torch":
                from lightfed_kernels.gpu import steps as gpu

                monkeypatch.setattr(gpu, "TILE", 256)
        for one, other in zip(outcomes(device, dtype), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
def test_columns_beyond_2_to_the_31(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last program alone; 4 GiB of address space a row, of which a few pages are touched."""
    import triton.language as tl
    from lightfed_kernels.gpu.steps import aspg_kernel, sgd_kernel
    from triton.runtime.interpreter import interpreter_builder

    def last(*place: int) -> None:
        interpreter_builder.grid_idx = (2**21, 0, 0)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", last)
    size = 2**31 + 64
    a, b, c, d = (torch.empty(size, dtype=torch.bfloat16) for _ in range(4))
    words = torch.empty(size // 32, dtype=torch.int32)
    a[-64:], b[-64:], c[-64:], d[-64:], words[-2], words[-1] = 4.0, 1.0, 2.0, 0.0, -1, 0
    sgd_kernel[(1,)](
        a, b, c, d, a, a, words, size, 1, 0.5, 1.0, 0.0, 0.0, WIDE=tl.float32, SCALE=False,
        RATE=False, DECAY=False, PROX=False, MOMENTUM=True, NESTEROV=False, MASK=True, WORDS=32,
    )  # fmt: skip
    assert a[-64:].tolist() == [2.5] * 32 + [0.0] * 32
    assert c[-64:].tolist() == [3.0] * 64
    aspg_kernel[(1,)](
        c, a, b, d, a, size, 0.5, 1.0, 0.5, 0.0, 0.0, WIDE=tl.float32, RATE=False, BOX=False,
        BLOCK=1024,
    )  # fmt: skip
    assert a[-64:].tolist() == [1.0] * 64
    assert c[-64:].tolist() == [0.25] * 32 + [1.5] * 32


R, S, T = torch.zeros(64), torch.zeros(64), torch.zeros(64)
NUMBERS = {"lr": 0.1, "gamma": 0.1, "extrapolation": 0.1, "box": (-2.0, 2.0)}
ERRORS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (ValueError, "buffer: missing; momentum is 0.9", lambda: sgd_step_(R, S, lr=1, momentum=0.9)),
    (ValueError, "nesterov: needs a momentum", lambda: sgd_step_(R, S, lr=1, nesterov=True)),
    (ValueError, "anchor: missing; prox is 0.1", lambda: sgd_step_(R, S, lr=1, prox=0.1)),
    (ValueError, "lr: -1.0; a finite", lambda: sgd_step_(R, S, lr=-1)),
    (ValueError, "lr: nan", lambda: sgd_step_(R, S, lr=NAN)),
    (ValueError, "weight_decay: inf", lambda: sgd_step_(R, S, lr=1, weight_decay=INF)),
    (ValueError, "momentum: -0.5", lambda: sgd_step_(R, S, lr=1, momentum=-0.5, buffer=T)),
    (ValueError, "prox: -0.5", lambda: sgd_step_(R, S, lr=1, prox=-0.5, anchor=T)),
    (
        ValueError,
        "scale: torch.float32 of shape [4]; one",
        lambda: sgd_step_(R, S, lr=1, scale=torch.ones(4)),
    ),
    (ValueError, "scale: torch.int64 of", lambda: sgd_step_(R, S, lr=1, scale=torch.tensor(1))),
    (ValueError, "lr: torch.float32 of shape [2]; one", lambda: sgd_step_(R, S, lr=torch.ones(2))),
    (TypeError, "words: float32", lambda: sgd_step_(R, S, lr=1, words=R[:2])),
    (ValueError, "words: 3 words; 2", lambda: sgd_step_(R, S, lr=1, words=torch.zeros(3).int())),
    (
        ValueError,
        "words: of shape [1, 2]; one row",
        lambda: sgd_step_(R, S, lr=1, words=torch.zeros(1, 2).int()),
    ),
    (ValueError, "row: of shape [2, 32]", lambda: sgd_step_(R.view(2, 32), S, lr=1)),
    (ValueError, "gradient: rows of 32", lambda: sgd_step_(R, S[:32], lr=1)),
    (ValueError, "gradient: of shape [1, 64]", lambda: sgd_step_(R, S[None], lr=1)),
    (
        TypeError,
        "gradient: torch.float64 for rows of torch.float32",
        lambda: sgd_step_(R, S.double(), lr=1),
    ),
    (TypeError, "row: float16", lambda: sgd_step_(R.half(), S.half(), lr=1)),
    (ValueError, "gradient: shares memory with row", lambda: sgd_step_(R, R, lr=1)),
    (
        ValueError,
        "row, buffer: rows 0 and 1 share memory",
        lambda: sgd_step_(R, S, lr=1, momentum=0.9, buffer=R),
    ),
    (
        ValueError,
        "anchor: shares memory with row, buffer",
        lambda: sgd_step_(R, S, lr=1, momentum=0.9, buffer=T, prox=1, anchor=T),
    ),
    (ValueError, "gradient: row 0 starts 4 bytes", lambda: sgd_step_(R[:32], S[1:33], lr=1)),
    (ValueError, "x: of shape [1, 64]", lambda: aspg_step_(R, S[None], T, T, **NUMBERS)),
    (ValueError, "anchor: rows of 32", lambda: aspg_step_(R, S, T, T[:32], **NUMBERS)),
    (TypeError, "point: torch.float64", lambda: aspg_step_(R.double(), S, T, T, **NUMBERS)),
    (
        ValueError,
        "box: [",
        lambda: aspg_step_(R, S, T, T, **NUMBERS | {"box": (0.0, 0.0)}),
    ),
    (
        ValueError,
        "box: [",
        lambda: aspg_step_(R, S, T, T, **NUMBERS | {"box": (NAN, 1.0)}),
    ),
    (
        ValueError,
        "box: [",
        lambda: aspg_step_(R, S, T, T, **NUMBERS | {"box": (0.5, 1.0)}),
    ),
    (ValueError, "gamma: -1.0", lambda: aspg_step_(R, S, T, T, **NUMBERS | {"gamma": -1.0})),
    (ValueError, "lr: inf", lambda: aspg_step_(R, S, T, T, **NUMBERS | {"lr": INF})),
    (
        ValueError,
        "extrapolation: nan",
        lambda: aspg_step_(R, S, T, T, **NUMBERS | {"extrapolation": NAN}),
    ),
    (ValueError, "point, x: rows 0 and 1 share", lambda: aspg_step_(R, R, T, T, **NUMBERS)),
    (ValueError, "anchor: shares memory with point, x", lambda: aspg_step_(R, S, T, R, **NUMBERS)),
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
    assert sgd_step_(none[0], none[1], lr=0.1).shape == (0,)
    assert aspg_step_(*none, **NUMBERS).shape == (0,)


def test_the_operators_are_well_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")
    a, b, c, d = (row.clone() for row in values(4, 64))
    words, scale = pack_mask(mask_of(64)), torch.tensor(0.5)
    plain = (a, b, None, None, None, None, None, 0.1, 0.0, 0.0, 0.0, False)
    full = (a, b, c, d, scale, scale.clone(), words, 0.0, 0.9, 0.1, 0.1, True)
    torch.library.opcheck(steps._sgd_step, plain)
    torch.library.opcheck(steps._sgd_step, full)
    torch.library.opcheck(steps._aspg_step, (a, b, c, d, None, 0.1, 0.2, 0.3, 0.0, 0.0, False))
    torch.library.opcheck(steps._aspg_step, (a, b, c, d, scale, 0.0, 0.2, 0.3, -1.0, 1.0, True))


def test_the_functions_compile_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")
    words = pack_mask(mask_of(64))

    def both(a: Tensor, b: Tensor, c: Tensor, d: Tensor, lr: float) -> Tensor:
        sgd_step_(a, b, lr=lr, momentum=0.9, buffer=c, words=words, prox=0.1, anchor=d)
        aspg_step_(c, b, a, d, lr=lr, gamma=0.1, extrapolation=0.2, box=(-1.0, 1.0))
        return a

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for lr in (0.1, 0.2, 0.3):
        one, other = ([row.clone() for row in values(4, 64)] for _ in range(2))
        both(*one, lr)
        compiled(*other, lr)
        for left, right in zip(one, other, strict=True):
            assert torch.equal(left, right)


def test_canaries_are_seen() -> None:
    buffers, _ = banded([torch.zeros(32)], torch.device("cpu"))
    buffers[0][0] = CANARY + 1
    assert not canaries_live(buffers)
