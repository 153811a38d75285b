"""`lightfed compare A B C ...`: each against the first, corrected together."""

import json
from pathlib import Path

import pytest

from lightfed.lab import sweep
from lightfed.lab.results.run import read
from lightfed.lab.results.sequential import Design
from tests.docs.test_json import check
from tests.lab.pretended import Pretended
from tests.lab.test_comparisons import BASE
from tests.lab.test_until import CLEAR, command, folder

__all__ = ["folder"]  # a fixture

# A gain that is shown by itself in five seeds, and not as one of three claims: p is .028.
CLOSE = [0.09, 0.04, 0.01, 0.11, 0.05]
COMMAND = ["compare", "one.yaml", "two.yaml", "three.yaml", "four.yaml", "--metric", "train_loss"]


@pytest.fixture
def four(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Configurations that differ in their local epochs: a rival, and three others."""
    pretended = Pretended({2: CLEAR, 3: [0.0] * 5, 4: CLOSE})
    monkeypatch.setattr(sweep, "run", pretended.run)
    for epochs, name in enumerate(("one", "two", "three", "four"), 1):
        assert "local_epochs" not in BASE
        text = BASE.replace("\nmodel:\n", f"\nmodel:\n  local_epochs: {epochs}\n")
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_each_is_compared_with_the_first_and_all_are_corrected(
    four: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = command([*COMMAND, "--table", "latex,csv,markdown"], capsys)
    assert status == 0
    assert len(list((four / "runs").glob("*/metrics.csv"))) == 4 * 5
    flat = " ".join(out.split())
    assert "3 claims, corrected together by Holm (1979)" in flat
    assert "FedAvg (two) is better than FedAvg (one): train loss -1.08" in flat
    assert "identical runs: FedAvg (three) and FedAvg (one)" in flat
    (line,) = [line for line in out.splitlines() if line.startswith("no difference")]
    assert "corrected p 0.057" in line
    assert "a gain above" in line

    # The same from the folders of these runs.
    folders = [str(run) for epochs in (1, 2, 3, 4) for run in (four / "runs").glob(f"*-{epochs}-?")]
    status, out, _ = command(["compare", *folders, "--metric", "train_loss"], capsys)
    assert status == 0
    assert "3 claims, corrected together by Holm (1979)" in " ".join(out.split())
    assert line.partition(": ")[2] in out

    place = four / "runs" / "compare"
    claims = (place / "claims.csv").read_text().splitlines()
    assert claims[0] == "method,against FedAvg (one),difference,corrected p"
    assert [row.split(",")[:2] for row in claims[1:]] == [
        ["FedAvg (two)", "better"],
        ["FedAvg (three)", "identical runs"],
        ["FedAvg (four)", "not shown"],
    ]
    assert r"\toprule" in (place / "claims.tex").read_text()
    assert "| FedAvg (two) | better |" in (place / "claims.md").read_text()
    assert (place / "comparison-table.tex").is_file()
    assert {read(run.parent).seed for run in (four / "runs").glob("*/metrics.csv")} == set(range(5))


def test_several_methods_are_a_study_of_one_case_for_a_program(
    four: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = command([*COMMAND, "--json"], capsys)
    assert status == 0
    found = json.loads(out)
    check(found, "study")
    assert (found["number"], found["correction"]) == (3, "Holm (1979)")
    (case,) = found["cases"]
    assert case["seeds"] == [0, 1, 2, 3, 4]
    assert [method["name"] for method in case["methods"]] == [
        f"FedAvg ({name})" for name in ("one", "two", "three", "four")
    ]
    assert case["methods"][0]["values"]["train_loss"]["mean"] == pytest.approx(2.2)
    verdicts = [claim["verdict"] for claim in case["claims"]]
    assert verdicts == ["better", "identical runs", "not shown"]
    assert {claim["than"] for claim in case["claims"]} == {"FedAvg (one)"}
    close = case["claims"][2]
    assert close["alone"] == "better"
    assert close["p"] == pytest.approx(0.057, abs=5e-4)
    assert close["sequential"] is None


def test_a_method_whose_comparison_has_ended_is_run_no_more(
    four: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is clearly better, the third is the same, and the fourth takes all looks."""
    gains = [*CLOSE, 0.06, 0.05, 0.08]
    pretended = Pretended({2: [1.0 + 0.1 * (seed % 3) for seed in range(8)], 3: [0.0] * 8})
    pretended.gains[4] = gains
    monkeypatch.setattr(sweep, "run", pretended.run)
    words = [*COMMAND, "--until", "decided", "--looks", "5,8"]
    status, out, err = command([*words, "--json"], capsys)
    assert status == 0
    first, second = pretended.seeds
    assert sorted(first) == sorted([0, 1, 2, 3, 4] * 4)
    assert sorted(second) == sorted([5, 6, 7] * 2)  # the first method and the fourth

    found = json.loads(out)
    check(found, "study")
    assert found["correction"] == "Bonferroni"
    (case,) = found["cases"]
    two, three, fourth = case["claims"]
    assert [claim["verdict"] for claim in (two, three)] == ["better", "identical runs"]
    assert [len(claim["seeds"]) for claim in (two, three, fourth)] == [5, 5, 8]
    assert [len(method["values"]) > 0 for method in case["methods"]] == [True] * 4
    # Each claim has a third of the error at all of its looks together.
    design = Design((5, 8), level=0.05 / 3)
    assert fourth["sequential"]["level"] == pytest.approx(0.05 / 3)
    assert fourth["sequential"]["boundaries"] == list(design.boundaries())
    assert fourth["p"] == min(1.0, 3 * fourth["sequential"]["overall_p"])
    assert fourth["verdict"] == "better"
    assert fourth["p"] <= 0.05
    assert "for each of 3 claims, so that one or more are wrongly shown in at most 5 %" in err

    status, out, _ = command([*words, "--table", "csv"], capsys)
    assert status == 0
    assert len(pretended.seeds) == 2
    flat = " ".join(out.split())
    assert "FedAvg (two) is better than FedAvg (one): train loss -1.08" in flat
    assert "decided at look 1 of 2" in flat
    assert "identical runs: FedAvg (three) and FedAvg (one)" in flat
    assert "look 2 of 2" in flat
    rows = (four / "runs" / "compare" / "claims.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == [
        f"FedAvg ({name})" for name in ("two", "three", "four")
    ]


@pytest.mark.parametrize("words", [["--set-b", "model.fraction=0.5"]])
def test_what_is_of_two_configurations_is_refused_for_several(
    words: list[str], four: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = command([*COMMAND, *words], capsys)
    assert status == 2
    (line,) = err.splitlines()
    assert line.startswith(f"lightfed: error: {words[0]}: given for 4 configurations; ")


def test_a_configuration_alone_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = command(["compare", "run.yaml"], capsys)
    assert status == 2
    assert "compare: 1 configuration; name two or more configurations, or run folders" in err
