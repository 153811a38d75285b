"""Clients trained side by side: what one set of operators gives them, and who shares it."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.distributed.placement import blocks, cut
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import SessionContext
from lightfed.local.memory import client_bytes
from lightfed.models.build import blank
from lightfed.networks import MLP
from lightfed.state.costs import activation_bytes
from lightfed.utils.errors import UserError
from tests.packs.federations import (
    CASES,
    CLIENTS,
    SIZES,
    after,
    fleet,
    images,
    mlp,
    parts_of,
    vectors,
)
from tests.small import data_of, fit, random_data, run_round
from tests.tiers import by_default

DRAWS = ("dropout", "dropout of convolutions", "static bn of drops", "masked language model")
ALONE = {"tied": "layers share parameters"}
EQUAL = [name for name in CASES if name not in DRAWS]
# One of each kind of layer, optimiser and hook.
QUICK = (
    "momentum", "groups", "adam", "clipped", "fedprox", "vmap", "tied", "averages", "shifts",
    "late", "dispfl", "my1", "fd", "pfedmoe", "aspg", "phases", "bn", "static bn",
)  # fmt: skip


@pytest.mark.parametrize("name", by_default(EQUAL, *QUICK))
def test_packs_give_what_clients_alone_get(name: str) -> None:
    alone, its = after(fleet(name, "off"))
    for most in (CLIENTS, 3):
        packed = fleet(name, most)
        assert [*packed.training.side_by_side.values()] == [ALONE.get(name, most)]
        rows, metrics = after(packed)
        torch.testing.assert_close(rows, alone, rtol=1e-5, atol=2e-5)
        assert metrics == pytest.approx(its, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", by_default(DRAWS, "dropout"))
def test_draws_of_a_pack_are_its_own_and_repeat(name: str) -> None:
    rows, metrics = after(fleet(name, 4))
    again, its = after(fleet(name, 4))
    assert torch.equal(rows, again)
    assert metrics == its
    assert not torch.equal(rows, after(fleet(name, "off"))[0])


def test_clients_of_a_pack_draw_apart() -> None:
    x, y = torch.randn(8, 4).repeat(CLIENTS, 1), torch.arange(8).repeat(CLIENTS) % 3
    parts = [range(8 * k, 8 * k + 8) for k in range(CLIENTS)]
    data = data_of(x, y, parts, classes=3, batch_size=8)
    made = fleet("dropout", CLIENTS, algorithm=Standalone, data=lambda _: data, epochs=1)
    rows, _ = after(made, 1)
    assert len({tuple(row.tolist()) for row in rows}) == CLIENTS


def test_half_precision_has_gradients_outside_of_autocast() -> None:
    precision = partial(torch.autocast, "cpu", torch.bfloat16)
    alone, packed = (after(fleet("mlp", side, precision=precision))[0] for side in ("off", 7))
    assert (packed - alone).norm() < 1e-2 * alone.norm()
    assert not torch.equal(packed, after(fleet("mlp", 7))[0])


def packs_of(made: Any, clients: list[int]) -> list[list[int]]:
    made.open_round()
    made.send(made.algorithm.model, clients)
    return sorted(sorted(pack) for pack in made.packs.form(made.client_sessions, clients, 0))


def test_packs_of_stateless_clients_have_sessions_of_about_one_length() -> None:
    clients = [*range(CLIENTS)]  # of 2, 3, 1, 4, 2, 2 and 3 batches an epoch
    assert packs_of(fleet("mlp", 4), clients) == [[0, 2, 4], [1, 3, 5, 6]]
    assert packs_of(fleet("mlp", 4), [1, 3, 6]) == [[1, 3, 6]]
    assert packs_of(fleet("mlp", 2), [0, 2, 4]) == [[0, 4]]  # one is alone


def test_batch_statistics_need_batches_of_equally_many_samples() -> None:
    sizes = [5, 9, 5, 9, 5, 7, 5]
    made = fleet("bn", 3, sizes, data=images)
    assert packs_of(made, [*range(CLIENTS)]) == [[0, 2], [1, 3], [4, 6]]


def test_clients_with_rows_are_in_blocks_of_a_group() -> None:
    assert blocks([5, 4], [2, 3]) == [0, 0, 1, 1, 2, 3, 3, 3, 4]
    assert cut([*range(7)], 3) == [[0, 1], [2, 3], [4, 5, 6]]
    made = fleet("standalone", 3)
    assert made.packs.form(made.client_sessions, [0, 2, 3, 6], 0) == [[0, 2]]


class Refuses(FedAvg):
    """One client's session cannot start, and that of another one not end."""

    side_by_side = True
    refused: tuple[int, ...] = (4, 6)

    @override
    def session_start(self, s: SessionContext) -> None:
        if s.client in self.refused[:1]:
            raise RuntimeError("broken")

    @override
    def session_end(self, s: SessionContext) -> None:
        if s.client in self.refused[1:]:
            raise RuntimeError("broken")


