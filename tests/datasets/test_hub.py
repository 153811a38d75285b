"""`Hub`: every format, the choice of columns, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from lightfed.data.dataset import Transform, moments
from lightfed.data.partition.schemes import Natural
from lightfed.datasets.hub import Hub
from lightfed.datasets.vision import CIFAR10, CIFAR100
from lightfed.utils.errors import UserError
from tests.datasets import kit, tables
from tests.datasets.kit import prepared


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    return tmp_path / "cache" / "lightfed"


def written(path: Path, kind: str) -> str:
    """The points of `tables.points` in another format."""
    table = datasets.Dataset.from_csv(str(tables.points(path / "a.csv")))
    target = path / f"points.{kind}"
    if kind == "folder":
        target.mkdir()
        table.to_parquet(str(target / "train.parquet"))
    elif kind == "saved":
        table.save_to_disk(str(target))
    elif kind == "arrow":
        table.save_to_disk(str(path / "saved"))
        (arrow,) = (path / "saved").glob("*.arrow")
        arrow.rename(target)
    elif kind == "tsv":
        table.to_csv(str(target), sep="\t", index=False)
    else:
        {"csv": table.to_csv, "json": table.to_json, "parquet": table.to_parquet}[kind](str(target))
    return str(target)


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "parquet", "arrow", "folder", "saved"])
def test_a_table_of_any_format_is_the_same_data(kind: str, tmp_path: Path) -> None:
    data = Hub(written(tmp_path, kind), test=0.25, label="kind", features=["a", "b"], group="who")
    train, test = data.load("train"), data.load("test")
    assert (data.classes, data.input_shape, data.num_classes) == (tables.KINDS, (2,), 2)
    assert (len(train), len(test)) == (30, 10)
    assert test.y.bincount().tolist() == [5, 5]  # as many of every class
    for split in (train, test):
        assert split.x.dtype == torch.float32
        assert torch.equal((split.x.mean(1) > 0.5).long(), split.y)
        assert split.groups is not None
        assert set(split.groups.tolist()) == {0, 1, 2}
    mean, std = moments(train.x)
    assert data.transform == Transform(mean, std)


def test_the_columns_left_are_the_samples_if_they_are_of_one_kind(tmp_path: Path) -> None:
    path = tables.points(tmp_path / "points.csv")
    assert Hub(str(path), test=0.25, label="kind", group="who").input_shape == (2,)


def test_moments_are_those_of_the_channels() -> None:
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (7, 3, 4, 5))).byte()
    mean, std = moments(x)
    by_channel = (x.double() / 255).transpose(0, 1).flatten(1)
    np.testing.assert_allclose(mean, by_channel.mean(1), atol=1e-6)
    np.testing.assert_allclose(std, by_channel.std(1, correction=0), atol=1e-6)
    assert moments(torch.full((3, 1), 2.0)) == ((2.0,), (1.0,))
    small = torch.tensor([[1.0], [3.0]], dtype=torch.float64) * 1e-9
    assert moments(small) == ((2e-9,), (1e-9,))
    assert moments(torch.tensor([[1.0], [torch.nan], [torch.inf]]))[1] == (1.0,)


def test_a_folder_of_images_is_decoded_once_unless_it_changes(tmp_path: Path, cache: Path) -> None:
    root = tables.shades(tmp_path / "shades")
    data = Hub(str(root), crop_padding=1, flip=True)
    loaded = data.load("train")
    assert (data.classes, data.input_shape) == (tables.KINDS, (3, 8, 8))
    assert loaded.x[:, 0, 0, 0].tolist() == [0, 16, 32, 128, 144, 160]
    assert loaded.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.transform == Transform(*moments(loaded.x), 1, True)
    data.fetch()
    times = {path: path.stat().st_mtime_ns for path in cache.rglob("output.pkl")}
    again = Hub(str(root))
    assert torch.equal(again.load("train").x, loaded.x)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("output.pkl")} == times
    changed = (root / "train" / "cat" / "0.png").rename(root / "train" / "cat" / "9.png")
    assert Hub(str(root)).load("train").x[:3, 0, 0, 0].tolist() == [16, 32, 0]
    Image.new("RGB", (8, 8), (7, 7, 7)).save(changed)
    os.utime(changed, (1, 1))
    assert Hub(str(root)).load("train").x[:3, 0, 0, 0].tolist() == [16, 32, 7]


def test_images_are_resized_and_may_be_grey(tmp_path: Path) -> None:
    root = tables.shades(tmp_path / "shades", each=1)
    for path in root.rglob("*.png"):
        Image.new("L", (10, 6), 9).save(path)
    Image.new("L", (4, 4), 9).save(root / "train" / "dog" / "0.png")
    data = Hub(str(root), image_size=5)
    assert data.load("train").x.shape == (2, 1, 5, 5)
    with pytest.raises(UserError, match=r"train: sample 1 .*image_size"):
        Hub(str(root)).load("train")


def test_a_table_may_name_the_files_of_images(tmp_path: Path) -> None:
    tables.shades(tmp_path)
    rows = "".join(f"train/dog/{i}.png,{i}\n" for i in (0, 1, 2, 2))
    (tmp_path / "list.csv").write_text(f"file,number\n{rows}")
    splits = {"train": "train[:3]", "test": "train[3:]"}
    given: Any = {"image": "file", "label": "number"} | splits
    loaded = Hub(str(tmp_path / "list.csv"), **given).load("train")
    assert loaded.x.shape == (3, 3, 8, 8)
    for i in range(3):  # the table stays as it is
        path = tmp_path / "train" / "dog" / f"{i}.png"
        Image.new("RGB", (8, 8), (7, 7, 7)).save(path)
        os.utime(path, (i, i))
    assert Hub(str(tmp_path / "list.csv"), **given).load("train").x.unique().tolist() == [7]


def test_each_client_may_have_a_folder_of_images(tmp_path: Path) -> None:
    owners = ("anna", "ben")
    for split, count in (("train", 3), ("test", 1)):
        lines = ["file_name,kind,owner"]
        for brightness, owner in enumerate(owners):
            folder = tmp_path / "photos" / split / owner
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("L", (4, 4), 10 * brightness + i).save(folder / f"{i}.png")
                lines.append(f"{owner}/{i}.png,{('cat', 'dog')[i % 2]},{owner}")
        (folder.parent / "metadata.csv").write_text("\n".join(lines) + "\n")

    data = prepared(
        Hub(str(tmp_path / "photos"), label="kind", group="owner"), Natural(), clients=2
    )
    owned = []
    for client in range(2):
        samples = data.train.stored[data.partition_.train(client)]
        owned.append(sorted(samples.flatten(1).float().mean(1).tolist()))
    darker, brighter = sorted(owned)
    assert len(darker) == len(brighter) == 3
    assert max(darker) < min(brighter)


def test_texts_are_letters(tmp_path: Path) -> None:
    lines = [{"say": "Ab" * (i % 2 + 1), "y": i % 2} for i in range(8)]
    (tmp_path / "says.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = Hub(str(tmp_path / "says.jsonl"), test=0.25, length=5)
    train = data.load("train")
    assert (data.classes, data.input_shape, data.transform) == (("0", "1"), (5,), None)
    assert sorted(set(map(tuple, train.x.tolist()))) == [(1, 2, 0, 0, 0), (1, 2, 1, 2, 0)]


def test_images_may_be_in_the_table(tmp_path: Path) -> None:
    """As the hub stores them: a struct of bytes and path."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow.parquet import write_table  # type: ignore[import-untyped]

    source = next(tables.shades(tmp_path / "a").rglob("*.png"))
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])}
    )
    (tmp_path / "hub").mkdir()
    rows = [{"bytes": source.read_bytes(), "path": source.name}] * 4
    table = pyarrow.table({"image": rows, "label": [0, 1, 0, 1]})
    schema = features.arrow_schema.metadata
    write_table(table.replace_schema_metadata(schema), tmp_path / "hub" / "train-0.parquet")
    data = Hub(str(tmp_path / "hub"), test="train[50%:]", train="train[:50%]")
    assert data.classes == ("x", "y")
    assert data.load("test").y.tolist() == [0, 1]
    assert data.input_shape == (3, 8, 8)


