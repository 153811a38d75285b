"""`lightfed study`: its claims, its words and cases, and what is refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from pandas import DataFrame
from scipy.special import stdtr, stdtrit

from lightfed.cli.command_line import main
from lightfed.cli.shipped import ROOT
from lightfed.cli.wanted import Wanted
from lightfed.lab import study, sweep
from lightfed.lab.contest import Held, check_terms
from lightfed.lab.results.groups import Group
from lightfed.lab.results.run import read
from lightfed.utils.errors import UserError
from tests.docs.test_json import check
from tests.lab.report.make_run import ENVIRONMENT, write_run
from tests.lab.test_comparisons import BASE, GROUPS, folder

__all__ = ["folder"]  # a fixture

STUDY: dict[str, Any] = {
    "title": "a small study",
    "common": yaml.safe_load(BASE),
    "methods": {"one": {}, "four": {"model.local_epochs": 4}},
    "seeds": "0-1",
    "metric": "personal/accuracy",
    "columns": ["personal/accuracy", "train_loss"],
    "seconds": 1,
    "claims": [{"better": "four", "than": "one", "metric": "train_loss"}],
    "theirs": {"one": {"personal/accuracy": 0.5}},
    "cases": {"short": {}, "long": {"trainer.max_epochs": 2}},
}


def test_a_study_says_whether_its_claim_holds(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "STUDIES", folder)
    (folder / "small.yaml").write_text(yaml.safe_dump(STUDY))
    with pytest.raises(SystemExit) as ended:
        main(["study", "small", "--markdown"])
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert "4 of 4 runs are missing, about 0.1 CPU minutes" in printed.err
    assert "| one | " in printed.out
    assert "50.00 %" in printed.out
    first, _, title = printed.out.splitlines()[:3]
    commit = read(next((folder / "runs").glob("small-short-one*"))).environment["commit"]
    assert first.startswith(f"<!-- study small, commit {commit}, ")
    assert first.endswith(f", digest {study.digest('small')} -->")
    assert title == "# A small study"
    for case, rounds in (("short", 1), ("long", 2)):
        assert f"\n\n## {case.capitalize()}\n\n" in printed.out
        run = next((folder / "runs").glob(f"small-{case}-four*"))
        assert read(run).last_round == rounds
    assert "\n\n| claim |  | difference | corrected p |\n" in printed.out
    # Both cases make the claim, and both claims are corrected together.
    assert printed.out.count("2 claims, corrected together by Holm (1979)") == 2
    with pytest.raises(SystemExit):
        main(["study", "small"])
    printed_again = capsys.readouterr().out
    assert "four is better than one in train loss: " in printed_again
    assert "2 claims, corrected together by Holm (1979)" in printed_again
    with pytest.raises(SystemExit):
        main(["study", "small", "--json"])
    found = json.loads(capsys.readouterr().out)
    check(found, "study")
    assert found["number"] == 2
    assert {case["name"] for case in found["cases"] if case["claims"]} == {"short", "long"}
    with pytest.raises(SystemExit):
        main(["study", "small", "--case", "long", "--json"])
    (long_case,) = json.loads(capsys.readouterr().out)["cases"]
    (alone,) = long_case["claims"]
    # The claim of the other case counts though it is not shown.
    assert alone["p"] == pytest.approx(min(1.0, 2 * p_alone(alone)), rel=1e-6)
    page = (folder / "runs" / "study-small-long" / "comparison.html").read_text()
    assert "2 claims, corrected together by Holm (1979)" in page


def p_alone(claim: dict[str, Any]) -> float:
    """The p value of a claim of two seeds by itself, from its interval."""
    half = (claim["high"] - claim["low"]) / 2
    t = claim["difference"] / half * stdtrit(1, 0.975)
    return float(2 * stdtr(1, -abs(t)))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"metric": "global/accurracy"}, "small.yaml: metric"),
        ({"claims": [{"better": "four", "than": "one", "metric": "f1"}]}, "small.yaml: claims"),
        ({"target": {"global/f1": 0.5}}, "small.yaml: target"),
    ],
)
def test_a_metric_that_no_run_has_ends_a_study_after_its_first_run(
    change: dict[str, Any], key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "small.yaml").write_text(
        yaml.safe_dump({**STUDY, "cases": {"": {"trainer.max_epochs": 1}}, **change})
    )
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(["study", "small.yaml"])
        assert ended.value.code == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"lightfed: error: {key}: ")
        assert line.endswith(", which some runs do not have; see metrics.csv")
        # The second time, no run is trained to find that out.
        assert len(list(folder.glob("runs/*/metrics.csv"))) == 1


def test_time_and_energy_to_a_target_are_columns_of_a_study(tmp_path: Path) -> None:
    """Joules are those of single rounds, which add up; the virtual time is that since the start."""
    groups = []
    for name, joules in (("thrifty", 1.0), ("wasteful", 10.0)):
        runs = []
        for seed in (0, 1):
            metrics = {
                "global/accuracy": (0.1, 0.6, 0.7),
                "joules": (joules, 2 * joules, 4 * joules),
                "virtual_time": (1.0, 5.0, 9.0),
            }
            environment = {**ENVIRONMENT, "seed": seed, "rounds": 3}
            path = tmp_path / f"{name}{seed}"
            write_run(path, metrics=metrics, environment=environment, evaluations=None, counts=None)
            runs.append(read(path))
        groups.append(Group(name, tuple(runs), name))

    columns = ["joules to target", "virtual_time to target"]
    held = Held(groups, DataFrame(), "global/accuracy", [])
    table = study.table_of(held, columns, {}, ("global/accuracy", 0.5))
    goal = "to 50.00 % global accuracy"
    assert table[f"joules {goal}"].tolist() == ["3 J +- 0 J", "30 J +- 0 J"]
    assert table[f"virtual time {goal}"].tolist() == ["5.00 s +- 0 ms"] * 2
    assert table["energy"].tolist() == ["7 J", "70 J"]


# A study with words, of a configuration beside it.
OF_EACH = {"model.optimizer.init_args.lr": "{rate}", "model.local_epochs": "{epochs}"}
WORDED: dict[str, Any] = {
    "title": "learning rates by the batch size",
    "common": "{file}.yaml",
    "cases": {
        "small batches": {"file": "run", "data.batch_size": 5, "shown": "personal/accuracy"},
        "large batches": {"file": "run", "data.batch_size": 20, "shown": "personal/accuracy"},
    },
    "methods": {
        "slow": {"rate": 0.01, "epochs": 1, **OF_EACH},
        "fast": {"rate": 0.2, "epochs": 2, **OF_EACH},
    },
    "seeds": "0-1",
    "metric": "{shown}",
    "columns": ["{shown}"],
    "claims": [{"better": "fast", "than": "slow", "metric": "{shown}"}],
}


def test_a_study_by_its_path_runs_a_case_with_its_words(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration lies beside the study's file, wherever the command is given."""
    (folder / "own").mkdir()
    (folder / "own" / "run.yaml").write_text((folder / "run.yaml").read_text())
    (folder / "run.yaml").unlink()
    (folder / "own" / "rates.yaml").write_text(yaml.safe_dump(WORDED, sort_keys=False))

    with pytest.raises(SystemExit) as ended:
        main(["study", "own/rates.yaml", "--case", "large batches"])
    assert ended.value.code == 0
    assert "fast is better than slow in personal accuracy: " in capsys.readouterr().out

    settings = []
    for path in (folder / "runs").glob("*/config.yaml"):
        config = yaml.safe_load(path.read_text())
        assert config["data"]["batch_size"] == 20
        rate = config["model"]["optimizer"]["init_args"]["lr"]
        settings.append((config["model"]["seed"], rate, config["model"]["local_epochs"]))
    assert sorted(settings) == [(0, 0.01, 1), (0, 0.2, 2), (1, 0.01, 1), (1, 0.2, 2)]


