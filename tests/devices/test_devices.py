"""Profiles of devices: numbers, distributions, tables, groups; who is there; what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightfed.devices.delays import Constant, LogNormal, Zipf
from lightfed.devices.devices import Bernoulli, Device, Devices, OnOff, Presence
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator


def written(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text)
    return path


def test_a_table_wins_over_a_group_and_a_group_over_all(tmp_path: Path) -> None:
    table = written(tmp_path, "client,up\n2,7\n0,5\n1,6\n")
    own = {"b": Device(flops=Constant(2e9), up=3.0, latency=0.5)}
    given = Devices(flops=1e9, up=1.0, down=LogNormal(0.0, 1.0), table=table, groups=own)
    values = given.of({"a": 2, "b": 1}, seed=4)
    assert values["flops"].tolist() == [1e9, 1e9, 2e9]
    assert values["up"].tolist() == [5.0, 6.0, 7.0]
    assert values["latency"].tolist() == [0.0, 0.0, 0.5]
    assert np.isinf(values["memory"]).all()
    assert len({*values["down"].tolist()}) == 3
    assert (
        values["down"].tolist() == replace(given, groups={}).of({"a": 3}, seed=4)["down"].tolist()
    )
    assert (
        values["down"].tolist() != replace(given, groups={}).of({"a": 3}, seed=5)["down"].tolist()
    )


def test_shares_of_a_zipf_distribution() -> None:
    """P(Z = z) = z^-2 / (pi^2 / 6), within four standard deviations."""
    drawn = Zipf(12.0).draw(np.random.default_rng(0), 20_000)
    for z in (1, 2, 3):
        share = z**-2 / (np.pi**2 / 6)
        found = (drawn == 12.0 / z).mean()
        assert abs(found - share) < 4 * (share * (1 - share) / 20_000) ** 0.5


def there(rule: Any, rounds: int, clients: int) -> np.ndarray:
    """(rounds, clients) bool."""
    before, found = np.ones(clients, dtype=bool), []
    for t in range(rounds):
        before = rule.there(before, numpy_generator(0, "there", t), float(t), t) > 0
        found.append(before)
    return np.stack(found)


def test_shares_of_clients_that_are_there() -> None:
    """An on/off chain is there for come / (come + leave) of its rounds, and stays so long."""
    assert there(Bernoulli(0.3), 200, 100).mean() == pytest.approx(0.3, abs=0.02)
    chain = there(OnOff(leave=0.1, come=0.3), 400, 200)
    assert chain[0].mean() == pytest.approx(0.75, abs=0.12)
    assert chain.mean() == pytest.approx(0.75, abs=0.02)
    stays = chain[1:][chain[:-1]].mean(), chain[1:][~chain[:-1]].mean()
    assert stays == pytest.approx((0.9, 0.3), abs=0.02)


def test_intervals_of_a_file(tmp_path: Path) -> None:
    rule = Presence(written(tmp_path, "client,from,to\n1,2,3\n0,0,1.5\n1,5,9\n"))
    for now, expected in (
        (0.0, [1, 0]),
        (1.5, [0, 0]),
        (2.0, [0, 1]),
        (4.0, [0, 0]),
        (5.0, [0, 1]),
    ):
        found = rule.there(np.ones(2, dtype=bool), np.random.default_rng(0), now, 0)
        assert found.tolist() == expected
    everyone, first = np.ones(2, dtype=bool), np.array([True, False])
    assert rule.next(1.0, everyone) == 1.0
    assert rule.next(1.5, everyone) == 2.0
    assert rule.next(3.0, everyone) == 5.0
    with pytest.raises(UserError, match=r"availability\.init_args\.path: nobody is there after 2 "):
        rule.next(2.0, first)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("client,up\n0,5\n2,6\n", "table: 0 rows of client 1; give one for each of 3, from 0"),
        ("client,up\n0,5\n1,0\n2,6\n", "table: [0.] as up of client [1]; give more than 0"),
        ("client,up\n0,5\n1,fast\n2,6\n", "table: [nan] as up of client [1]; give more than 0"),
        ("client,speed\n0,5\n1,1\n2,6\n", "a column ['speed']; name columns flops, up, down"),
        ("device,up\n0,5\n", "has no column client"),
        (
            "client,up\n0,5\n1,1\n1,2\n2,6\n",
            "table: 2 rows of client 1; give one for each of 3, from 0",
        ),
    ],
)
def test_tables_that_are_refused(text: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as stated:
        Devices(table=written(tmp_path, text)).of({"all": 3}, seed=0)
    assert stated.value.key == "model.devices.table"
    assert line in str(stated.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("client,from,to\n3,0,2\n3,2,1\n", "row [1] is no interval of a client; give a client"),
        ("client,from,to\n1,0,late\n", "row [0] is no interval of a client"),
        (
            "client,from,to\n3,0,2\n1,5,6\n3,1,4\n",
            "row [2] overlaps another of its client; give disjoint",
        ),
        ("client,from\n3,2\n", "has no column to"),
    ],
)
def test_intervals_that_are_refused(text: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as stated:
        Presence(written(tmp_path, text))
    assert stated.value.key == "model.devices.availability.init_args.path"
    assert line in str(stated.value)


@pytest.mark.parametrize(
    ("devices", "key"),
    [
        (Devices(flops=0.0), "model.devices.flops"),
        (Devices(latency=-1.0), "model.devices.latency"),
        (Devices(server_up=0.0), "model.devices.server_up"),
        (Devices(table=Path("absent.csv")), "model.devices.table"),
    ],
)
def test_numbers_that_are_refused(devices: Devices, key: str) -> None:
    with pytest.raises(UserError) as stated:
        devices.of({"all": 2}, seed=0)
    assert stated.value.key == key