@pytest.mark.parametrize("form", ["struct", "bytes", "struct without a path"])
def test_pictures_need_no_metadata_of_hugging_face(form: str, tmp_path: Path) -> None:
    """As pyarrow and polars write them."""
    import pyarrow
    from pyarrow.parquet import write_table

    files = sorted(tables.shades(tmp_path / "a").rglob("train/*/*.png"))
    pictures: list[Any] = [file.read_bytes() for file in files]
    if form == "struct":
        pictures = [{"bytes": content, "path": "x.png"} for content in pictures]
    elif form == "struct without a path":
        pictures = [{"bytes": content} for content in pictures]

    columns = {"picture": pictures, "kind": [file.parent.name for file in files]}
    write_table(pyarrow.table(columns), tmp_path / "all.parquet")
    data = Hub(str(tmp_path / "all.parquet"), label="kind", test=0.34)
    train = data.load("train")
    shades = [Image.open(file).getpixel((0, 0))[0] for file in files]  # type: ignore[index]
    assert data.input_shape == (3, 8, 8)
    assert len(train) == 3
    assert set(train.x[:, 0, 0, 0].tolist()) < set(shades)
    # Dogs are brighter.
    assert train.y.tolist() == [int(value >= 128) for value in train.x[:, 0, 0, 0].tolist()]


