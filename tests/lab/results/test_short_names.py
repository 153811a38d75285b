"""The heads of columns in a comparison of run folders: what differs, and not the folders."""

from pathlib import Path
from typing import Any

import pytest

from lightfed.lab.report.comparison import compare
from lightfed.lab.results.groups import grouped, short_names
from lightfed.lab.results.run import read
from tests.lab.report.make_run import ENVIRONMENT, write_run
from tests.lab.report.read_page import ReadPage

ONE = "model: {{algorithm: x, optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: {}}}}}}}\n"


def heads(root: Path, *configs: str, **changes: Any) -> tuple[str, str]:
    """The names of two experiments of one method with these configurations."""
    runs = []
    for number, config in enumerate(configs):
        environment = {**ENVIRONMENT, "algorithm": "x", **changes}
        folder = write_run(root / f"folder{number}", config=config, environment=environment)
        runs.append(read(folder))
    a, b = grouped(runs)
    return short_names(a, b)


def test_methods_are_named_if_they_differ(tmp_path: Path) -> None:
    runs = [
        read(
            write_run(
                tmp_path / f"folder-{name}",
                config=f"model: {{algorithm: {name}, local_epochs: {epochs}}}\n",
                environment={**ENVIRONMENT, "algorithm": name},
            )
        )
        for name, epochs in (("FedAvg", 1), ("FedProx", 2))
    ]
    a, b = grouped(runs)
    assert short_names(a, b) == ("FedAvg", "FedProx")


def test_a_changed_key_is_named_with_its_values(tmp_path: Path) -> None:
    assert heads(tmp_path, ONE.format("0.1"), ONE.format("0.2")) == ("lr 0.1", "lr 0.2")


def test_all_of_a_few_changed_keys_are_named(tmp_path: Path) -> None:
    configs = [
        f"model: {{local_epochs: {n}, fraction: {n / 10}}}\ndata: {{batch_size: {n}}}\n"
        for n in (1, 2)
    ]
    a, b = heads(tmp_path, *configs)
    assert a == "local_epochs 1, fraction 0.1, batch_size 1"
    assert b == "local_epochs 2, fraction 0.2, batch_size 2"


def test_a_key_that_one_lacks_is_named_in_both(tmp_path: Path) -> None:
    configs = ["model: {local_epochs: 1}\n", "model: {local_epochs: 1, policy: {deadline: 30}}\n"]
    assert heads(tmp_path, *configs) == ("no policy deadline", "policy deadline 30")


def test_levels_are_named_by_their_letters(tmp_path: Path) -> None:
    configs = [
        f"model: {{clients: [{{count: 2, level: a}}, {{count: 2, level: {level}}}]}}\n"
        for level in "be"
    ]
    assert heads(tmp_path, *configs) == ("a-b", "a-e")


def test_data_are_named_if_they_alone_differ(tmp_path: Path) -> None:
    partition = "data: {{partition: {{class_path: Dirichlet, init_args: {{alpha: {}}}}}}}\n"
    configs = [partition.format(alpha) for alpha in (0.1, 0.5)]
    assert heads(tmp_path, *configs) == ("partition alpha 0.1", "partition alpha 0.5")


def test_a_setting_that_reports_do_not_name_is_found_in_the_configuration(tmp_path: Path) -> None:
    configs = [f"data: {{channels_last: {value}}}\n" for value in ("auto", "false")]
    assert heads(tmp_path, *configs) == ("channels_last auto", "channels_last false")


def test_a_long_value_is_cut_where_it_still_differs(tmp_path: Path) -> None:
    same = "a_very_long_name_that_is_the_same_in_both"
    configs = [f"model: {{personal: {same}_{end}}}\n" for end in ("one", "two")]
    a, b = heads(tmp_path, *configs)
    assert a != b
    assert len(a) < 45
    assert a.endswith("_one")


def test_folders_are_named_if_nothing_else_tells_experiments_apart(tmp_path: Path) -> None:
    runs = [
        read(write_run(tmp_path / name, config=None, environment={**ENVIRONMENT, "algorithm": "x"}))
        for name in ("first", "second")
    ]
    a, b = grouped(runs)
    assert short_names(a, b) == ("x, first", "x, second")


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_the_page_of_folders_has_these_heads(tmp_path: Path, seeds: tuple[int, ...]) -> None:
    folders = [
        write_run(
            tmp_path / f"folder-{lr}-{seed}",
            config=f"seed_everything: {seed}\n" + ONE.format(lr),
            environment={**ENVIRONMENT, "algorithm": "x", "seed": seed},
        )
        for lr in ("0.1", "0.2")
        for seed in seeds
    ]
    rows = ReadPage(compare(folders)).table("metric")
    assert list(rows["global accuracy"]) == [
        "metric",
        "lr 0.1",
        "lr 0.2",
        "second - first (95 % paired t interval)",
    ]
