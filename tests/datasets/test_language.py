from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightfed.data.partition.schemes import Dirichlet, Natural
from lightfed.datasets.language import Prose, Text, WikiText2
from lightfed.datasets.text import NextCharacter, OwnedText, encode
from tests.datasets import tiny
from tests.datasets.kit import prepared, refused


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    tiny.wikitext2(folder)
    return folder


def published(lines: dict[str, list[str]]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Vocabulary and token streams by the rule of HeteroFL's code, word by word."""
    words = {
        split: [word for line in content for word in [*line.split(), "<eos>"]]
        for split, content in lines.items()
    }
    number = {"<ukn>": 0, "<eos>": 1}
    for word in words["train"]:
        if word not in number:
            number[word] = len(number)
    return number, {split: [number.get(word, 0) for word in text] for split, text in words.items()}


@pytest.mark.parametrize("hub", [False, True])
def test_wikitext2_follows_the_published_protocol(hub: bool, tmp_path: Path) -> None:
    number, streams = published(tiny.wikitext2(tmp_path, hub=hub))
    dataset = WikiText2(str(tmp_path))
    assert dataset.task == "masked_lm"
    assert dataset.num_classes == len(number)
    assert dataset.vocabulary.words == tuple(number)
    assert dataset.vocabulary.words[:2] == ("<ukn>", "<eos>")
    train, test = dataset.load("train"), dataset.load("test")
    assert train.x.dtype == test.x.dtype == torch.int32
    assert train.x.is_contiguous()
    assert train.groups is not None
    assert test.groups is None
    length = len(streams["train"]) // 100
    for row in range(100):
        own = train.x[train.groups == row].flatten().tolist()
        assert own == streams["train"][row * length :][: length // 64 * 64]
    assert test.x.flatten().tolist() == streams["test"][: len(streams["test"]) // 64 * 64]


def test_a_word_only_in_the_test_text_is_unknown(root: Path) -> None:
    dataset = WikiText2(str(root), window=1)
    assert not (dataset.load("train").x == 0).any()
    assert (dataset.load("test").x == 0).sum() == 1
    assert "<unk>" in dataset.vocabulary.words  # a word of the published text like any other


@pytest.mark.parametrize("folder", ["wikitext-2-v1", "wikitext/wikitext-2-v1"])
def test_the_hubs_folders_are_found(folder: str, tmp_path: Path) -> None:
    tiny.wikitext2(tmp_path / "a", hub=True)
    tiny.wikitext2(tmp_path / "b")
    (tmp_path / "c" / folder).parent.mkdir(parents=True)
    (tmp_path / "a" / "wikitext-2").rename(tmp_path / "c" / folder)
    ours, theirs = (WikiText2(str(tmp_path / name)).load("train") for name in "cb")
    assert torch.equal(ours.x, theirs.x)


def test_only_line_breaks_end_a_line(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2").mkdir()
    text = "a\u2028b c\x85d\ne\n"
    (tmp_path / "wikitext-2" / "wiki.train.tokens").write_text(text, "utf-8")
    stream = WikiText2(str(tmp_path), rows=1, window=7).load("train").x
    assert stream.tolist() == [[2, 3, 4, 5, 1, 6, 1]]


def test_prose_is_real_text_with_unknown_words() -> None:
    dataset = Prose()
    train, test = dataset.load("train"), dataset.load("test")
    words = dataset.vocabulary.words
    assert not dataset.synthetic
    assert 1000 < dataset.num_classes == len(set(words)) < 10_000
    assert {"the", ".", "(", "python"} <= set(words)
    assert len(train) >= 1000
    assert len(test) >= 50
    for split in (train, test):
        unknown = (split.x == 0).float().mean()
        assert 0.001 < unknown < 0.1
        assert int(split.x.max()) < dataset.num_classes


def test_the_topics_of_the_prose_are_trained_on_or_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {f"t{i:02}": f"Word{i} word{i}.\n\nSame, **same**..." for i in range(30)}
    monkeypatch.setattr("pydoc_data.topics.topics", made)
    dataset = Prose(rows=1, window=1)
    words = dataset.vocabulary.words
    assert words[2:] == ("word1", ".", "same", ",", "**", "...", *(
        f"word{i}" for i in range(2, 30) if i % 10
    ))  # fmt: skip
    assert len(dataset.load("train")) == 27 * 11
    tested = [words[i] for i in dataset.load("test").x.flatten().tolist()]
    assert tested == [
        "<ukn>", "<ukn>", ".", "<eos>", "same", ",", "**", "same", "**", "...", "<eos>",
    ] * 3  # fmt: skip


def test_windows_of_characters_of_two_texts_have_one_alphabet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = tiny.documented(tmp_path / "sources")
    monkeypatch.setattr("lightfed.datasets.text.source_folders", lambda: sources)
    made = {f"t{i:02}": f"Topic {i:02} is\n\nlong." for i in range(30)}
    monkeypatch.setattr("pydoc_data.topics.topics", made)
    prose, docstrings = (NextCharacter(text, window=8) for text in ("prose", "docstrings"))
    test = prose.load("test").x
    written = "\n".join(f"topic {i} is\nlong." for i in ("00", "10", "20"))
    assert test.tolist() == encode([written], len(written) // 8 * 8).reshape(-1, 8).tolist()
    for dataset, classes in ((prose, ("prose",)), (docstrings, tuple(sources))):
        assert (dataset.task, dataset.classes, dataset.num_classes) == ("columns", classes, 0)
        train = dataset.load("train")
        assert train.columns is not None
        assert list(train.columns.tensors) == ["input_ids", "labels"]
        assert (train.x.dtype, train.x.shape[1:]) == (torch.int64, (8,))
        assert all(torch.equal(column, train.x) for column in train.columns.tensors.values())
        assert len(train.y.bincount()) == len(classes)
    first = train.x[train.y == 2].flatten()
    name = encode(["function of numpy"], 17)[0]
    assert any(first[i : i + 17].tolist() == name.tolist() for i in range(len(first)))
    refused("window", NextCharacter, "prose", window=1)


def test_text_of_owners_is_dealt_to_its_owner_in_both_splits(tmp_path: Path) -> None:
    """Five windows of four letters of "b" and three of "a", of which the last ones are tests."""
    table = tmp_path / "speeches.csv"
    rows = ["role,speech", "b,abcdefgh", "a,mnopqrst", "c,xy", "b,ijklmnopqrs", "a,uvw"]
    table.write_text("\n".join(rows) + "\n")
    dataset = OwnedText(str(table), text="speech", owner="role", window=4, test=0.3)
    b = "abcdefgh\nijklmnopqrs"
    a = "mnopqrst\nuvw"
    windows = {
        "train": [a[:4], a[4:8], b[:4], b[4:8], b[8:12]],
        "test": [a[8:12], b[12:16], b[16:20]],
    }
    for split, owners in (("train", [0, 0, 1, 1, 1]), ("test", [0, 1, 1])):
        samples = dataset.load(split)
        assert samples.x.tolist() == encode(windows[split], 4).tolist()
        assert samples.groups is not None
        assert samples.groups.tolist() == owners
        assert samples.columns is not None
        assert torch.equal(samples.columns.tensors["labels"], samples.x)

    longest = OwnedText(str(table), text="speech", owner="role", owners=1, window=4)
    assert (
        longest.load("train").x.tolist() == encode([b[:4], b[4:8], b[8:12], b[12:16]], 4).tolist()
    )

    names = {"text": "speech", "owner": "role"}
    refused("owners", OwnedText(str(table), **names, window=4, owners=3).load, "train")
    refused("owner", OwnedText(str(table), text="speech", owner="who").load, "train")
    refused("text", OwnedText(str(table), text="words", owner="role").load, "train")
    refused("window", OwnedText, str(table), window=1)
    refused("test", OwnedText, str(table), test=1.0)


def test_natural_gives_each_client_its_row(root: Path) -> None:
    dataset = WikiText2(str(root))
    samples = dataset.load("train")
    data = prepared(dataset, Natural(), clients=100)
    for client in range(100):
        own = samples.x[samples.groups == client]
        assert torch.equal(samples.x[torch.from_numpy(data.partition_.train(client)).long()], own)
        assert data.num_samples(client) == len(own)
        assert data.labels(client).dtype == torch.int64
        assert torch.equal(data.labels(client), own.unique().long())


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_target_of_a_window_is_the_window(root: Path, channels_last: bool) -> None:
    dataset = WikiText2(str(root))
    data = prepared(dataset, Natural(), clients=10, batch_size=6, channels_last=channels_last)
    assert (data.task, data.input_shape) == ("masked_lm", (64,))
    assert data.num_classes == dataset.num_classes
    assert not data.augments
    samples = dataset.load("train").x.long()
    own = torch.from_numpy(data.partition_.train(3)).long()
    order = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(1))]
    batches = list(
        data.batches(data.train_plan(3, order=torch.Generator().manual_seed(1), augment=None))
    )
    assert len(batches) == data.num_batches(3)
    assert torch.equal(torch.cat([x for x, _ in batches]), samples[order])
    test = dataset.load("test").x.long()
    ends = [data.global_test_batch(i) for i in range(data.global_test_batches())]
    assert torch.equal(torch.cat([x for x, _ in ends]), test)
    union = [data.train_batch(i, 7) for i in range(data.train_batches(7))]
    assert torch.equal(torch.cat([x for x, _ in union]), samples)
    for x, target in [*batches, *ends, *union, *data.test_batches(3)]:
        assert x.dtype == target.dtype == torch.int64
        assert torch.equal(x, target)
        x.fill_(-1)  # as a model that masks its input in place
        assert target.min() >= 0
    assert torch.equal(data.global_test_batch(0)[0], test[: data.eval_batch_size])


@pytest.mark.parametrize("personal", ["match", "random", "split", "labels"])
def test_every_personal_test_works_on_windows(personal: Any, root: Path) -> None:
    dataset = WikiText2(str(root))
    data = prepared(dataset, Dirichlet(0.5), clients=5, personal_test=personal)
    every = len(data.train) if personal == "split" else len(data.test)
    for client in range(5):
        tested = data.partition_.test(client).tolist()
        assert 0 < len(tested) == len(set(tested))
        assert max(tested) < every


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    for name, file in (("tokens", "wiki.train.tokens"), ("hub", "train-00000-of-00001.parquet")):
        tiny.wikitext2(tmp_path / name, hub=name == "hub")
        path = tmp_path / name / "wikitext-2" / file
        path.write_bytes(b"\xff" + path.read_bytes()[:1000])
        dataset = WikiText2(str(tmp_path / name))
        assert str(path.parent) in refused("root", dataset.load, "train")
        path.unlink()
        line = refused("root", dataset.load, "train")
        assert f"expected {path.parent / 'wiki.train.tokens'}, which is not there" in line
        assert "train-*.parquet" in line


@pytest.mark.parametrize("kind", [Prose, partial(WikiText2, "x")])
@pytest.mark.parametrize("key", ["rows", "window"])
def test_a_bad_argument_is_named(kind: Any, key: str) -> None:
    assert "0; give at least 1" in refused(key, kind, **{key: 0})


def test_a_new_text_only_defines_its_lines() -> None:
    class Twelve(Text):
        def lines(self, split: str) -> list[str]:
            return ["one two three", "two three four"] if split == "train" else ["four five"]

    data = prepared(Twelve(rows=2, window=3), Natural())
    assert data.num_classes == 6
    assert [data.labels(client).tolist() for client in range(2)] == [[2, 3, 4], [3, 4, 5]]
    assert data.global_test_batch(0)[0].tolist() == [[5, 0, 1]]