def test_columns_that_are_no_samples_are_named_with_their_types(tmp_path: Path) -> None:
    rows = [{"when": {"day": 1, "month": 2}, "kind": "a"}] * 4
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "days.parquet"))
    line = refused("features", tmp_path / "days.parquet", label="kind", test=0.5)
    assert "which of the columns when ({'day': Value" in line


def test_a_table_has_the_constants_and_the_augmentation_of_a_paper(tmp_path: Path) -> None:
    root = str(tables.shades(tmp_path / "shades"))
    for preset in ("fedbcd", "pfedmoe"):
        expected = CIFAR10("x", preset=preset).transform
        assert Hub(root, preset=f"CIFAR10/{preset}").transform == expected
    assert Hub(root, preset="CIFAR100/dispfl").transform == CIFAR100("x").transform
    assert "choose one of MNIST," in refused("preset", root, preset="CIFAR10/none")
    assert "the preset says" in refused("flip", root, preset="CIFAR10/fedbcd", flip=True)
    with pytest.raises(UserError, match=r"preset: MNIST, but the samples .* of 1 channels"):
        _ = Hub(root, preset="MNIST").transform


def test_texts_can_be_bytes(tmp_path: Path) -> None:
    texts = ["Ab", "é!"]
    rows = [{"say": texts[i % 2], "label": i % 2} for i in range(8)]
    datasets.Dataset.from_list(rows).to_json(str(tmp_path / "says.json"))
    path = tmp_path / "says.json"
    train = Hub(str(path), test=0.25, length=4, alphabet="bytes").load("train")
    known = {tuple(text.encode().ljust(4, b"\0")) for text in texts}
    assert train.x.dtype == torch.uint8
    assert set(map(tuple, train.x.tolist())) == known
    # Letters in between are read anew, and not from what the cache has of bytes.
    letters = Hub(str(path), test=0.25, length=4).load("train")
    assert set(map(tuple, letters.x.tolist())) == {(1, 2, 0, 0), (0, 41, 0, 0)}
    assert "choose one of letters, bytes" in refused("alphabet", path, alphabet="utf8")
    points = tables.points(tmp_path / "points.csv")
    given: Any = {"label": "kind", "features": ["a", "b"], "test": 0.5}
    assert "samples are features" in refused("alphabet", points, alphabet="bytes", **given)


