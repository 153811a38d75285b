"""What commands print with --json is what the schemas of docs/json say."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from lightfed.cli import command_line
from lightfed.cli.usage import COMMANDS
from lightfed.cli.wanted import Wanted
from lightfed.lab import sweep
from lightfed.lab.results.run import read
from lightfed.lab.runner import Outcome
from lightfed.utils.json_output import print_json
from tests.lab.reading import check_once
from tests.small import quiet

DOCS = Path(__file__).parents[2] / "docs"
CONFIGURATION = """
trainer: {max_epochs: 2, accelerator: cpu, enable_page: false, enable_progress_bar: false}
model:
  algorithm: HeteroFL
  clients:
    - {count: 2, level: a, model: {class_path: Conv, init_args: {hidden: [4, 8, 8, 8]}}}
    - {count: 2, level: b, model: {class_path: Conv, init_args: {hidden: [4, 8, 8, 8]}}}
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
data: {dataset: Digits, partition: Iid, batch_size: 32}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the runs of two experiments of two seeds."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("json")
        patch.chdir(folder)
        quiet()
        Path("mine.yaml").write_text(CONFIGURATION)
        for name, seed, rate in (("a0", 0, 0.1), ("a1", 1, 0.1), ("b0", 0, 0.01), ("b1", 1, 0.01)):
            words = ["fit", "--config=mine.yaml", f"--trainer.name={name}", f"--model.seed={seed}"]
            command_line.main([*words, f"--model.optimizer.lr={rate}"])
        yield folder


