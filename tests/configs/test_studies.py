"""The studies at the papers' scale: every run of them is a command that parses, on equal terms.

Nobody has trained them: they take days on a card. So what a run would find out late, such as a
column that it does not have, is found out here.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightfed.algorithms.width.control import configuration
from lightfed.cli import shipped
from lightfed.cli.wanted import Wanted
from lightfed.lab.contest import check_terms
from lightfed.lab.results.run import read
from lightfed.lab.results.verdicts import UNTIL
from lightfed.lab.study import STUDIES, Study, methods_of, read_study
from tests.configs.test_configs import ROOT, at_hand, files, lightfed, small, sources

__all__ = ["at_hand", "files", "sources"]  # fixtures

PATHS = [ROOT / "configs" / f"{name}.yaml" for name in shipped.studies()]
by_study = pytest.mark.parametrize(
    "path", PATHS, ids=lambda path: f"{path.parent.name}/{path.stem}"
)


@cache
def study_of(path: Path) -> Study:
    return read_study(str(path))


@cache
def commands(path: Path, case: str) -> dict[str, tuple[str, ...]]:
    """The command of each method."""
    return {one.name: one.words for one in methods_of(str(path), study_of(path), case)}


def test_they_stand_beside_the_configurations_of_their_papers() -> None:
    found = {path.parent.name for path in PATHS}
    assert found == {"heterofl", "dispfl", "flexifed", "pfedmoe", "fedbcd"}
    assert not set(shipped.studies()) & set(shipped.names())


def test_no_two_studies_would_share_a_run() -> None:
    """A run is named by the study, the case and the method."""
    stems = [path.stem for path in [*PATHS, *STUDIES.glob("*.yaml")]]
    assert len(set(stems)) == len(stems)

    for path in PATHS:
        study = study_of(path)
        names = []
        for case in study.cases:
            for words in commands(path, case).values():
                names += [word for word in words if word.startswith("--trainer.name=")]
        assert len(names) == len(set(names)) == len(study.cases) * len(study.methods)


@by_study
def test_no_two_methods_are_the_same(path: Path) -> None:
    for case in study_of(path).cases:
        found = set()
        every = commands(path, case).values()
        for words in every:
            found.add(tuple(word for word in words if not word.startswith("--trainer.name=")))
        assert len(found) == len(every)


@by_study
def test_a_header_names_the_command_of_its_own_file(path: Path) -> None:
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert f"#   lightfed study {path.relative_to(ROOT)}" in header
    study = study_of(path)
    for case in re.findall(r"--case '(.+?)'", "\n".join(header)):
        assert case in study.cases


@by_study
def test_a_result_can_be_stated(path: Path) -> None:
    """It has an interval over contiguous seeds, and rates are searched on others."""
    study = study_of(path)
    assert len(study.seeds) >= 3
    assert list(study.seeds) == list(range(study.seeds[0], study.seeds[-1] + 1))
    assert not set(study.seeds) & set(study.tune_seed)
    assert study.claims


def test_the_page_of_studies_says_how_large_each_is() -> None:
    """If not, this prints the table."""
    rows = []
    for path in PATHS:
        study = study_of(path)
        rounds = 0
        for case in study.cases:
            for words in commands(path, case).values():
                rounds += merged(words)["trainer"]["max_epochs"]
        rounds *= study.size // (len(study.cases) * len(study.methods))
        name = f"`{path.relative_to(ROOT / 'configs')}`"
        sizes = [len(study.cases), len(study.methods), len(study.seeds), study.size, rounds]
        rows.append(f"| {name} | " + " | ".join(f"{size:,}" for size in sizes) + " |")
    assert "\n".join(rows) in (ROOT / "docs" / "studies.md").read_text()


def test_the_commands_of_the_pages_name_studies_and_their_cases() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    named = r"lightfed study ((?:lightfed:|configs/)[\w/.]+)(?: --case '(.+?)')?"
    commands_of_pages = re.findall(named, text, re.S)
    assert len(commands_of_pages) >= 3
    for name, case in commands_of_pages:
        study = read_study(name if name.startswith("lightfed:") else str(ROOT / name))
        assert not case or " ".join(case.split()) in study.cases


def test_a_study_of_the_installation_is_named_like_a_configuration() -> None:
    study = read_study("lightfed:heterofl/levels")
    assert study.path.samefile(ROOT / "configs" / "heterofl" / "levels.yaml")


# Commands.


@by_study
def test_a_method_of_each_algorithm_parses_and_is_on_equal_terms(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first case; what else a method sets has the same type in all of them."""
    monkeypatch.chdir(tmp_path)
    study = study_of(path)
    every = commands(path, next(iter(study.cases)))
    chosen = {str(merged(words)["model"]["algorithm"]): name for name, words in every.items()}
    check_terms({name: Wanted.of(every[name]) for name in chosen.values()}, study.differ)


