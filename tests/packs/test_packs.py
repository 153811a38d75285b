"""Clients trained side by side: what one set of operators gives them, and who shares it."""

import logging
from collections import Counter
from contextlib import nullcontext
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
from lightfed.networks import MLP, SimpleCNN
from lightfed.packs import packing
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
from tests.pretend import DEVICE, pretended_device
from tests.small import data_of, fit, random_data, run_round
from tests.tiers import by_default

DRAWS = ("dropout", "dropout of convolutions", "static bn of drops", "masked language model")
ALONE = {"tied": "layers share parameters"}
EQUAL = [name for name in CASES if name not in DRAWS]
# One of each kind of layer, optimizer and hook.
QUICK = (
    "momentum", "groups", "adam", "clipped", "fedprox", "vmap", "tied", "averages", "shifts",
    "late", "dispfl", "my1", "fd", "moon of images", "pfedmoe", "aspg", "phases", "bn", "static bn",
)  # fmt: skip


@pytest.mark.parametrize("name", by_default(EQUAL, *QUICK))
def test_packs_give_what_clients_alone_get(name: str) -> None:
    expected_rows, expected_metrics = after(fleet(name, "off"))
    for most in (CLIENTS, 3):
        packed = fleet(name, most)
        assert list(packed.training.side_by_side.values()) == [ALONE.get(name, most)]

        rows, metrics = after(packed)
        torch.testing.assert_close(rows, expected_rows, rtol=1e-5, atol=2e-5)
        assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", by_default(DRAWS, "dropout"))
def test_draws_of_a_pack_are_its_own_and_repeat(name: str) -> None:
    rows, metrics = after(fleet(name, 4))
    rows_again, metrics_again = after(fleet(name, 4))
    assert torch.equal(rows, rows_again)
    assert metrics == metrics_again

    rows_alone, _ = after(fleet(name, "off"))
    assert not torch.equal(rows, rows_alone)


def test_clients_of_a_pack_draw_apart() -> None:
    """Clients with the same samples have models of their own after a session with dropout."""
    x = torch.randn(8, 4).repeat(CLIENTS, 1)
    y = torch.arange(8).repeat(CLIENTS) % 3
    parts = [range(8 * k, 8 * k + 8) for k in range(CLIENTS)]
    data = data_of(x, y, parts, classes=3, batch_size=8)
    made = fleet("dropout", CLIENTS, algorithm=Standalone, data=lambda _: data, epochs=1)

    rows, _ = after(made, rounds=1)
    assert len({tuple(row.tolist()) for row in rows}) == CLIENTS


def test_half_precision_has_gradients_outside_of_autocast() -> None:
    bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)
    alone, _ = after(fleet("mlp", "off", precision=bfloat16))
    packed, _ = after(fleet("mlp", CLIENTS, precision=bfloat16))
    assert (packed - alone).norm() < 1e-2 * alone.norm()

    in_full_precision, _ = after(fleet("mlp", CLIENTS))
    assert not torch.equal(packed, in_full_precision)


def packs_of(made: Any, clients: list[int]) -> list[list[int]]:
    """Return the packs of these participants, each ascending."""
    made.open_round()
    made.send(made.algorithm.model, clients)
    packs = made.packs.form(made.client_sessions, clients, 0)
    return sorted(sorted(pack) for pack in packs)


def test_packs_of_stateless_clients_have_sessions_of_about_one_length() -> None:
    everyone = list(range(CLIENTS))  # with 2, 3, 1, 4, 2, 2 and 3 batches an epoch
    assert packs_of(fleet("mlp", 4), everyone) == [[0, 2, 4], [1, 3, 5, 6]]
    assert packs_of(fleet("mlp", 4), [1, 3, 6]) == [[1, 3, 6]]
    assert packs_of(fleet("mlp", 2), [0, 2, 4]) == [[0, 4]]  # one is alone


def test_a_step_of_a_users_needs_batches_of_equally_many_samples() -> None:
    sizes = [5, 9, 5, 9, 5, 7, 5]
    everyone = list(range(CLIENTS))
    assert packs_of(fleet("averages", 3, sizes), everyone) == [[0, 2], [1, 3], [4, 6]]

    # The statistics of known batch normalization are those of the samples that are not filled up.
    normalized = fleet("bn", 3, sizes, data=images)
    assert packs_of(normalized, everyone) == [[0, 2], [1, 3, 6], [4, 5]]