def printed(words: list[str], output: pytest.CaptureFixture[str]) -> Any:
    """What a command prints, as one JSON document and nothing beside it."""
    output.readouterr()
    status: Any = 0
    try:
        command_line.main(words)
    except SystemExit as exit_:
        status = exit_.code
    assert not status
    return json.loads(output.readouterr().out, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def check(found: Any, name: str) -> None:
    """A schema holds, and it names every key of the object and of what is in its lists."""
    schema = json.loads((DOCS / "json" / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(found, schema)
    assert found.keys() == schema["properties"].keys()
    for key, part in schema["properties"].items():
        items = part.get("items", {}).get("properties")
        for item in found[key] if items else ():
            assert item.keys() == items.keys()


def test_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config=mine.yaml", "--world-size=2"]
    found = printed([*words, "--json"], capsys)
    check(found, "plan")

    # The text of the same plan has the same numbers.
    command_line.main(words)
    text = capsys.readouterr().out
    assert f"{found['speedup']:.2f} times that of one rank" in text
    assert [group["name"] for group in found["groups"]] == ["a", "b"]
    for group in found["groups"]:
        assert f"{group['parameters']:,}" in text
    assert len(found["ranks"]) == 2
    assert sum(rank["sessions"] for rank in found["ranks"]) == 4


def test_a_partition(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(["partition", "--config=mine.yaml", "--json"], capsys)
    check(found, "partition")
    assert [client["group"] for client in found["clients"]] == ["a", "a", "b", "b"]
    assert all(sum(client["train_per_class"]) == client["train"] for client in found["clients"])
    assert all(sum(client["test_per_class"]) == client["test"] for client in found["clients"])

    command_line.main(["partition", "--config=mine.yaml"])
    total = sum(client["train"] for client in found["clients"])
    assert f"{total} training samples" in capsys.readouterr().out


def test_a_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(["report", "runs/a0", "--json"], capsys)
    check(found, "report")
    assert (found["rounds"], found["planned"], found["finished"]) == (2, 2, True)
    assert found["groups"] == {"a": 2, "b": 2}

    last = Path("runs/a0/metrics.csv").read_text().splitlines()
    final = dict(zip(last[0].split(","), last[-1].split(","), strict=True))
    assert found["metrics"][found["primary"]]["last"] == float(final[found["primary"]])
    assert found["costs"]["sent"] == found["costs"]["bytes_up"] + found["costs"]["bytes_down"]
    assert Path(found["page"]).is_file()


def test_shared_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(["groups", "--config=mine.yaml", "--json"], capsys)
    check(found, "groups")
    assert found["groups"] == [{"name": "a", "clients": 2}, {"name": "b", "clients": 2}]
    assert found["clients"] == 4

    # The table of the same layers has the same numbers.
    command_line.main(["groups", "--config=mine.yaml"])
    text = capsys.readouterr().out
    for chain in found["chains"]:
        assert f"{chain['parameters']:,}" in text
        assert chain["first"] in text
    layers = [chain["last_layer"] - chain["first_layer"] + 1 for chain in found["chains"]]
    assert all(number >= 1 for number in layers)


def test_a_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "--config=mine.yaml", "--trainer.name=shown", "--trainer.max_epochs=1"]
    found = printed([*words, "--trainer.enable_page=true", "--json"], capsys)
    check(found, "fit")
    assert (found["run"], found["rounds"], found["finished"]) == ("runs/shown", 1, True)
    assert printed(["report", "runs/shown", "--json"], capsys) == found

    # A run that has finished before: there is nothing to train, and the same to say.
    again = printed([*words, "--json", "--ckpt_path=last"], capsys)
    assert again == found


def test_what_code_prints_in_a_fit_is_not_in_the_object(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightfed.networks.cnn import Conv

    forward = Conv.forward

    def talkative(self: Any, x: Any) -> Any:
        print("a step")
        return forward(self, x)

    monkeypatch.setattr(Conv, "forward", talkative)
    words = ["fit", "--config=mine.yaml", "--trainer.name=talks", "--trainer.max_epochs=1"]
    found = printed([*words, "--json"], capsys)
    assert found["finished"]


def test_a_fit_without_a_folder_has_nothing_to_say(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["fit", "--config=mine.yaml", "--trainer.fast_dev_run=true", "--json"])
    assert ended.value.code == 2
    printed_text = capsys.readouterr()
    assert printed_text.out == ""
    assert "--json: no run folder to read" in printed_text.err


def test_a_sweep(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three runs one was finished, one fails, and one has not begun."""
    fit = "fit --config=mine.yaml"
    lines = [f"{fit} --trainer.name=a0 --model.optimizer.lr=0.1"]
    lines += [f"{fit} --trainer.name=new{seed} --model.seed={seed}" for seed in (0, 1)]
    Path("mine.sweep").write_text("\n".join(lines))

    def run_all(runs: Sequence[Wanted], jobs: int) -> Iterator[Outcome]:
        assert jobs == 2
        yield Outcome(runs[1], 2, 1.5, "model.x: found; fix")
        yield Outcome(runs[0], 0, 0.0, "")

    monkeypatch.setattr(sweep, "check", check_once)
    monkeypatch.setattr(sweep, "run_all", run_all)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        command_line.main(["sweep", "mine.sweep", "--json", "--jobs=2"])
    found = json.loads(capsys.readouterr().out, parse_constant=_refuse)
    check(found, "sweep")
    assert ended.value.code == found["status"] == 130
    assert [run["state"] for run in found["runs"]] == ["was finished", "failed", "not begun"]
    finished, failed, _ = found["runs"]
    assert (finished["folder"], finished["seconds"]) == ("runs/a0", None)
    report = printed(["report", "runs/a0", "--json"], capsys)
    assert finished["value"] == report["metrics"][finished["metric"]]["last"]
    assert (failed["status"], failed["error"]) == (2, "model.x: found; fix")


def test_a_study(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs are there; a value that is not finite is null."""
    study = {
        "title": "two rates",
        "common": "mine.yaml",
        "methods": {
            "fast": {"trainer.name": "a", "model.optimizer.lr": 0.1},
            "slow": {"trainer.name": "b", "model.optimizer.lr": 0.01},
        },
        "seeds": "0-1",
        "metric": "global/accuracy",
        "columns": ["global/accuracy", "train_loss"],
        "claims": [{"better": "fast", "than": "slow", "metric": "train_loss"}],
    }
    Path("rates.yaml").write_text(yaml.safe_dump(study))

    def run_all(runs: Sequence[Wanted], jobs: int) -> Iterator[Outcome]:
        for wanted in runs:
            command_line.main(list(wanted.words))
            yield Outcome(wanted, 0, 1.0, "")

    monkeypatch.setattr(sweep, "check", check_once)
    monkeypatch.setattr(sweep, "run_all", run_all)
    found = printed(["study", "rates.yaml", "--json"], capsys)
    check(found, "study")
    (case,) = found["cases"]
    assert case["seeds"] == [0, 1]
    assert [method["name"] for method in case["methods"]] == ["fast", "slow"]

    runs = {name: [read(f"runs/{name}{seed}") for seed in (0, 1)] for name in "ab"}
    differences = [
        a.final("train_loss") - b.final("train_loss") for a, b in zip(*runs.values(), strict=True)
    ]
    (claim,) = case["claims"]
    assert claim["difference"] == pytest.approx(sum(differences) / 2)
    assert claim["low"] < claim["difference"] < claim["high"]
    for method, name in zip(case["methods"], "ab", strict=True):
        finals = [run.final("global/accuracy") for run in runs[name]]
        assert method["values"]["global/accuracy"]["mean"] == pytest.approx(sum(finals) / 2)
        assert method["values"]["global/accuracy"]["seeds"] == 2
        assert method["costs"]["bytes"] > 0
        assert method["costs"]["virtual_seconds"] is None

    with pytest.raises(SystemExit) as ended:
        command_line.main(["study", "rates.yaml", "--json", "--slurm"])
    assert ended.value.code == 2


def test_numbers_that_are_not_finite_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf, "e": "nan"}})
    found = json.loads(capsys.readouterr().out, parse_constant=_refuse)
    assert found == {"a": None, "b": [None, 1.5], "c": {"d": None, "e": "nan"}}


@pytest.mark.parametrize("target", [(), ("--target", "0.99")])
def test_a_comparison(
    target: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [f"runs/{name}" for name in ("a0", "a1", "b0", "b1")]
    found = printed(["compare", *runs, "--json", *target], capsys)
    check(found, "compare")
    assert found["seeds"] == [0, 1]


def test_the_page_names_every_schema() -> None:
    text = (DOCS / "scripts.md").read_text()
    for path in (DOCS / "json").glob("*.json"):
        assert f"json/{path.name}" in text
        assert path.stem in COMMANDS
