"""Steps of packs that are recorded and replayed: the bits of other steps, and what falls back.

`Tape` stands for the device: it replays operators on the recorded tensors, without Python.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from lightfed_kernels import stream_keys
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from lightfed.algorithms.fedbcd import FedBCD
from lightfed.algorithms.shared.aspg import ASPG
from lightfed.api.fleet import Fleet
from lightfed.data.datasets.dataset import Transform
from lightfed.local.client_group import GroupState
from lightfed.local.packed import rules
from lightfed.local.packed.steps import packing, tensors
from lightfed.local.packed.steps.captured import WARM_UP
from lightfed.utils.rng import DeviceStreams
from tests.core.packs import CLIENTS, SIZES, after, fleet, images
from tests.core.tape import Tape
from tests.small import Tensors, data_of, run_round
from tests.tiers import by_default

UNIFORM = [12] * 5
PULLED: dict[str, Any] = {
    "optimizer": partial(SGD, lr=0.1, momentum=0.9),
    "algorithm": partial(FedBCD, 1, 5, gamma=0.1, steps=(1, 3)),
    "epochs": 1,
}
CARRIED = {"algorithm": partial(FedBCD, 1, 5, gamma=0.1, steps=(1, 3), momentum="client")}
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-2)


def made(name: str, tape: Tape | None, *args: Any, side: Any = CLIENTS, **settings: Any) -> Fleet:
    """A fleet whose device has a recorder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "recorder_of", lambda device: tape)
        return fleet(name, side, *args, **settings)


def turns(some: Fleet, rounds: int = 6) -> tuple[Tensor, list[dict[str, float]]]:
    """All rows and the metrics of rounds with other clients, in other places, and other rates."""
    everybody, metrics = [*range(some.clients)], []
    for t in range(rounds):
        drawn = everybody[t % 3 :] if t % 2 else everybody[: len(everybody) - t % 3]
        some.participants = lambda t, d=drawn: d  # type: ignore[method-assign,misc]
        some.training.lr = 0.1 / (t + 1)
        found = run_round(some, t)
        metrics.append({k: v for k, v in found.items() if k != "seconds"})
    rows = [some.row(k) for k in drawn]
    return torch.stack([torch.cat((r.floats, r.integers.float())) for r in rows]), metrics


CAPTURED = (
    "mlp", "momentum", "adam", "adamw", "clipped", "residual", "fedprox", "standalone", "dispfl",
    "my1", "my2", "lgfedavg", "bn", "one channel", "gn", "static bn", "resnet",
)  # fmt: skip


