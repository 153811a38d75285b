"""`lightfed compare A B C ...`: each against the first, corrected together."""

from pathlib import Path

import pytest

from lightfed.lab import sweep
from lightfed.lab.results.run import read
from tests.lab.test_comparisons import BASE
from tests.lab.test_until import CLEAR, Pretended, command, folder

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


@pytest.mark.parametrize("words", [["--set-b", "model.fraction=0.5"], ["--until", "decided"]])
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
