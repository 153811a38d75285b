"""Rows of a rank's clients: who has which, and what happens to them when there are more."""

from torch import nn

from lightfed.state.rows import ModelLayout, RowStore
from tests.small import CPU


def store_of() -> RowStore:
    return RowStore(ModelLayout.of(nn.BatchNorm1d(4)), device=CPU, host=False)


def fill(store: RowStore, client: int) -> None:
    row = store.row(client)
    row.floats.fill_(float(client))
    row.integers.fill_(client)


def test_a_stateful_client_keeps_its_row_when_the_store_grows() -> None:
    store = store_of()
    assert store.open([3, 5], keep=True)
    for client in (3, 5):
        fill(store, client)
    assert store.open([5, 8], keep=True)
    for client in (3, 5):
        assert store.row(client).floats.eq(client).all()
        assert store.row(client).integers.eq(client).all()
    assert not store.row(8).integers.any()


def test_a_store_that_keeps_its_matrix_keeps_its_views() -> None:
    store = store_of()
    assert store.open([1, 2, 3], keep=False)
    address = store.row(1).floats.data_ptr()
    assert not store.open([7, 8], keep=False)
    assert store.row(7).floats.data_ptr() == address
    assert 1 not in store
    assert 7 in store
    assert store.open([1, 2, 3, 4], keep=False)
    assert store.slots == {1: 0, 2: 1, 3: 2, 4: 3}
