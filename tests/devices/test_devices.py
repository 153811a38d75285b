"""Devices of clients: numbers, distributions, tables, groups; who is there; what is refused."""

from pathlib import Path

import numpy as np
import pytest

from lightfed.devices.delays import Constant, LogNormal, Zipf
from lightfed.devices.devices import (
    Availability,
    Bernoulli,
    Device,
    Devices,
    OnOff,
    Presence,
)
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator


def written(folder: Path, text: str) -> Path:
    """Return a .csv file with this text."""
    path = folder / "table.csv"
    path.write_text(text)
    return path


def test_a_table_wins_over_a_group_and_a_group_over_all(tmp_path: Path) -> None:
    devices = Devices(
        flops=1e9,
        up=1.0,
        table=written(tmp_path, "client,up\n2,7\n0,5\n1,6\n"),
        groups={"b": Device(flops=Constant(2e9), up=3.0, latency=0.5)},
    )
    values = devices.of({"a": 2, "b": 1}, seed=4)
    assert values["flops"].tolist() == [1e9, 1e9, 2e9]
    assert values["up"].tolist() == [5.0, 6.0, 7.0]
    assert values["latency"].tolist() == [0.0, 0.0, 0.5]
    assert np.isinf(values["memory"]).all()


def test_draws_depend_on_the_client_and_the_seed_but_not_on_groups() -> None:
    devices = Devices(down=LogNormal(0.0, 1.0))

    def drawn(counts: dict[str, int], seed: int) -> list[float]:
        return devices.of(counts, seed=seed)["down"].tolist()

    in_two_groups = drawn({"a": 2, "b": 1}, seed=4)
    assert len(set(in_two_groups)) == 3
    assert in_two_groups == drawn({"a": 3}, seed=4)
    assert in_two_groups != drawn({"a": 3}, seed=5)


def test_shares_of_a_zipf_distribution() -> None:
    """P(Z = z) = z^-2 / (pi^2 / 6), within four standard deviations."""
    count = 20_000
    drawn = Zipf(12.0).draw(np.random.default_rng(0), count)
    for z in (1, 2, 3):
        probability = z**-2 / (np.pi**2 / 6)
        deviation = (probability * (1 - probability) / count) ** 0.5
        share = (drawn == 12.0 / z).mean()
        assert abs(share - probability) < 4 * deviation


def availability(rule: Availability, rounds: int, clients: int) -> np.ndarray:
    """Return which clients are there in each round, (rounds, clients) bool."""
    before = np.ones(clients, dtype=bool)
    is_there = []
    for t in range(rounds):
        rng = numpy_generator(0, "there", t)
        before = rule.there(before, rng, float(t), t) > 0
        is_there.append(before)
    return np.stack(is_there)


def test_a_share_of_the_clients_is_there() -> None:
    assert availability(Bernoulli(0.3), 200, 100).mean() == pytest.approx(0.3, abs=0.02)


def test_a_chain_stays_where_it_is_with_its_probabilities() -> None:
    """It is there for come / (come + leave) of all rounds, from the first one on."""
    chain = availability(OnOff(leave=0.1, come=0.3), 400, 200)
    assert chain[0].mean() == pytest.approx(0.75, abs=0.12)
    assert chain.mean() == pytest.approx(0.75, abs=0.02)

    before = chain[:-1]
    after = chain[1:]
    assert after[before].mean() == pytest.approx(1 - 0.1, abs=0.02)
    assert after[~before].mean() == pytest.approx(0.3, abs=0.02)


def test_intervals_of_a_file(tmp_path: Path) -> None:
    rule = Presence(written(tmp_path, "client,from,to\n1,2,3\n0,0,1.5\n1,5,9\n"))
    everyone = np.ones(2, dtype=bool)
    expected = {0.0: [1, 0], 1.5: [0, 0], 2.0: [0, 1], 4.0: [0, 0], 5.0: [0, 1]}
    for now, is_there in expected.items():
        assert rule.there(everyone, np.random.default_rng(0), now, 0).tolist() == is_there

    assert rule.next(1.0, everyone) == 1.0
    assert rule.next(1.5, everyone) == 2.0
    assert rule.next(3.0, everyone) == 5.0

    only_the_first = np.array([True, False])
    with pytest.raises(
        UserError, match=r"availability\.init_args\.path: no client is available after 2 "
    ):
        rule.next(2.0, only_the_first)


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
        (
            "client,from,to\n3,0,2\n3,2,1\n",
            "row [1] is not an interval of a client;",
        ),
        ("client,from,to\n1,0,late\n", "row [0] is not an interval of a client"),
        (
            "client,from,to\n3,0,2\n1,5,6\n3,1,4\n",
            "row [2] overlaps another interval of the same client; give disjoint",
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
