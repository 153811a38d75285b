"""Federations on a device that is not the CPU: nothing is left on the wrong side."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightfed_kernels import stream_keys
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightfed.algorithms.shared import slice_tests
from lightfed.engine.evaluation import Evaluation
from lightfed.local.packed import graph, rules
from lightfed.local.packed.functions import PackedFunctions
from lightfed.local.packed.steps import packing, tensors
from lightfed.local.packed.steps.recorder import Body, Recorder
from lightfed.local.packed.tracing import traced_network
from lightfed.utils.rng import DeviceStreams, streams
from tests.core.packs import CASES, CLIENTS, after, fleet
from tests.pretend import DEVICE, There, pretended_device
from tests.tiers import by_default

DRAWS = ("dropout", "dropout of convolutions", "static bn of drops", "masked language model")
QUICK = (
    "clipped", "vmap", "my1", "my2", "aspg", "static bn", "phases", "masked language model",
)  # fmt: skip


def streams_of_a_device(seeds: Sequence[int], device: torch.device) -> DeviceStreams:
    keys = stream_keys(seeds).to(device)
    return DeviceStreams(keys, torch.zeros_like(keys))


@cache
def on_the_device(
    name: str, side_by_side: Any, **more: Any
) -> tuple[Tensor, dict[str, float], list[str]]:
    """Rows and metrics after two rounds, and the reads that they took."""
    with pytest.MonkeyPatch.context() as patches, pretended_device(patches) as reads:
        made = fleet(name, side_by_side, device=DEVICE, **more)
        reads.clear()  # those of set-up
        rows, metrics = after(made)
        packed = next(iter(made.training.side_by_side.values()))
        assert packed == (CLIENTS if side_by_side == CLIENTS else "model.side_by_side: off")
    return (rows.here if isinstance(rows, There) else rows), metrics, reads


def in_sessions(reads: list[str]) -> list[str]:
    """Without those of a report or a tally, and of an algorithm at the end of a session."""
    within = [read for read in reads if "sessions < train" in read]
    after = ("resolve", "_tallied", "session_end")
    return [read for read in within if not any(name in read for name in after)]


# Module.to shares a tied parameter on a card, but not between types of tensors.
SHARED = [name for name in CASES if name != "tied"]


@pytest.mark.parametrize("side_by_side", ["off", CLIENTS])
@pytest.mark.parametrize("name", by_default(SHARED, *QUICK))
def test_every_case_has_the_numbers_of_a_cpu(
    name: str, side_by_side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, metrics, reads = on_the_device(name, side_by_side)
    assert in_sessions(reads) == []
    if name in DRAWS and side_by_side != "off":
        for module in (rules, tensors, slice_tests):
            monkeypatch.setattr(module, "streams", streams_of_a_device)
    rows, expected = after(fleet(name, side_by_side))
    torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-6)
    assert metrics == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("side_by_side", ["off", CLIENTS])
@pytest.mark.parametrize("name", ["my1", "static bn"])
def test_rows_of_the_host_train_on_the_device(name: str, side_by_side: Any) -> None:
    rows, metrics, _ = on_the_device(name, side_by_side)
    found, its, _ = on_the_device(name, side_by_side, host_rows=True)
    torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-6)
    assert its == pytest.approx(metrics, rel=1e-5)


@pytest.mark.parametrize("name", ["clipped", "static bn", "my1", "my2"])
def test_a_round_of_a_pack_reads_a_few_times_however_many_clients_there_are(name: str) -> None:
    _, _, reads = on_the_device(name, CLIENTS)
    within = [read for read in reads if "resolve" not in read]
    assert len(within) <= 2 * 3, within  # in two rounds


@pytest.mark.parametrize("name", ["mlp", "standalone", "static bn"])
def test_an_evaluation_of_many_clients_reads_nothing_before_its_end(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretended_device(monkeypatch) as reads:
        monkeypatch.setattr(graph, "traced_network", traced)
        made = fleet(name, 3, device=DEVICE)
        after(made, rounds=1)
        packed = rules.Packed(3)
        evaluation = Evaluation(made, made.data, kinds=("local", "personal"), packed=packed)
        evaluation.start()
        reads.clear()
        jobs = evaluation.jobs
        assert len(jobs) < CLIENTS
        for job in jobs:
            evaluation.run(job)
        assert reads == []
        evaluation.finish()
    assert reads


FUSED = (
    "mlp", "momentum", "adam", "adamw", "aspg", "clipped", "fedprox", "dispfl", "phases",
    "phases with adam", "static bn", "bn", "gn",
)  # fmt: skip


class Repeats(Recorder):
    """Replays a step by running it: what it brings from the host would be on the wrong side."""

    @override
    def warm(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def record(self, body: Body) -> Body:
        return body


def traced(net: nn.Module) -> fx.GraphModule:
    """Its graph, on a device that has no autocast."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch, "autocast", lambda *_: nullcontext())
        patches.setattr(torch, "is_autocast_enabled", lambda kind: True)
        return traced_network(net)


@pytest.mark.parametrize("name", FUSED)
def test_steps_that_are_captured_have_all_they_need_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patches, pretended_device(patches) as reads:
        patches.setattr(packing, "recorder_of", lambda device: Repeats())
        patches.setattr(graph, "traced_network", traced)
        made = fleet(name, CLIENTS, [12] * CLIENTS, device=DEVICE)
        assert next(iter(made.training.captured.values())) is True
        reads.clear()
        found, _ = after(made)
    assert in_sessions(reads) == []
    rows, _ = after(fleet(name, CLIENTS, [12] * CLIENTS))
    assert isinstance(found, There)
    torch.testing.assert_close(found.here, rows, rtol=1e-5, atol=1e-6)


def test_attention_in_packs_has_gradients_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fast kernel would keep nothing for them: below a vmap a tensor needs none."""
    fast: list[bool] = []

    def attend(x: Tensor) -> Tensor:
        assert not x.requires_grad
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.0)

    class Spy(TorchDispatchMode):
        @override
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            fast.append(torch.backends.cuda.mem_efficient_sdp_enabled())
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, 2, 3, 4, requires_grad=True)
    expected = torch.vmap(attend)(x)
    with pretended_device(monkeypatch), PackedFunctions(lambda: streams((), DEVICE)):
        there = x.detach().to(DEVICE).requires_grad_()
        with Spy():
            found = torch.vmap(attend)(there)
    assert set(fast) == {False}
    torch.testing.assert_close(found.here, expected)  # type: ignore[attr-defined]


def test_what_is_on_the_wrong_side_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_device(monkeypatch) as reads:
        x = torch.ones(3, device=DEVICE)
        with pytest.raises(AssertionError, match="on the host"):
            x + torch.ones(3)
        with pytest.raises(AssertionError, match="generator"):
            x.bernoulli_(0.5, generator=torch.Generator())
        with pytest.raises(AssertionError, match="before the values"):
            torch.ones(3).copy_(x, non_blocking=True)
        with pytest.raises(AssertionError, match="order"):
            x.cumsum(0)
        with pytest.raises(TypeError):
            x.numpy()
        assert (x + 1).sum().item() == 6
        x.tolist()
        x[x > 0]
        x.cpu()
    assert [read.split()[0] for read in reads] == [
        "_local_scalar_dense", "tolist", "index", "_to_copy",
    ]  # fmt: skip
