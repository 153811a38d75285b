"""The heads of columns in a comparison of run folders: what differs, and not the folders."""

from collections.abc import Sequence
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


def written(root: Path, method: str, lr: str, final: float, data: str = "Digits") -> list[Path]:
    """The folders of an experiment with two seeds and a rate, which ends with an accuracy."""
    folders = []
    for seed in (0, 1):
        folder = write_run(
            root / f"folder-{method}-{lr}-{data}-{seed}",
            config=f"seed_everything: {seed}\ndata: {{dataset: {data}}}\n"
            + ONE.format(lr).replace(" x,", f" {method},"),
            environment={**ENVIRONMENT, "algorithm": method, "seed": seed, "dataset": data},
            metrics={"global/accuracy": (0.1, 0.2, final + 0.001 * seed), "seconds": (1, 1, 1)},
        )
        folders.append(folder)
    return folders


def verdicts_of(folders: Sequence[Path], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The verdict lines of a comparison, without their numbers."""
    capsys.readouterr()
    compare(folders)
    lines = capsys.readouterr().out.splitlines()
    return [line.partition(": global accuracy")[0] for line in lines if " better than " in line]


def test_a_verdict_names_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [*written(tmp_path, "x", "0.1", 0.5), *written(tmp_path, "x", "0.2", 0.7)]
    assert verdicts_of(folders, capsys) == ["lr 0.2 is better than lr 0.1"]


def test_verdicts_of_one_comparison_have_different_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rates of y are compared with x: that y is better would not say which."""
    folders = [*written(tmp_path, "x", "0.1", 0.5), *written(tmp_path, "x", "0.2", 0.6)]
    folders += [*written(tmp_path, "y", "0.1", 0.7), *written(tmp_path, "y", "0.2", 0.8)]
    assert verdicts_of(folders, capsys) == [
        "lr 0.2 is better than lr 0.1",
        "y, lr 0.1 is better than x, lr 0.1",
        "y, lr 0.2 is better than x, lr 0.1",
    ]


def test_a_verdict_names_the_data_if_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for data in ("Digits", "Tones"):
        folders += written(tmp_path, "x", "0.1", 0.5, data)
        folders += written(tmp_path, "y", "0.1", 0.7, data)
    assert verdicts_of(folders, capsys) == [
        "Digits: y is better than x",
        "Tones: y is better than x",
    ]


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