def norms(kind: str) -> nn.Module:
    """Return a network of vectors with batch normalization of some kind."""
    norm = nn.BatchNorm1d(8, affine=kind != "no weights", track_running_stats=kind != "no buffers")
    norm.requires_grad_(kind != "frozen weights")
    return nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("kind", ["plain", "no weights", "frozen weights", "no buffers"])
def test_filled_samples_are_in_no_statistics(kind: str) -> None:
    sizes = [6, 11, 4, 18, 7, 7, 14]  # batches of 4, 3 and 2
    packed = fleet("mlp", CLIENTS, sizes, model=partial(norms, kind), algorithm=Standalone)
    alone = fleet("mlp", "off", sizes, model=partial(norms, kind), algorithm=Standalone)
    assert packs_of_all(packed) == [list(range(CLIENTS))]

    rows, metrics = after(packed)
    expected_rows, expected_metrics = after(alone)
    torch.testing.assert_close(rows, expected_rows, rtol=1e-4, atol=2e-5)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4)


def packs_of_all(made: Any) -> list[list[int]]:
    """Return the packs if all clients take part."""
    made.open_round()
    return sorted(sorted(p) for p in made.packs.form(made.client_sessions, range(CLIENTS), 0))


@pytest.mark.pack_raises
def test_a_batch_of_one_vector_has_no_variance(caplog: pytest.LogCaptureFixture) -> None:
    """As in a client alone: its pack trains one by one, and the client is named."""
    sizes = [4, 4, 5, 4, 4, 4, 4]
    packed = fleet("mlp", CLIENTS, sizes, model=partial(norms, "plain"), algorithm=Standalone)
    with pytest.raises(Exception, match="Expected more than 1 value per channel"):
        after(fleet("mlp", "off", [5], model=partial(norms, "plain"), algorithm=Standalone))
    after(packed, rounds=1)
    assert "single value in each channel" in caplog.text
    assert "client 2" in caplog.text


def test_clients_with_rows_are_in_blocks_of_a_group() -> None:
    assert blocks([5, 4], [2, 3]) == [0, 0, 1, 1, 2, 3, 3, 3, 4]
    assert cut(list(range(7)), 3) == [[0, 1], [2, 3], [4, 5, 6]]

    made = fleet("standalone", 3)
    assert made.packs.form(made.client_sessions, [0, 2, 3, 6], 0) == [[0, 2]]


@pytest.mark.parametrize(
    ("count", "fraction", "expected_sizes"),
    [
        (40, 1.0, [4] * 10),  # all take part: a pack is a block
        (40, 0.25, [14, 14, 12]),  # three blocks of which about four take part
        (40, 0.05, [40]),
    ],
)
def test_few_participants_with_rows_still_share_packs(
    count: int, fraction: float, expected_sizes: list[int]
) -> None:
    sizes = [4] * count
    made = fleet("standalone", 4, sizes=sizes, fraction=fraction)
    block_sizes = Counter(made.places.packs.values())
    assert list(block_sizes.values()) == expected_sizes

    made.open_round()
    participants = made.participants(0)
    packs = made.packs.form(made.client_sessions, participants, 0)
    in_packs = [client for pack in packs for client in pack]
    assert len(in_packs) == len(set(in_packs))
    assert all(2 <= len(pack) <= 4 for pack in packs)
    for pack in packs:
        assert len({made.places.packs[client] for client in pack}) == 1
    # Only a participant that no other shares a block with, or that is one too many, is alone.
    assert len(in_packs) >= len(participants) - len(expected_sizes)


@pytest.mark.parametrize("name", ["standalone", "momentum"])
def test_packs_of_few_participants_give_what_clients_alone_get(name: str) -> None:
    sizes = [4 + client % 3 for client in range(24)]
    changes: dict[str, Any] = {"sizes": sizes, "fraction": 0.25, "algorithm": Standalone}
    expected_rows, _ = after(fleet(name, "off", **changes), rounds=3)
    rows, _ = after(fleet(name, 3, **changes), rounds=3)
    torch.testing.assert_close(rows, expected_rows, rtol=1e-5, atol=2e-5)


