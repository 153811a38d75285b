"""A record of digests names every case and part in which two commits differ."""

import json
from pathlib import Path

from lightfed.testing import record


def record_of(folder: Path, name: str, *options: str) -> int:
    out = folder / f"{name}.json"
    return record.main([str(out), "--only", "fedavg", "--processes", "1", *options])


def test_a_second_record_is_the_same(tmp_path: Path) -> None:
    packs = ("--packs", "off", "3")
    assert record_of(tmp_path, "first", *packs) == 0
    against = ("--against", str(tmp_path / "first.json"))
    assert record_of(tmp_path, "second", *packs, *against) == 0
    first = json.loads((tmp_path / "first.json").read_text())
    assert list(first) == ["fedavg, packs 3", "fedavg, packs off"]
    assert all(parts.keys() > {"server", "rows", "metrics"} for parts in first.values())


def test_a_difference_is_named_by_case_and_part() -> None:
    before = {"a": {"server": "1", "rows": "2"}, "b": {"server": "1"}, "c": {"server": "1"}}
    after = {"a": {"server": "1", "rows": "3"}, "b": {"server": "1"}, "d": {"server": "1"}}
    assert list(record.differences(before, after)) == [
        "a: rows",
        "c: only in the old record",
        "d: only in the new record",
    ]


def test_a_case_that_fails_fails_the_record(tmp_path: Path) -> None:
    broken = f"{__name__}:BROKEN"
    assert record.main([str(tmp_path / "out.json"), "--cases", broken, "--packs", "off"]) == 1
    digests = json.loads((tmp_path / "out.json").read_text())
    assert digests == {"no network, packs off": {"error": "ZeroDivisionError: division by zero"}}


def no_network() -> None:
    raise ZeroDivisionError("division by zero")


BROKEN = {"no network": record.Case(no_network)}  # type: ignore[arg-type]
