"""FedBCD's step: every backend against the float64 reference."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightfed_kernels import steps
from lightfed_kernels.reference import rows as reference
from lightfed_kernels.steps import aspg_step_
from safetensors.torch import load_file
from torch import Tensor

from tests.kernels.backends import INTERPRETED, NOT_INTERPRETED
from tests.kernels.test_rows import (
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
    point, gradient, anchor, x = values(4, 1056, dtype=dtype).to(device)
    aspg_step_(point, x, gradient, anchor, lr=0.1, gamma=0.2, extrapolation=0.9, box=(-1.0, 1.0))
    return [point, x]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_and_a_chunk_do_not_change_a_bit(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = outcomes(device, dtype)
    for repeat in range(2):
        if repeat:
            monkeypatch.setattr(steps, "CHUNK", 256)
            if os.environ["LIGHTFED_KERNELS"] != "torch":
                from lightfed_kernels.gpu import steps as gpu

                monkeypatch.setattr(gpu, "TILE", 256)
        for one, other in zip(outcomes(device, dtype), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
def test_columns_beyond_2_to_the_31(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last program alone; 4 GiB of address space a row, of which a few pages are touched."""
    import triton.language as tl
    from lightfed_kernels.gpu.steps import aspg_kernel
    from triton.runtime.interpreter import interpreter_builder

    def last(*place: int) -> None:
        interpreter_builder.grid_idx = (2**21, 0, 0)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", last)
    size = 2**31 + 64
    a, b, c, d = (torch.empty(size, dtype=torch.bfloat16) for _ in range(4))
    a[-64:], b[-64:-32], b[-32:], c[-64:], d[-64:] = 2.0, 1.0, 3.0, 3.0, 0.0
    aspg_kernel[(1,)](
        c, a, b, d, size, 0.5, 1.0, 0.5, 0.0, 0.0, WIDE=tl.float32, BOX=False, BLOCK=1024,
    )  # fmt: skip
    assert a[-64:].tolist() == [1.0] * 32 + [0.0] * 32
    assert c[-64:].tolist() == [0.5] * 32 + [-1.0] * 32


R, S, T = torch.zeros(64), torch.zeros(64), torch.zeros(64)
NUMBERS = {"lr": 0.1, "gamma": 0.1, "extrapolation": 0.1, "box": (-2.0, 2.0)}
ERRORS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
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
    assert aspg_step_(*none, **NUMBERS).shape == (0,)


def test_the_operators_are_well_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")
    a, b, c, d = (row.clone() for row in values(4, 64))
    torch.library.opcheck(steps._aspg_step, (a, b, c, d, 0.1, 0.2, 0.3, 0.0, 0.0, False))
    torch.library.opcheck(steps._aspg_step, (a, b, c, d, 0.0, 0.2, 0.3, -1.0, 1.0, True))


def test_the_functions_compile_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")

    def both(a: Tensor, b: Tensor, c: Tensor, d: Tensor, lr: float) -> Tensor:
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