def test_a_class_that_only_test_samples_have_can_be_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "points.csv"
    path.write_text("a,label\n1,x\n2,y\n3,z\n4,x\n5,w\n6,z\n")
    both: Any = {"features": "a", "train": "train[:2]", "test": "train[2:]"}
    assert "unknown_labels: drop" in refused("label", path, **both)

    data = Hub(str(path), unknown_labels="drop", **both)
    assert data.classes == ("x", "y")
    assert data.load("test").x.flatten().tolist() == [4]
    assert data.load("train").y.tolist() == [0, 1]
    assert "dropped 3 of 4 test samples; no training sample has their classes: 'w', 'z'" in (
        caplog.text
    )

    # A missing class is a mistake in any case.
    path.write_text("a,label\n1,x\n2,y\n3,\n4,x\n")
    assert "sample 0 has None" in refused("label", path, unknown_labels="drop", **both)
    # Nothing to be tested on is refused, too.
    path.write_text("a,label\n1,x\n2,y\n3,z\n4,z\n")
    assert "no samples" in refused("test", path, unknown_labels="drop", **both)


def test_leafs_lines_are_texts_of_their_writers(tmp_path: Path) -> None:
    """Shakespeare: the letter after a line is its class, and may be any sign."""
    lines: list[object] = ["to be or not", "o be or not "]
    users = {"ROMEO": (lines, [" ", "t"]), "JULIET": (lines[:1], ["?"])}
    root = tables.leaf(tmp_path / "plays", train=users, test={"ROMEO": (lines, ["t", " "])})  # type: ignore[arg-type, dict-item]
    data = Hub(str(root), text="x", group="user", length=12)
    assert data.classes == (" ", "?", "t")
    assert data.load("test").y.tolist() == [2, 0]
    assert data.load("train").groups.tolist() == [1, 1, 0]  # type: ignore[union-attr]
    clients = prepared(data, Natural())
    assert [clients.num_samples(client) for client in range(2)] == [1, 2]


def refused(key: str, path: object, **given: Any) -> str:
    return kit.refused(key, lambda: Hub(str(path), **given).fetch())


def test_columns_and_splits_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = tables.points(tmp_path / "points.csv")
    both = {"label": "kind", "test": 0.2}
    assert "a, b, kind, who" in refused("label", path, test=0.2)
    # The writer may be a text to read.
    assert "a (features), b (features), who (text)" in refused("features", path, **both)
    assert "kin" in refused("label", path, label="kin", test=0.2)
    assert "who" in refused("text", path, label="kind", test=0.2, text="says")
    assert "whose" in refused("group", path, **both, group="whose")
    assert "train" in refused("test", path, label="kind")
    refused("train", path, **both, train="train[:")
    refused("test", path, label="kind", test=1.5)
    refused("features", path, **both, text="who", features="a")
    refused("length", path, **both, length=0)


def test_sources_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach\nthe Hub")

    (tmp_path / "bad.csv").write_text("a,b\n1,2\n3,4,5\n")
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    assert "does not exist" in refused("path", tmp_path / "none.csv")
    assert "line 3" in refused("path", tmp_path / "bad.csv")
    for name in ("bad.parquet", "empty"):
        assert name in refused("path", tmp_path / name)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert "in the cache" in refused("path", "some/one")