class Plain(FedAvg):
    """FedAvg with hooks that do nothing."""

    side_by_side = True

    @override
    def session_start(self, s: SessionContext) -> None:
        pass

    @override
    def session_end(self, s: SessionContext) -> None:
        pass


class Broken(FedAvg):
    """The session of client 4 cannot start, and that of client 6 cannot end."""

    side_by_side = True

    @override
    def session_start(self, s: SessionContext) -> None:
        if s.client == 4:
            raise RuntimeError("broken")

    @override
    def session_end(self, s: SessionContext) -> None:
        if s.client == 6:
            raise RuntimeError("broken")


@pytest.mark.pack_raises
@pytest.mark.parametrize("broken", ["hooks", "labels"])
def test_a_failing_client_is_named_and_the_others_train(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    def data(sizes: list[int]) -> Any:
        x = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(0))
        y = torch.arange(sum(sizes)) % 3
        parts = parts_of(sizes)
        if broken == "labels":
            y[parts[4][0]] = 7
            y[parts[6][-1]] = 7
        return data_of(x, y, parts, classes=8, batch_size=4)

    model = partial(Narrow if broken == "labels" else MLP, hidden=(8,))
    algorithm = Broken if broken == "hooks" else Plain
    made = fleet("dropout", CLIENTS, model=model, data=data, algorithm=algorithm, epochs=1)
    with caplog.at_level(logging.WARNING):
        run_round(made, 0)

    unusable = [client for client in range(CLIENTS) if not made.usable(client)]
    assert unusable == [4, 6]
    assert "client 4" in caplog.text
    assert "client 6" in caplog.text
    for client in range(CLIENTS):
        assert made.row(client).floats.isfinite().all()


