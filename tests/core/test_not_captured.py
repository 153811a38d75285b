"""Steps of packs that are not recorded: why, and that nothing is lost."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from typing_extensions import override

from lightfed import Fleet, Phase
from lightfed.algorithms.fedprox import FedProx
from lightfed.algorithms.shared.aspg import ASPG
from lightfed.algorithms.standalone import Standalone
from lightfed.engine.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import SessionContext
from lightfed.local.packed.steps.captured import WARM_UP
from lightfed.local.packed.steps.recorder import Body, CudaRecorder
from lightfed.utils.errors import UserError
from tests.core.packs import CLIENTS, after, fleet, mlp, most
from tests.core.tape import Tape
from tests.core.test_captured import UNIFORM, made, turns
from tests.small import fit, random_data, run_round
from tests.strangers.fedrep import FedRep


class Broken(Tape):
    """Cannot record; some of a step's operators may have been noted by then."""

    def __init__(self, *, after_all: bool) -> None:
        super().__init__()
        self._after_all = after_all

    @override
    def record(self, body: Body) -> Body:
        self.recorded += 1
        if self._after_all:
            super().record(body)
        raise RuntimeError("operation not permitted\nwhen stream is capturing")


@pytest.mark.parametrize("invalid", [False, True], ids=["Python", "CUDA"])
def test_a_capture_that_fails_leaves_nothing_behind(
    invalid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch goes on recording to the pool of a capture that CUDA has ended."""
    recording: list[int] = []
    pools = iter(range(9))

    @contextmanager
    def graph(made: object, *, pool: int, **_: Any) -> Iterator[None]:
        assert pool not in recording, "already recording to mempool_id"
        recording.append(pool)
        try:
            yield
        except ValueError:
            if invalid:
                raise RuntimeError("capture invalidated") from None
            recording.remove(pool)
            raise
        recording.remove(pool)

    def end(device: int, pool: int) -> None:
        if pool not in recording:
            raise RuntimeError("not currently recording to mempool_id")
        recording.remove(pool)

    released: list[int] = []
    stream = SimpleNamespace(device=torch.device("cuda", 1))
    for name, fake in {
        "graph": graph, "graph_pool_handle": lambda: next(pools), "Stream": lambda _: stream,
        "CUDAGraph": lambda: SimpleNamespace(replay=len), "current_stream": lambda _: stream,
        "stream": lambda _: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: ended.append([*recording]))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_releasePool", lambda _, pool: released.append(pool), raising=False
    )
    ended: list[list[int]] = []
    recorder = CudaRecorder(torch.device("cuda"))
    recorder.record(lambda: None)
    with pytest.raises(RuntimeError if invalid else ValueError):
        recorder.record(lambda: (_ for _ in ()).throw(ValueError("item()")))
    assert recording == []
    assert released == ([0] if invalid else [])
    assert ended == [[2]]  # a capture that ends, in a pool of its own: the generator draws again
    recorder.record(lambda: ended.append([*recording]))
    assert ended[1] == [1]  # the pool of the failed one is not used again


@pytest.mark.parametrize("after_all", [False, True])
def test_a_step_that_cannot_be_recorded_runs_as_it_is(
    after_all: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tape = Broken(after_all=after_all)
    with caplog.at_level(logging.WARNING):
        found = turns(made("momentum", tape, UNIFORM))
    assert tape.recorded == 1 + after_all  # not again
    lines = [r.getMessage() for r in caplog.records if "not captured" in r.getMessage()]
    assert len(lines) == 1
    assert "RuntimeError: operation not permitted when stream is capturing" in lines[0]
    assert torch.equal(found[0], turns(fleet("momentum", CLIENTS, UNIFORM))[0])


class Hooked(Standalone):
    """Its network has a hook."""

    def __init__(self, hook: Callable[..., Tensor]) -> None:
        super().__init__()
        self._hook = hook

    @override
    def prepare_module(self, module: Any, data: Any) -> None:
        self._hook.stacked = True  # type: ignore[attr-defined]
        module.net.register_forward_hook(self._hook)


def looks(net: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output if output.sum().item() < 1e9 else 0 * output


def brings(net: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output + torch.tensor([0.1, 0.2, 0.3])


def draws(net: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output + torch.zeros(3).normal_(generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("hook", [looks, brings, draws])
def test_what_a_graph_cannot_hold_is_found_when_a_step_is_recorded(
    hook: Callable[..., Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    tape, algorithm = Tape(), partial(Hooked, hook)
    found = turns(made("mlp", tape, UNIFORM, algorithm=algorithm))
    assert tape.warm_steps == WARM_UP
    assert tape.recorded == tape.replays == 0
    assert "Forbidden" in caplog.text
    assert torch.equal(found[0], turns(fleet("mlp", CLIENTS, UNIFORM, algorithm=algorithm))[0])


class Halved(FedProx):
    """Changes gradients otherwise than FedProx declares."""

    side_by_side = True

    def __init__(self) -> None:
        super().__init__(0.3)

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        gradient.mul_(0.5)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("adam", {"optimizer": partial(Adam, amsgrad=True)}, "not plain SGD, Adam, AdamW or ASPG"),
        ("fedprox", {"optimizer": Adam}, "a pull to the model received with Adam"),
        ("fedprox", {"optimizer": ASPG}, "with an optimiser of its own"),
        ("mlp", {"optimizer": ASPG, "clip": 0.5}, "clipped after a pull"),
        ("mlp", {"optimizer": partial(SGD, lr=0.1, momentum=0.5, dampening=0.5)}, "plain SGD"),
        ("dropout", {}, "host draws"),
        ("vmap", {}, "Python"),
        ("mlp", {"algorithm": Halved}, "changes gradients"),
        ("fedprox", {"clip": 0.5}, "clipped after a pull"),
        ("mlp", {"capture": "off"}, "model.capture: off"),
    ],
)
def test_what_is_not_captured_says_why(name: str, settings: dict[str, Any], reason: str) -> None:
    tape = Tape()
    some = made(name, tape, **settings)
    assert most(some) == [CLIENTS]
    after(some)
    assert tape.warm_steps == tape.recorded == 0
    assert reason in str([*some.training.captured.values()])


class Twice(FedRep):
    """Trains the head, and then all: the head has more steps than the body."""

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.phases = (self.phases[0], Phase())


def test_what_only_a_session_shows_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tape, algorithm = Tape(), partial(Twice, "net.layers.5.", head_epochs=1)
    found = after(made("phases with adam", tape, algorithm=algorithm), 3)
    assert tape.warm_steps == 0
    assert caplog.text.count("Adam trains a parameter in several phases") == 1
    plain = after(fleet("phases with adam", CLIENTS, algorithm=algorithm), 3)
    assert torch.equal(found[0], plain[0])


def test_a_client_that_fails_in_a_replayed_step_is_left_out() -> None:
    """The others keep their bits; its label is one that no class has."""
    rows = []
    for tape in (Tape(), None):
        some = made("momentum", tape, UNIFORM, algorithm=Standalone)
        run_round(some, 0)
        run_round(some, 1)
        some.data.train.y[UNIFORM[0]] = 99  # of client 1
        assert run_round(some, 2)["excluded"] == 1.0
        others = [k for k in range(some.clients) if k != 1]
        rows.append(torch.stack([some.row(k).floats.clone() for k in others]))
    assert torch.equal(*rows)


def test_without_a_device_nothing_is_recorded_and_the_environment_says_so(tmp_path: Path) -> None:
    groups = [ClientGroup(3, mlp, name="net")]
    federation = Federation(Standalone(), groups, optimizer=partial(SGD, lr=0.1), side_by_side=2)
    fit(federation, random_data([6] * 3), tmp_path)
    found = json.loads((tmp_path / "run/environment.json").read_text())
    assert found["captured"] == {"net": "no CUDA device"}


def test_another_word_is_refused() -> None:
    with pytest.raises(UserError) as refused:
        Federation(Standalone(), [ClientGroup(2, mlp)], capture="on")  # type: ignore[arg-type]
    assert refused.value.key == "model.capture"