@pytest.mark.parametrize("local", [False, True])
def test_the_name_of_a_configuration_is_passed_on(
    local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(*given: Any, split: str) -> Any:
        asked.append((*given, split))
        return datasets.Dataset.from_dict({"x": [1.0, 2.0], "label": [0, 1]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    path = str(tables.shades(tmp_path / "shades", each=1)) if local else "some/one"
    assert Hub(path, name="big", train="train[:1%]").load("train").x.tolist() == [[1.0], [2.0]]
    assert asked == [(path, "big", "train[:1%]"), (path, "big", "test")]


def test_the_first_bad_sample_is_named(tmp_path: Path) -> None:
    root = tables.shades(tmp_path / "shades")
    bad = root / "test" / "cat" / "2.png"
    whole = bad.read_bytes()
    for damaged in (whole[:45], b"", b"no image"):
        bad.write_bytes(damaged)
        line = refused("image", root)
        assert "test: sample 2" in line
        assert f"{bad} cannot be used" in line
    Image.new("RGB", (7, 8)).save(bad)
    assert "its shape is (3, 8, 7)" in refused("image", root)
    path = tmp_path / "points.csv"
    path.write_text("a,label,half\n1,x,0.5\n2,,1.0\n3,x,1.0\n4,x,1.0\n")
    assert "train: sample 1 has None" in refused("label", path, test=0.25, features="a")
    assert "sample 0 has 0.5" in refused("label", path, label="half", features="a", test=0.25)
    path.write_text("a,label\n1,x\n2,x\n3,y\n4,x\n")
    both = {"features": "a", "train": "train[:2]", "test": "train[2:]"}
    assert "test: sample 0 has 'y'" in refused("label", path, **both)
    bad.unlink()
    for grey in (root / "train").rglob("*.png"):
        Image.new("L", (8, 8)).save(grey)
    with pytest.raises(UserError, match=r"test: sample 0 .* cannot be used: it has colors"):
        Hub(str(root)).load("test")
    Image.fromarray(np.full((8, 8), 1000, np.uint16)).save(root / "train" / "cat" / "0.png")
    assert "more than 8 bits" in refused("image", root)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train", "train"),
        ("train", "train[30:]"),
        ("train[:9]", "train[:9]"),
        ("train[:9]", "train"),
    ],
)
def test_a_test_split_has_no_training_samples(train: str, test: str, tmp_path: Path) -> None:
    path = tables.points(tmp_path / "points.csv")
    assert "samples of the training split" in refused("test", path, train=train, test=test)
    data = Hub(str(path), train="train[:75%]", test="train[30:]", label="kind", group="who")
    assert (len(data.load("train")), len(data.load("test"))) == (30, 10)


def test_a_class_of_one_sample_is_held_out_like_any_other(tmp_path: Path) -> None:
    rows = [f"{i},{'odd' if i == 7 else 'even'}\n" for i in range(20)]
    (tmp_path / "points.csv").write_text("a,label\n" + "".join(rows))
    data = Hub(str(tmp_path / "points.csv"), features="a", test=0.2)
    parts = [data.load(split).x.flatten().tolist() for split in ("train", "test")]
    assert [len(part) for part in parts] == [16, 4]
    assert sorted(parts[0] + parts[1]) == list(range(20))


def test_a_column_that_numbers_the_rows_is_no_sample(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    rows = "".join(f"{i},{0.1 * i},{i // 3}\n" for i in range(6))
    path.write_text(f",a,label\n{rows}")
    assert Hub(str(path), test=0.5).input_shape == (1,)


def test_arguments_of_images_are_for_images(tmp_path: Path) -> None:
    path, both = tables.points(tmp_path / "points.csv"), {"label": "kind", "test": 0.25}
    for key, value, samples in (
        ("flip", True, {"features": ["a", "b"]}),
        ("crop_padding", 2, {"text": "who"}),
    ):
        given = {key: value, **samples, **both}
        with pytest.raises(UserError, match="leave it out") as error:
            _ = Hub(str(path), **given).transform
        assert error.value.key == f"data.dataset.init_args.{key}"


def test_classes_have_their_names_in_both_splits(tmp_path: Path) -> None:
    both = {}
    for split, names in (("train", tables.KINDS), ("test", tables.KINDS[1:])):
        columns = {"a": [0.5, 1.5], "label": [0, len(names) - 1]}
        kinds = {"a": datasets.Value("float32"), "label": datasets.ClassLabel(names=list(names))}
        both[split] = datasets.Dataset.from_dict(columns, datasets.Features(kinds))
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "saved"))
    data = Hub(str(tmp_path / "saved"))
    assert data.classes == tables.KINDS
    assert data.load("train").y.tolist() == [0, 1]
    assert data.load("test").y.tolist() == [1, 1]