class Accepts(Refuses):
    side_by_side = True
    refused = ()


@pytest.mark.pack_raises
@pytest.mark.parametrize("broken", ["hooks", "labels"])
def test_a_failing_client_is_named_and_the_others_train(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    def data(sizes: list[int]) -> Any:
        x = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(0))
        parts = parts_of(sizes)
        y = torch.arange(sum(sizes)) % 3
        if broken == "labels":
            y[parts[4][0]] = y[parts[6][-1]] = 7
        return data_of(x, y, parts, classes=8, batch_size=4)

    model = partial(_Narrow if broken == "labels" else MLP, hidden=(8,))
    algorithm = Refuses if broken == "hooks" else Accepts
    made = fleet("dropout", CLIENTS, model=model, data=data, algorithm=algorithm, epochs=1)
    with caplog.at_level(logging.WARNING):
        run_round(made, 0)
    assert [made.usable(k) for k in range(CLIENTS)] == [k not in (4, 6) for k in range(CLIENTS)]
    assert "client 6" in caplog.text
    assert "client 4" in caplog.text
    assert all(made.row(k).floats.isfinite().all() for k in range(CLIENTS))


class _Narrow(nn.Module):
    """In training it has logits of the classes that good clients have."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], hidden: Any) -> None:
        super().__init__()
        self.layers = nn.Linear(input_shape[0], num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[:, :3] if self.training else self.layers(x)


def test_a_user_s_numbers_are_refused_in_one_line(tmp_path: Path) -> None:
    def federation(side: Any, model: Any = mlp, **more: Any) -> Federation:
        group = ClientGroup(CLIENTS, model)
        made = {"optimizer": partial(SGD, lr=0.1), "evaluate": (), "side_by_side": side} | more
        return Federation(FedAvg(), [group], **made)

    for side in (0, 1, -3):
        with pytest.raises(UserError, match=r"model\.side_by_side"):
            federation(side)
    wide = partial(mlp, hidden=(400, 30))
    found = rf"model\.side_by_side: {CLIENTS}.*fit model\.pack_memory"  # no more than there are
    with pytest.raises(UserError, match=found):
        fit(federation(1_000_000, wide, pack_memory=1), vectors(SIZES), tmp_path / "large")
    fit(federation(3), vectors(SIZES), tmp_path)
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    with pytest.raises(UserError, match=r"model\.side_by_side is \[3\], this run's is \[1\]"):
        fit(federation("off"), vectors(SIZES), tmp_path, rounds=2, ckpt_path=checkpoint)


def test_auto_packs_small_networks_by_32(caplog: pytest.LogCaptureFixture) -> None:
    data = partial(random_data, features=4, batch_size=4)
    with caplog.at_level(logging.INFO):
        made = fleet("mlp", "auto", [8] * 40, data=data)
        assert [*made.training.side_by_side.values()] == [32]
        wide = fleet("mlp", "auto", [8] * 40, data=data, model=partial(MLP, hidden=(40_000,)))
    assert "fill a CPU's cache" in str(wide.training.side_by_side)
    assert "fill a CPU's cache" in caplog.text
    few = fleet("mlp", "auto", data=data)
    few.participants = lambda t: [0, 1, 2]  # type: ignore[method-assign]
    run_round(few, 0)
    off = fleet("mlp", "off", data=data)
    off.participants = lambda t: [0, 1, 2]  # type: ignore[method-assign]
    run_round(off, 0)
    assert torch.equal(few.algorithm.model.floats, off.algorithm.model.floats)  # too few for a pack


@pytest.mark.parametrize(("batch_size", "last", "largest"), [
    (4, "keep", 4), (4, "join", 5), (1000, "keep", 16), (1000, "join", 16),
])  # fmt: skip
def test_memory_is_estimated_for_the_largest_batch_of_a_client(
    batch_size: int, last: Any, largest: int
) -> None:
    source = partial(random_data, batch_size=batch_size, last_batch=last)
    made = fleet("mlp", "off", data=source)
    assert max(SIZES) == 16
    assert made.data.largest_batch == largest
    state = made.groups[0]
    rows = 6 * 4 * state.layout.size
    sample = activation_bytes(state.module, blank(made.data, samples=2))
    found = client_bytes(state.module, state, made.data)
    assert found == rows + 1.5 * largest * sample


def test_small_clients_train_side_by_side_under_a_large_batch_size(tmp_path: Path) -> None:
    """The samples of none fill such a batch: its memory is not needed."""
    federation = Federation(
        FedAvg(), [ClientGroup(4, partial(MLP, hidden=(64,)))], optimizer=partial(SGD, lr=0.1),
        evaluate=(), side_by_side=4, pack_memory=2,
    )  # fmt: skip
    fit(federation, random_data([6, 5, 6, 4], batch_size=10_000), tmp_path)
    assert federation.fleet.training.side_by_side == {"MLP": 4}