@pytest.mark.matrix
@pytest.mark.timeout(1200)  # hundreds of commands, on a machine that does other work
@by_study
def test_every_command_parses_and_is_on_equal_terms(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study = study_of(path)
    for case in study.cases:
        every = commands(path, case)
        check_terms({name: Wanted.of(words) for name, words in every.items()}, study.differ)


def test_people_who_never_train_are_studied_on_equal_terms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = STUDIES / "unseen.yaml"
    study = study_of(path)
    for case in study.cases:
        every = commands(path, case)
        wanted = {name: Wanted.of(words) for name, words in every.items()}
        check_terms(wanted, study.differ)
        assert {run.values["data.unseen"] for run in wanted.values()} == {0.2}
        assert {run.values["data.personal_test"] for run in wanted.values()} == {"owner"}


def test_deadlines_are_studied_on_equal_terms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the policy differs, and each method has another one."""
    monkeypatch.chdir(tmp_path)
    path = STUDIES / "deadlines.yaml"
    study = study_of(path)
    assert study.validation > 0
    for case in study.cases:
        policies = []
        others = []
        for words in commands(path, case).values():
            values = Wanted.of(words).values
            policies.append({k: v for k, v in values.items() if k.startswith("model.policy")})
            others.append({k: v for k, v in values.items() if k not in policies[-1]})
        for index, policy in enumerate(policies):
            assert policy not in policies[:index]
            assert others[index] | {"trainer.name": ""} == others[0] | {"trainer.name": ""}


def test_clients_of_few_classes_hold_two_of_forty_shards() -> None:
    """The scheme takes the place of the configuration's, and nothing of that one is left."""
    path = ROOT / "configs" / "flexifed" / "noniid.yaml"
    for case in study_of(path).cases:
        wanted = Wanted.of(commands(path, case)["Clustered-FL"])
        partition = {k: v for k, v in wanted.values.items() if k.startswith("data.partition.")}
        assert partition.pop("data.partition.class_path") == "lightfed.Shards"
        assert partition == {
            "data.partition.init_args.per_client": 2,
            "data.partition.init_args.parts": 20,
        }


def test_a_case_of_cifar100_is_of_cifar100() -> None:
    path = ROOT / "configs" / "pfedmoe" / "scales.yaml"
    case = "CIFAR-100, 50 clients, 20 % a round"
    values = Wanted.of(commands(path, case)["pFedMoE"]).values
    assert values["data.dataset.class_path"].endswith("CIFAR100")
    assert values["data.dataset.init_args.preset"] == "pfedmoe"
    assert values["data.partition.init_args.per_client"] == 10
    assert [values[f"model.clients.{group}.count"] for group in range(5)] == [10] * 5
    assert values["model.fraction"] == 0.2
    assert values["model.algorithm.class_path"].endswith("PFedMoE")


def test_the_table_of_flexifed_has_every_strategy_in_every_row() -> None:
    path = ROOT / "configs" / "flexifed" / "table.yaml"
    study = study_of(path)
    assert len(study.cases) == 9
    for case in study.cases:
        algorithms = {
            merged(words)["model"]["algorithm"] for words in commands(path, case).values()
        }
        expected = {"Standalone", "ClusteredFL", "BasicCommon", "ClusteredCommon", "MaxCommon"}
        assert algorithms == expected


def test_the_last_round_of_figure_4_is_measured() -> None:
    path = ROOT / "configs" / "fedbcd" / "figure4.yaml"
    for words in commands(path, "diversity 6").values():
        trainer = merged(words)["trainer"]
        assert trainer["max_epochs"] % trainer["check_val_every_n_epoch"] == 0


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("splits", 5, {"a1", "a1-e1", "e1", "a1-b1-c1-d1-e1"}),
        ("ablation", 6, {"bn", "in", "ln", "gn", "none"}),
        ("dynamic", 4, {"fix", "dynamic"}),
    ],
)
def test_a_study_of_control_strings_varies_its_field(
    name: str, field: int, values: set[str]
) -> None:
    path = ROOT / "configs" / "heterofl" / f"{name}.yaml"
    for case in study_of(path).cases:
        strings = [
            words[2].rpartition(":")[2].split("_") for words in commands(path, case).values()
        ]
        assert values <= {words[field] for words in strings}
        for other in {1, 2, 3} - {field}:  # users, fraction, split
            assert len({words[other] for words in strings}) == 1


# What a run measures.


@cache
def base_of(name: str) -> str:
    """A configuration by what stands after `--config`, as JSON."""
    if name.startswith("control:"):
        return json.dumps(configuration(name.removeprefix("control:")))
    return json.dumps(yaml.safe_load(Path(name).read_text()))


def merged(words: tuple[str, ...]) -> dict[str, Any]:
    """The configuration of a command, as a file would have it."""
    config: dict[str, Any] = json.loads(base_of(words[words.index("--config") + 1]))
    for word in words[3:]:
        key, _, text = word.removeprefix("--").partition("=")
        *above, last = key.split(".")
        place = config
        for part in above:
            if isinstance(place.get(part), str):  # a class by its name alone
                place[part] = {"class_path": place[part]}
            place = place.setdefault(part, {})
        place[last] = text if key in ("trainer.name", "model.algorithm") else yaml.safe_load(text)
        if key == "model.algorithm" and text.startswith("{"):
            place[last] = json.loads(text)
    return config


@pytest.mark.matrix  # two runs of each
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("at_hand")
@by_study
def test_runs_have_the_columns_of_their_study(path: Path, files: Path, tmp_path: Path) -> None:
    """The first and the last method of the first case, for a round of one batch."""
    case = next(iter(study_of(path).cases))
    study = study_of(path).in_case(case)
    every = commands(path, case)
    for number, name in enumerate([next(iter(every)), list(every)[-1]]):
        config = merged(every[name])
        del config["trainer"]["name"]
        written = tmp_path / "whole" / f"method-{number}.yaml"
        written.parent.mkdir(exist_ok=True)
        written.write_text(yaml.safe_dump(config))
        lightfed("fit", "--config", *small(written, files, tmp_path))

        # A method need not have every column of the table: clients alone have no global model.
        needed = {study.metric}
        if number == 0:
            needed.update(study.columns)
        for claim in study.claims:
            if name in (claim["better"], claim["than"]):
                needed.add(claim["metric"])

        run = read(tmp_path / "runs" / written.stem)
        for column in needed:
            assert run.has(column.removesuffix(UNTIL)), (name, column)