class Narrow(nn.Module):
    """In training it has logits of the three classes that good clients have."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], hidden: Any) -> None:
        super().__init__()
        self.layers = nn.Linear(input_shape[0], num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[:, :3] if self.training else self.layers(x)


def federation(side_by_side: Any, model: Any = mlp, **settings: Any) -> Federation:
    """A federation that is not evaluated."""
    return Federation(
        FedAvg(),
        [ClientGroup(CLIENTS, model)],
        optimizer=partial(SGD, lr=0.1),
        evaluate=(),
        side_by_side=side_by_side,
        **settings,
    )


@pytest.mark.parametrize("side_by_side", [0, 1, -3])
def test_a_pack_has_two_clients_or_more(side_by_side: int) -> None:
    with pytest.raises(UserError, match=r"model\.side_by_side"):
        federation(side_by_side)


def test_a_pack_that_needs_too_much_memory_is_refused(tmp_path: Path) -> None:
    """The number in the line is that of all clients, not the larger one of the user."""
    wide = partial(mlp, hidden=(400, 30))
    line = rf"model\.side_by_side: {CLIENTS}.*fit model\.pack_memory"
    with pytest.raises(UserError, match=line):
        fit(federation(1_000_000, wide, pack_memory=1), vectors(SIZES), tmp_path)


def test_a_run_is_resumed_with_packs_of_the_same_size(tmp_path: Path) -> None:
    fit(federation(3), vectors(SIZES), tmp_path)
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    with pytest.raises(UserError, match=r"model\.side_by_side is \[3\], this run's is \[1\]"):
        fit(federation("off"), vectors(SIZES), tmp_path, rounds=2, ckpt_path=checkpoint)


def test_auto_packs_small_networks_by_32(caplog: pytest.LogCaptureFixture) -> None:
    data = partial(random_data, features=4, batch_size=4)
    with caplog.at_level(logging.INFO):
        small = fleet("mlp", "auto", [8] * 40, data=data, model=partial(MLP, hidden=(5000,)))
        wide = fleet("mlp", "auto", [8] * 40, data=data, model=partial(MLP, hidden=(40_000,)))
    assert list(small.training.side_by_side.values()) == [32]
    assert "fill a CPU's cache" in str(wide.training.side_by_side)
    assert "fill a CPU's cache" in caplog.text


@pytest.mark.parametrize(
    ("device", "mebibytes", "packed"),
    [
        (torch.device("cpu"), 8, 32),
        (torch.device("cpu"), 9, "32 clients take more than model.pack_memory, 256 MiB"),
        (DEVICE, 9, 64),
        (DEVICE, 64, 32),
        (DEVICE, 65, "32 clients take more than model.pack_memory, 2048 MiB"),
    ],
)
def test_the_kind_of_device_says_how_much_memory_packs_have(
    device: torch.device, mebibytes: int, packed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "client_bytes", lambda *_: mebibytes << 20)
    data = partial(random_data, features=4, batch_size=4)
    with nullcontext() if device.type == "cpu" else pretended_device(monkeypatch):
        made = fleet("mlp", "auto", [8] * 40, data=data, device=device)
    assert list(made.training.side_by_side.values()) == [packed]


def test_memory_that_the_user_gives_holds_on_every_device() -> None:
    packs = packing.Packs("auto", 100)
    assert {packs.memory_on(device) for device in (torch.device("cpu"), DEVICE)} == {100}


@pytest.mark.parametrize(
    ("model", "clients"),
    [
        (partial(MLP, hidden=(40,)), 64),  # 2,723 parameters
        (partial(MLP, hidden=(96,)), 40),  # 6,531 parameters: 26 kB of 1 MiB
        (partial(MLP, hidden=(1000,)), 32),
        (partial(SimpleCNN, channels=(2, 4), hidden=4), 64),
    ],
)
def test_auto_packs_more_clients_if_they_are_tiny(model: Any, clients: int) -> None:
    made = fleet("mlp", "auto", [8] * 70, data=images, model=model)
    assert list(made.training.side_by_side.values()) == [clients]


def test_a_pack_of_tiny_clients_fits_the_memory() -> None:
    made = fleet("mlp", "auto", [8] * 70, model=partial(MLP, hidden=(250,)))
    (group,) = made.groups
    one = client_bytes(group.module, group, made.data)
    packs = packing.Packs("auto", memory=2)

    found = packs.of(made, group, lambda module: SGD(module.parameters(), lr=0.1), None)
    assert found.most == int(2 * 2**20 / one)
    assert 32 < found.most < 64


def test_auto_trains_few_participants_of_a_round_alone() -> None:
    data = partial(random_data, features=4, batch_size=4)

    def model_after_a_round(side_by_side: str) -> Tensor:
        made = fleet("mlp", side_by_side, data=data)
        made.participants = lambda t: [0, 1, 2]  # type: ignore[method-assign]
        run_round(made, 0)
        floats: Tensor = made.algorithm.model.floats
        return floats

    assert torch.equal(model_after_a_round("auto"), model_after_a_round("off"))


@pytest.mark.parametrize(
    ("batch_size", "last", "largest"),
    [(4, "keep", 4), (4, "join", 5), (1000, "keep", 16), (1000, "join", 16)],
)
def test_memory_is_estimated_for_the_largest_batch_of_a_client(
    batch_size: int, last: Any, largest: int
) -> None:
    data = partial(random_data, batch_size=batch_size, last_batch=last)
    made = fleet("mlp", "off", data=data)
    assert max(SIZES) == 16
    assert made.data.largest_batch == largest

    state = made.groups[0]
    bytes_of_rows = 6 * 4 * state.layout.size
    bytes_of_a_sample = activation_bytes(state.module, blank(made.data, samples=2))
    expected = bytes_of_rows + 1.5 * largest * bytes_of_a_sample
    assert client_bytes(state.module, state, made.data) == expected


def test_small_clients_train_side_by_side_under_a_large_batch_size(tmp_path: Path) -> None:
    """The samples of none fill such a batch: its memory is not needed."""
    trained = Federation(
        FedAvg(),
        [ClientGroup(4, partial(MLP, hidden=(64,)))],
        optimizer=partial(SGD, lr=0.1),
        evaluate=(),
        side_by_side=4,
        pack_memory=2,
    )
    fit(trained, random_data([6, 5, 6, 4], batch_size=10_000), tmp_path)
    assert trained.fleet.training.side_by_side == {"MLP": 4}
