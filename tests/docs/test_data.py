"""Every example of docs/data.md is run."""

import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from jsonargparse import ArgumentParser

import lightfed.cli.catalog  # noqa: F401 - the short names of classes
from lightfed.data.datamodule import FederatedDataModule
from tests.datasets import tables, tiny

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
EXAMPLES = re.findall(r"```(yaml|python)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files that the page names."""
    root = tmp_path_factory.mktemp("docs")
    rows = tables.points(root / "flowers.csv").read_text()
    (root / "flowers.csv").write_text(rows.replace("a,b,kind,who", "petal,sepal,species,region", 1))
    tables.shades(root / "photos", each=8)
    letters: Any = {"x": ["to be or not"] * 4, "y": [" ", "t", " ", "t"]}
    pixels: Any = {"x": [[0.5] * 784] * 4, "y": [0, 1, 1, 0]}
    for name, content in (("femnist", pixels), ("shakespeare", letters)):
        users = dict.fromkeys(("u1", "u2", "u3"), (content["x"], content["y"]))
        tables.leaf(root / name, train=users, test=users)
    questions = [
        {"title": f"why {i}", "tag": ["torch", "numpy"][i % 2], "author": i % 4} for i in range(24)
    ]
    datasets.Dataset.from_list(questions).to_json(str(root / "questions.json"))
    tables.sentences(root / "stackoverflow")
    tiny.cifar10(root / "data")
    tiny.ag_news(root / "data")
    return root


@pytest.mark.parametrize(("kind", "example"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_page_run(
    kind: str, example: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    if "tokenizer:" in example:
        tables.tokenizer(folder / "tokenizer", ["why", *map(str, range(24))])
    if kind == "python":
        names: dict[str, Any] = {}
        exec(example, names)
        data = names["data"]
    else:
        parser = ArgumentParser()
        parser.add_class_arguments(FederatedDataModule, "data")
        data = parser.instantiate_classes(parser.parse_string(example)).data
    data.prepare(clients=3, seed=0, device=torch.device("cpu"))
    if "flowers" in example:
        assert data.input_shape == (2,)
    plan = data.train_plan(1, order=torch.Generator(), augment=torch.Generator())
    batch: Any = next(data.batches(plan))
    if data.task == "columns":
        assert all(len(column) == len(batch["labels"]) for column in batch.values())
        return
    x, y = batch
    assert x.shape[1:] == data.input_shape
    assert x.isfinite().all()
    assert len(x) == len(y)


def test_the_page_has_an_example_of_every_source() -> None:
    assert len(EXAMPLES) >= 14
    for name in ("Hub", "FromTorch", "CIFAR10", "AGNews", "Digits", "Dataset"):
        assert any(name in example for _, example in EXAMPLES)
