"""Captured steps on a CUDA device: the bits of eager ones, and launches of graphs instead."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightfed.algorithms.shared.aspg import ASPG
from lightfed.api.fleet import Fleet
from lightfed.local.packed.session import PackedSession
from lightfed.local.packed.steps.captured import CapturedSteps
from lightfed.local.session import LocalSession
from lightfed.models.networks.cnn import SimpleCNN
from tests.core.packs import CLIENTS, SIZES, after, fleet
from tests.core.test_captured import CARRIED, MOMENTUM, PULLED, UNIFORM, few_classes, turns
from tests.small import data_of

pytestmark = pytest.mark.gpu
made = partial(fleet, side_by_side=CLIENTS, device=torch.device("cuda"))

NAMES = [
    "momentum", "adam", "clipped", "fedprox", "dispfl", "phases", "phases with adam", "gn", "bn",
    "static bn", "resnet", "dropout",
]  # fmt: skip


def captured(some: Fleet) -> CapturedSteps:
    steps = some.training._packs._trainers[0]._recorded
    assert steps is not None, some.training.captured
    return steps


def replays(steps: CapturedSteps) -> int:
    """Kinds of steps that are replayed."""
    assert steps.failure == ""
    assert steps._home is not None
    return sum(kind.replay is not None for kind in steps._home.kinds.values())


@pytest.mark.parametrize("sizes", [SIZES, UNIFORM], ids=["ragged", "uniform"])
@pytest.mark.parametrize("name", NAMES)
def test_captured_steps_have_the_bits_of_eager_ones(name: str, sizes: list[int]) -> None:
    some = made(name, sizes=sizes)
    found = turns(some)
    assert replays(captured(some))
    eager = turns(made(name, sizes=sizes, capture="off"))
    assert torch.equal(found[0], eager[0])
    assert found[1] == eager[1]


def pictures(sizes: list[int]) -> Any:
    """Of CIFAR-10's size, in batches of 32."""
    x = torch.randn(64 * len(sizes), 3, 32, 32, generator=torch.Generator().manual_seed(3))
    parts = [range(64 * k, 64 * k + 64) for k in range(len(sizes))]
    return data_of(x, torch.arange(len(x)) % 10, parts, classes=10, batch_size=32)


@pytest.mark.parametrize(
    "name", ["momentum", "dropout", "gn", "bn", "vmap", "masked language model", "of true size"]
)
def test_a_client_has_the_same_bits_in_a_pack_of_any_size(name: str) -> None:
    """A library of the card may choose how it multiplies by the number of products."""
    settings: dict[str, Any] = {}
    if name == "of true size":
        network = partial(SimpleCNN, channels=(32, 64), hidden=128)
        name, settings = "bn", {"model": network, "data": pictures}
    fleets = [made(name, side_by_side=size, **settings) for size in (3, 4, CLIENTS)]
    assert [[*some.training.side_by_side.values()] for some in fleets] == [[3], [4], [CLIENTS]]
    found = [after(some)[0] for some in fleets]
    assert [torch.equal(rows, found[0]) for rows in found] == [True] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": partial(torch.autocast, "cuda", torch.bfloat16)},
        {"host_rows": True},
        {"data": few_classes},
    ],
    ids=["bf16", "host rows", "own buffers"],
)
def test_what_else_a_session_has(settings: dict[str, Any]) -> None:
    settings = {"optimizer": MOMENTUM} | settings
    some = made("static bn", sizes=UNIFORM, **settings)
    found = turns(some)
    assert replays(captured(some))
    eager = turns(made("static bn", sizes=UNIFORM, capture="off", **settings))
    assert torch.equal(found[0], eager[0])


def test_aspg_of_fedbcd() -> None:
    settings: dict[str, Any] = PULLED | CARRIED | {"optimizer": partial(ASPG, lr=0.05)}
    some = made("mlp", sizes=UNIFORM, **settings)
    found = after(some, 8)
    assert replays(captured(some))
    assert torch.equal(found[0], after(made("mlp", sizes=UNIFORM, capture="off", **settings), 8)[0])


def launches(some: Fleet) -> Counter[str]:
    """Calls of the driver in a round, after others."""
    after(some, 3)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        after(some, 1)
        torch.cuda.synchronize()
    return Counter(event.name for event in profiled.events() or [])


def test_a_captured_step_is_one_launch() -> None:
    steps = 2 * 3  # epochs, batches
    found = launches(made("gn", sizes=UNIFORM, optimizer=MOMENTUM))
    assert found["cudaGraphLaunch"] == steps
    eager = launches(made("gn", sizes=UNIFORM, optimizer=MOMENTUM, capture="off"))
    assert eager["cudaGraphLaunch"] == 0
    kernels = [c["cudaLaunchKernel"] + c["cuLaunchKernel"] for c in (found, eager)]
    assert kernels[1] - kernels[0] > 20 * steps


def test_a_step_that_may_not_be_captured_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that the host reads ends a capture; what was trained until then stays."""
    genuine = CapturedSteps._body

    def reads(self: CapturedSteps, home: Any, *args: Any) -> None:
        genuine(self, home, *args)
        assert home.step.item() >= 0

    eager = turns(made("momentum", sizes=UNIFORM, capture="off"))
    monkeypatch.setattr(CapturedSteps, "_body", reads)
    some = made("momentum", sizes=UNIFORM)
    found = turns(some)
    assert captured(some).failure
    assert torch.equal(found[0], eager[0])
    monkeypatch.undo()
    torch.rand(2, device="cuda")  # its generator is not left within a capture
    others = made("momentum", sizes=UNIFORM)
    after(others)
    assert replays(captured(others))


def that_must_not_wait(genuine: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **settings: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return genuine(*args, **settings)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return run


@pytest.mark.parametrize("side_by_side", ["off", 3])
@pytest.mark.parametrize("name", ["momentum", "clipped", "gn"])
def test_a_session_does_not_wait(
    name: str, side_by_side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = fleet(name, side_by_side, device=torch.device("cuda"))
    after(some, 1)  # compiles, and allocates
    for kind in (PackedSession, LocalSession):
        monkeypatch.setattr(kind, "train", that_must_not_wait(kind.train))
    after(some, 1)