@pytest.mark.parametrize("sizes", [SIZES, UNIFORM], ids=["ragged", "uniform"])
@pytest.mark.parametrize(
    "name",
    by_default(CAPTURED, "momentum", "adam", "fedprox", "clipped", "dispfl", "bn", "static bn"),
)
def test_replayed_steps_have_the_bits_of_others(name: str, sizes: list[int]) -> None:
    tape = Tape()
    found = turns(made(name, tape, sizes))
    assert tape.recorded
    assert tape.replays > (20 if sizes == UNIFORM else 0)
    fused = turns(made(name, Tape(), sizes, capture="off"))
    assert torch.equal(found[0], fused[0])
    assert found[1] == fused[1]
    plain = turns(fleet(name, CLIENTS, sizes))
    if name == "clipped":  # the norm of a row is not summed tensor by tensor
        torch.testing.assert_close(found[0], plain[0], rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(found[0], plain[0])
    if name != "resnet":  # at the rates of these rounds its roundings grow
        alone = turns(fleet(name, "off", sizes))
        torch.testing.assert_close(found[0], alone[0], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("side", [2, 3])
def test_neither_the_size_of_a_pack_nor_a_record_shows(side: int) -> None:
    whole = turns(made("momentum", Tape(), UNIFORM))
    tape = Tape()
    assert torch.equal(turns(made("momentum", tape, UNIFORM, side=side))[0], whole[0])
    assert tape.replays


@pytest.mark.parametrize("name", ["momentum", "bn"])
def test_a_client_alone_is_padded_in_recorded_steps_too(name: str) -> None:
    rows = []
    for clients, tape in (([2], Tape()), ([*range(5)], None)):
        some = made(name, tape, UNIFORM) if tape else fleet(name, CLIENTS, UNIFORM)
        some.participants = lambda t, c=clients: c  # type: ignore[method-assign,misc]
        run_round(some, 0)
        rows.append(some.row(2).floats.clone())
        assert tape is None or tape.replays
    assert torch.equal(*rows)


@pytest.mark.parametrize(
    "settings",
    [
        {"host_rows": True},
        {"precision": partial(torch.autocast, "cpu", torch.bfloat16)},
        PULLED | {"optimizer": MOMENTUM},
        PULLED | CARRIED | {"optimizer": MOMENTUM},
    ],
    ids=["host rows", "bf16", "pulled", "carried momentum"],
)
def test_what_else_a_session_has(settings: dict[str, Any]) -> None:
    settings = {"optimizer": MOMENTUM} | settings
    tape, rounds = Tape(), 8
    found = after(made("mlp", tape, UNIFORM, **settings), rounds)
    assert tape.replays
    fused = after(made("mlp", Tape(), UNIFORM, capture="off", **settings), rounds)
    assert torch.equal(found[0], fused[0])
    assert found[1] == fused[1]
    plain = after(fleet("mlp", CLIENTS, UNIFORM, **settings), rounds)
    torch.testing.assert_close(found[0], plain[0], rtol=1e-5, atol=1e-6)


def test_augmented_batches_are_copied_to_where_the_step_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transform = Transform((0.0,), (1.0,), crop_padding=1, flip=True)
    monkeypatch.setattr(Tensors, "transform", transform)
    tape = Tape()
    found = turns(made("gn", tape, UNIFORM, data=images))
    assert tape.replays
    assert torch.equal(found[0], turns(fleet("gn", CLIENTS, UNIFORM, data=images))[0])


def test_more_clients_longer_sessions_and_larger_batches_get_more_room() -> None:
    sizes = [3, 3, 4, 4, 12, 12, 24]
    drawn = [[0, 1], [2, 3], [4, 5], [*range(6)], [6, 4, 5], [0, 1], [*range(7)], [0, 1], [0, 1]]
    rows, tape = [], Tape()
    for some in (made("momentum", tape, sizes), fleet("momentum", CLIENTS, sizes)):
        some.participants = lambda t: drawn[t]  # type: ignore[method-assign]
        for t in range(len(drawn)):
            run_round(some, t)
        rows.append(torch.stack([some.row(k).floats.clone() for k in drawn[-1]]))
    assert tape.recorded > 1
    assert tape.replays
    assert torch.equal(*rows)


@pytest.mark.parametrize("name", ["dropout", "dropout of convolutions"])
def test_draws_of_the_device_go_on_in_recorded_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_the_device(seeds: Sequence[int], device: torch.device) -> DeviceStreams:
        keys = stream_keys(seeds)
        return DeviceStreams(keys, torch.zeros_like(keys))

    for module in (rules, tensors, packing):
        monkeypatch.setattr(module, "streams", on_the_device)
    for sizes, side in ((UNIFORM, CLIENTS), (SIZES, CLIENTS), (UNIFORM, 2)):
        tape = Tape()
        found = turns(made(name, tape, sizes, side=side))
        assert tape.replays
        assert torch.equal(found[0], turns(fleet(name, side, sizes))[0])


def few_classes(sizes: list[int]) -> Any:
    """Clients that have two classes of three: 0 and 1, or 1 and 2."""
    x = torch.randn(sum(sizes), 1, 8, 8, generator=torch.Generator().manual_seed(3))
    y = torch.cat([torch.arange(size) % 2 + k % 2 for k, size in enumerate(sizes)])
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return data_of(x, y, parts, classes=3, batch_size=4)


def test_a_client_has_its_own_buffers_in_steps_recorded_with_those_of_others() -> None:
    tape = Tape()
    found = turns(made("static bn", tape, UNIFORM, data=few_classes))
    assert tape.replays
    assert torch.equal(found[0], turns(fleet("static bn", CLIENTS, UNIFORM, data=few_classes))[0])


@pytest.mark.parametrize("sizes", [SIZES, UNIFORM], ids=["ragged", "uniform"])
@pytest.mark.parametrize("name", ["phases", "phases with adam"])
def test_frozen_parameters_stay_in_recorded_phases(name: str, sizes: list[int]) -> None:
    tape = Tape()
    found = turns(made(name, tape, sizes, clip=None))
    assert tape.recorded >= 2
    assert tape.replays
    plain = turns(fleet(name, CLIENTS, sizes, clip=None))
    assert torch.equal(found[0], plain[0])
    clipped = turns(made(name, Tape(), sizes, clip=0.5))
    plain = turns(fleet(name, CLIENTS, sizes, clip=0.5))
    torch.testing.assert_close(clipped[0], plain[0], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("box", [(-0.3, 0.3), None])
@pytest.mark.parametrize("settings", [PULLED, PULLED | CARRIED], ids=["pulled", "carried"])
def test_aspg_of_fedbcd(settings: dict[str, Any], box: tuple[float, float] | None) -> None:
    settings = settings | {"optimizer": partial(ASPG, lr=0.05, box=box)}
    tape = Tape()
    found = after(made("mlp", tape, UNIFORM, **settings), 8)
    assert tape.replays
    plain = after(fleet("mlp", CLIENTS, UNIFORM, **settings), 8)
    assert torch.equal(found[0], plain[0])
    assert found[1] == plain[1]


def test_aspg_with_masks_and_other_rates() -> None:
    tape, settings = Tape(), {"optimizer": partial(ASPG, lr=0.05)}
    found = turns(made("dispfl", tape, UNIFORM, **settings))
    assert tape.replays
    assert torch.equal(found[0], turns(fleet("dispfl", CLIENTS, UNIFORM, **settings))[0])


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_adam_with_decay_and_masks(kind: type[Adam]) -> None:
    settings: dict[str, Any] = {"optimizer": partial(kind, lr=0.01, weight_decay=0.05)}
    tape = Tape()
    found = turns(made("dispfl", tape, UNIFORM, **settings))
    assert tape.replays
    assert torch.equal(found[0], turns(fleet("dispfl", CLIENTS, UNIFORM, **settings))[0])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("momentum", {}), ("adam", {}), ("fedprox", {}), ("mlp", PULLED)),
        ("mlp", PULLED | {"optimizer": partial(ASPG, lr=0.05)}),
    ],
    ids=["momentum", "adam", "received", "pulled", "aspg"],
)
def test_the_memory_of_a_pack_counts_what_stays_on_the_device(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    estimates: list[int] = []

    def note(state: GroupState, data: Any, *, rows: int) -> float:
        estimates.append(rows)
        return 1.0

    monkeypatch.setattr(rules, "client_bytes", note)
    monkeypatch.setattr(rules, "_FEW", len(UNIFORM))
    some = made(name, Tape(), UNIFORM, side="auto", **settings)
    after(some)
    rows, copies = static_rows(some)
    assert estimates == [rules._ROWS + copies - 1]  # one of them is the momentum
    assert rows == 8
    some = made(name, Tape(), UNIFORM, side=5, **settings)
    after(some)
    assert static_rows(some)[0] == 5


def static_rows(some: Fleet) -> tuple[int, int]:
    """Rows of the matrices that stay for recorded steps, and how many such matrices there are."""
    trainer = some.training._packs._trainers[0]
    stepper, recorded = trainer._fused, trainer._recorded
    assert stepper is not None
    assert recorded is not None
    assert recorded._home is not None
    rows = recorded._home.pack.rows.floats
    kept = [rows, stepper._gradient, stepper._anchors, *stepper._moments]
    assert {matrix.shape for matrix in kept} <= {rows.shape, (0, 0)}
    return len(rows), sum(matrix.numel() > 0 for matrix in kept)


def test_every_step_trains_once() -> None:
    """Recorded in the third step of a kind; those before it run as they are."""
    tape = Tape()
    some = made("mlp", tape, UNIFORM)
    after(some, 2)
    steps = 2 * 2 * 3  # rounds, epochs, batches
    assert (tape.warm_steps, tape.recorded, tape.replays) == (WARM_UP, 1, steps - WARM_UP)