def test_a_study_may_say_words_in_every_value(folder: Path) -> None:
    cases = {"": {"model.clients": [{**GROUPS[0], "count": "{each}"}]}}
    methods = {"two": {"each": 2}, "four": {"each": 4}}
    (folder / "sizes.yaml").write_text(
        yaml.safe_dump({**STUDY, "cases": cases, "methods": methods, "claims": [], "theirs": {}})
    )
    counts = {}
    for method in study.methods_of("sizes.yaml", study.read_study("sizes.yaml"), ""):
        (groups,) = json.loads(method.words[-1].removeprefix("--model.clients="))
        counts[method.name] = groups["count"]
    assert counts == {"two": 2, "four": 4}


def words_of(written: dict[str, Any], case: str) -> dict[str, list[str]]:
    """The words of each method's command but for the configuration and the name of the run."""
    Path("unset.yaml").write_text(yaml.safe_dump(written, sort_keys=False))
    words = {}
    for method in study.methods_of("unset.yaml", study.read_study("unset.yaml"), case):
        words[method.name] = [*method.words[4:]]
    return words


def test_null_unsets_a_key_of_the_common_configuration_or_of_the_case(folder: Path) -> None:
    common = yaml.safe_load(BASE)
    common["model"]["local_epochs"] = 3
    written = {
        **STUDY,
        "common": common,
        "cases": {
            "as it is": {},
            "steps": {"model.local_epochs": None, "model.local_steps": 2},
            "many": {"data.batch_size": 7, "model.fraction": 0.5},
        },
        "methods": {"one": {}, "four": {"model.fraction": None}, "five": {"model.local_epochs": 5}},
        "claims": [],
    }
    # Nobody has given the fraction, so that this null is a value, which the run's parser judges.
    assert words_of(written, "as it is")["four"] == ["--model.fraction=null"]
    assert words_of(written, "steps")["one"] == ["--model.local_steps=2"]
    assert words_of(written, "many")["four"] == ["--data.batch_size=7"]

    assert words_of(written, "steps")["five"] == ["--model.local_epochs=5", "--model.local_steps=2"]

    # Both would be refused together.
    one, *_ = study.methods_of("unset.yaml", study.read_study("unset.yaml"), "steps")
    assert Wanted.of(one.words).values["model.local_steps"] == 2
    assert common["model"]["local_epochs"] == 3


