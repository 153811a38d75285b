"""Rows in a file: same bits as in memory, and nothing of them but the space that they need."""

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.engine.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.models import MLP
from lightfed.runs.checkpoint import CLIENTS, load
from lightfed.state.chain import Changes
from lightfed.state.client_state import by_client
from lightfed.state.disk_rows import KEY, DiskRows
from lightfed.state.rows import ModelLayout, Row
from lightfed.testing.digest import digest
from lightfed.utils.errors import DiskError, UserError
from tests.small import CPU, fit, random_data

SIZES = [5, 9, 4, 16, 7, 7, 12, 6]
LAYOUT = ModelLayout.of(nn.BatchNorm1d(4000))  # 64 kB, and integers
ALGORITHMS: dict[str, Any] = {"stateful": partial(LGFedAvg, 1), "stateless": FedAvg}


def initial(value: float = 2.0) -> Row:
    row = Row.zeros(LAYOUT)
    row.floats.fill_(value)
    row.integers.fill_(int(value))
    return row


def store_of(folder: Path, clients: int = 0, value: float = 2.0) -> DiskRows:
    store = DiskRows(LAYOUT, device=CPU, folder=folder)
    store.open(list(range(clients)), keep=True)
    store.fill(initial(value))
    return store


def bytes_on_disk(store: DiskRows) -> int:
    return sum(512 * os.fstat(file._file).st_blocks for file in store._files)


def run(folder: Path, name: str = "stateful", rounds: int = 3, **settings: Any) -> Any:
    """A run in which some clients never take part; the trainer and the federation."""
    flags = {key: settings.pop(key) for key in ("ckpt_path",) if key in settings}
    federation = Federation(
        ALGORITHMS[name](),
        [ClientGroup(3, partial(MLP, hidden=(6,))), ClientGroup(5, partial(MLP, hidden=(6,)))],
        optimizer=partial(SGD, lr=0.2, momentum=0.9),
        clients_per_round=2,
        eval_clients=2,
        export=(),
        **settings,
    )
    return fit(
        federation, random_data(SIZES, batch_size=2), folder, rounds=rounds, **flags
    ), federation


def rows(federation: Federation) -> list[torch.Tensor]:
    return [federation.fleet.row(client).floats.clone() for client in range(len(SIZES))]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("side_by_side", ["off", 3])
def test_a_run_has_the_bits_of_rows_in_memory(name: str, side_by_side: Any, tmp_path: Path) -> None:
    given = {"name": name, "side_by_side": side_by_side}
    _, memory = run(tmp_path / "device", **given)
    _, disk = run(tmp_path / "disk", **given, store="disk", store_folder=str(tmp_path / "rows"))
    assert not list((tmp_path / "rows").iterdir())
    for key, value in memory.state_dict().items():
        assert torch.equal(value, disk.state_dict()[key])
    tables = [(tmp_path / kind / "run/clients.csv").read_text() for kind in ("device", "disk")]
    assert tables[0] == tables[1]
    if name == "stateful":
        assert sum(len(state.store.slots) for state in disk.fleet.groups) < len(SIZES)
        assert all(map(torch.equal, rows(memory), rows(disk)))


def test_a_checkpoint_has_the_clients_in_use_and_a_resumed_run_their_bits(tmp_path: Path) -> None:
    kept = digest(*run(tmp_path / "whole", store="disk"))
    run(tmp_path / "cut", rounds=1, store="disk")
    path = tmp_path / "cut/run/checkpoints/last.ckpt"
    saved = {client for shard in load(path)[CLIENTS] for client in by_client(shard)}
    assert 2 <= len(saved) < len(SIZES)
    assert digest(*run(tmp_path / "cut", store="disk", ckpt_path=path)) == kept


def test_what_a_thread_writes_is_a_copy_of_the_file(tmp_path: Path) -> None:
    _, federation = run(tmp_path, store="disk")
    state = federation.fleet.states()
    chosen = Changes(state).chosen(copy=True)
    for group, block in zip(federation.fleet.groups, chosen["floats"], strict=True):
        clients = block["clients"].tolist()
        assert clients == [*group.store.slots]
        for row in map(group.store.row, clients):
            row.floats.fill_(-5.0)
        assert not block["values"].eq(-5.0).any()


def test_checkpoints_of_one_store_are_read_by_the_other(tmp_path: Path) -> None:
    _, whole = run(tmp_path / "whole")
    for one, other in (("disk", "host"), ("host", "disk")):
        run(tmp_path / one, rounds=1, store=one)
        path = tmp_path / one / "run/checkpoints/last.ckpt"
        _, resumed = run(tmp_path / one, store=other, ckpt_path=path)
        assert all(map(torch.equal, rows(whole), rows(resumed)))


def test_rows_that_are_not_used_take_no_space(tmp_path: Path) -> None:
    store = store_of(tmp_path, clients=100_000)
    before = bytes_on_disk(store)
    assert torch.equal(store.row(77_777).floats, initial().floats)
    store.row(77_777).floats.fill_(3.0)
    used = bytes_on_disk(store) - before
    assert 0 < used < 10 * LAYOUT.size * 4
    assert list(store.slots) == [77_777]
    assert not list(tmp_path.iterdir())


def test_a_clients_row_stays_when_there_are_more(tmp_path: Path) -> None:
    store = store_of(tmp_path, clients=3)
    view = store.row(1)
    view.floats.fill_(7.0)
    assert store.open([3, 4, 5, 6], keep=True)
    assert not store.open([1, 2], keep=True)
    view.integers.fill_(9)
    assert store.row(1).floats.eq(7.0).all()
    assert store.row(1).integers.eq(9).all()
    assert torch.equal(store.row(6).floats, initial().floats)
    with pytest.raises(AssertionError, match="client 7 is not on this rank"):
        store.row(7)


def test_clients_without_state_begin_each_round_at_the_first_row(tmp_path: Path) -> None:
    store = DiskRows(LAYOUT, device=CPU, folder=tmp_path)
    for clients in ([5, 6, 7], [6, 9], [1, 2, 3, 4]):
        store.open(clients, keep=False)
        assert not store.slots
        store.block(clients).floats.fill_(float(clients[0]))
        assert list(store.slots.items()) == [(k, i) for i, k in enumerate(clients)]


def test_a_full_disk_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, room = os.pwrite, 3 * LAYOUT.size * 4 + 1000

    def full(file: int, data: bytes, place: int) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(file, data[: min(room, 5000)], place)
        room -= written
        return written

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskError) as error:
        run_until_full(store_of(tmp_path, clients=9))
    assert (error.value.key, error.value.status) == (KEY, 1)
    assert "client 3 " in error.value.found


def run_until_full(store: DiskRows) -> None:
    for client in range(9):
        row = store.row(client)
        assert row.floats.eq(2.0).all()
        assert row.integers.eq(2).all()


def test_a_folder_that_cannot_hold_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/folder", "a\0b", "x" * 10_000):
        with pytest.raises(UserError) as error:
            store_of(tmp_path / name, clients=2)
        assert (error.value.key, error.value.status) == (KEY, 2)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError) as error:
        Federation(Standalone(), [ClientGroup(2, MLP)], store="host", store_folder=str(tmp_path))
    assert error.value.key == KEY
