"""What commands print with --json is what the schemas of docs/json say."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from lightfed.cli import command_line
from lightfed.cli.usage import COMMANDS
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