def test_a_fault_is_said_once_for_each_method(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not once for each value that is searched."""
    wrong = {
        **STUDY,
        "methods": {"one": {}, "four": {"model.local_epoch": 4}, "five": {"model.fraction": "x"}},
        "tune": {"model.optimizer.init_args.lr": [0.1, 0.2, 0.3]},
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(wrong, sort_keys=False))
    with pytest.raises(SystemExit) as ended:
        main(["study", "small.yaml", "--case", "short"])
    assert ended.value.code == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2:4] for line in errors] == [
        ["four", "model.local_epoch"],
        ["five", "model.fraction"],
    ]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"case": {"fraction": 0.5}}, "rates.yaml: fraction"),
        ({"case": {"file": "other"}}, "rates.yaml: common"),
        ({"columns": ["{metrics}"]}, "rates.yaml: {metrics}"),
        ({"methods": {"slow": {}, "fast": None}}, "rates.yaml: methods: fast"),
    ],
)
def test_a_word_that_is_not_used_or_has_no_value_is_refused(
    change: dict[str, Any], key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {"small batches": {**WORDED["cases"]["small batches"], **change.pop("case", {})}}
    (folder / "rates.yaml").write_text(
        yaml.safe_dump({**WORDED, "cases": cases, **change}, sort_keys=False)
    )
    with pytest.raises(SystemExit) as ended:
        main(["study", "rates.yaml"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: {key}: " in line


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("methods: {a: {}}\nmethods: {b: {}}\n", "error: methods: given twice"),
        ("methods: {a: [}\n", "error: study: bad.yaml cannot be read"),
        ("seeds: 010\n", "error: seeds: 010, in line 1 of bad.yaml"),
        ("- a list\n", "error: bad.yaml: no keys"),
    ],
)
def test_a_file_of_a_study_that_yaml_reads_otherwise_is_refused(
    written: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.yaml").write_text(written)
    with pytest.raises(SystemExit) as ended:
        main(["study", "bad.yaml"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_study_is_no_configuration_of_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rates.yaml").write_text(yaml.safe_dump(WORDED))
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "rates.yaml"])
    assert ended.value.code == 2
    assert "lightfed study rates.yaml" in capsys.readouterr().err


def test_an_unknown_case_or_study_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rates.yaml").write_text(yaml.safe_dump(WORDED, sort_keys=False))
    for words, said in (
        (["rates.yaml", "--case", "no"], "name one of small batches; large batches"),
        (["nothing.yaml"], "name a file, or one of circle, "),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["study", *words])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_the_cases_of_a_study_are_submitted_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An array for each case: the second need not wait for the first."""
    lists: list[list[str]] = []
    monkeypatch.setattr(
        sweep, "submit", lambda file, *a, **k: lists.append(file.read_text().splitlines()) or 0
    )
    (folder / "rates.yaml").write_text(yaml.safe_dump(WORDED, sort_keys=False))
    words = ["study", "rates.yaml", "--slurm"]
    monkeypatch.setattr(
        sys, "argv", ["lightfed", *words]
    )  # to be repeated when the runs have ended
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert [len(lines) for lines in lists] == [4, 4]
    assert all("small-batches" in line for line in lists[0])
    assert all("large-batches" in line for line in lists[1])
    again = "when the array has ended: lightfed study rates.yaml --slurm"
    assert again in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seeds": ...}, "small.yaml: seeds"),
        ({"rounds": 3}, "small.yaml: rounds"),
        ({"tune_seed": [100, 101]}, "small.yaml: tune_seed"),
        ({"claims": [{"better": "x", "than": "one", "metric": "m"}]}, "small.yaml: claims"),
        ({"seeds": 3}, "small.yaml: seeds"),
        ({"claims": [{"better": "four", "metric": "m"}]}, "small.yaml: claims"),
        ({"claims": {"better": "four", "than": "one", "metric": "m"}}, "small.yaml: claims"),
        ({"methods": ["one", "four"]}, "small.yaml: methods"),
        ({"methods": {}}, "small.yaml: methods"),
        ({"cases": ["short"]}, "small.yaml: cases"),
        ({"columns": "personal/accuracy"}, "small.yaml: columns"),
        ({"metric": ["personal/accuracy"]}, "small.yaml: metric"),
        ({"target": {"personal/accuracy": "high"}}, "small.yaml: target"),
        ({"target": {"personal/accuracy": 0.5, "global/accuracy": 0.5}}, "small.yaml: target"),
        ({"theirs": {"one": 0.5}}, "small.yaml: theirs"),
        ({"differ": "data.partition"}, "small.yaml: differ"),
        ({"seconds": "long"}, "small.yaml: seconds"),
        ({"title": 3}, "small.yaml: title"),
        ({"common": ["run.yaml"]}, "small.yaml: common"),
    ],
)
def test_a_study_with_a_mistake_is_refused(
    change: dict[str, Any], key: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "STUDIES", folder)
    kept = {k: v for k, v in (STUDY | change).items() if v is not ...}
    (folder / "small.yaml").write_text(yaml.safe_dump(kept))
    with pytest.raises(UserError) as refused:
        study.read_study("small")
    assert refused.value.key == key


@pytest.mark.parametrize(
    "most", [pytest.param(3, id="few"), pytest.param(100, id="all", marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize("path", sorted((ROOT / "studies").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_methods_of_every_study_can_be_made(path: Path, most: int, folder: Path) -> None:
    chosen = study.read_study(path.stem)
    for case in list(chosen.cases)[: most - 2]:
        wanted = {}
        for method in study.methods_of(path.stem, chosen, case)[:most]:
            wanted[method.name] = Wanted.of(method.words)
        check_terms(wanted, chosen.differ)
