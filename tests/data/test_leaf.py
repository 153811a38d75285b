"""Natural owners end to end: LEAF's writers, and next words of Stack Overflow's authors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml  # type: ignore[import-untyped]

from lightfed.cli import command_line
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.datasets.language import Sentences
from lightfed.data.partition.schemes import Natural
from lightfed.models.networks.transformer import Transformer
from lightfed.results.run import Run, read
from lightfed.utils.errors import UserError
from tests.data import tables
from tests.small import quiet

SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.02}}
SMALL = {"embedding": 16, "heads": 2, "hidden": 32, "layers": 1, "dropout": 0.0, "causal": True}


def trained(
    dataset: dict[str, Any], model: dict[str, Any], optimizer: dict[str, Any], rounds: int = 1
) -> Run:
    """Three clients, one of each owner or two, trained by the command."""
    config = {
        "trainer": {"max_epochs": rounds, "accelerator": "cpu", "enable_progress_bar": False},
        "model": {
            "algorithm": "FedAvg",
            "clients": [{"count": 3, "model": model}],
            "optimizer": optimizer,
        },
        "data": {"dataset": dataset, "partition": "Natural", "batch_size": 8},
    }
    Path("natural.yaml").write_text(yaml.safe_dump(config))
    quiet()
    command_line.main(["fit", "--config", "natural.yaml"])
    return read(Path("runs/natural"))


@pytest.mark.parametrize("form", ["leaf", "parquet"])
def test_a_client_per_writer(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    users: dict[str, Any] = {
        f"f{k:04}_{k:02}": (
            rng.random((6 + k, 784)).round(2).tolist(),
            [i % 3 for i in range(6 + k)],
        )
        for k in range(3)
    }
    dataset: dict[str, Any] = {"path": "femnist", "features": "x", "shape": [1, 28, 28]}
    tables.leaf(tmp_path / "femnist", train=users, test=users)
    if form == "parquet":
        rows = [
            {"x": x, "y": y, "user": user}
            for user, (xs, ys) in users.items()
            for x, y in zip(xs, ys, strict=True)
        ]
        datasets.Dataset.from_list(rows).to_parquet("femnist.parquet")
        dataset |= {"path": "femnist.parquet", "test": 0.25}
    hub = {"class_path": "Hub", "init_args": dataset | {"group": "user"}}
    conv = {"class_path": "Conv", "init_args": {"hidden": [4]}}
    run = trained(hub, conv, SGD)
    with np.load(run.folder / "partition.npz") as split:
        sizes = np.diff(split["train_offsets"]).tolist()
        classes = split["train_counts"].sum(1).tolist()
    given = [len(y) for _, y in users.values()]
    assert sizes == (given if form == "leaf" else [5, 5, 5])  # of 21, or 15 that are not held out
    assert classes == sizes
    assert len(run.clients.query("round == 1")) == 3


def test_next_words_of_authors_are_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables.sentences(tmp_path / "so", authors=3, each=12)
    init = {"path": "so", "text": "tokens", "group": "client_id", "window": 10}
    model = {"class_path": "lightfed.Transformer", "init_args": SMALL}
    run = trained({"class_path": "Sentences", "init_args": init}, model, ADAM, rounds=25)
    perplexity = run.rounds["global/perplexity"].tolist()
    assert perplexity[0] > 5  # of 17 words
    assert perplexity[-1] < 2  # the first word of a window is not known
    assert "global/perplexity_masked" not in run.rounds


def test_windows_are_of_one_author_in_the_order_of_the_table(tmp_path: Path) -> None:
    path = tables.sentences(tmp_path / "so", authors=2, each=3)
    data = Sentences(str(path), text="tokens", group="client_id", words=4, window=8)
    samples = data.load("train")
    assert data.num_classes == 6  # with <ukn> and <eos>
    assert data.vocabulary.words[2:] == ("w0.0", "w0.1", "w0.2", "w0.3")
    assert samples.groups is not None
    assert samples.groups.tolist() == [0] * 4 + [1] * 4  # of 33 words each
    sentence = [2, 3, 4, 5, 0] * 2 + [1]
    assert samples.x[:4].flatten().tolist() == (sentence * 3)[:32]
    assert set(samples.x[4:].flatten().tolist()) == {0, 1}
    module = FederatedDataModule(data, Natural())
    module.prepare(clients=2, seed=0, device=torch.device("cpu"), folder=None)
    assert module.partition_.train(0).tolist() != module.partition_.train(1).tolist()


@pytest.mark.parametrize(
    ("key", "given"),
    [("text", {"text": "words"}), ("group", {"group": "who"}), ("window", {"window": 999}),
     ("test", {"test": 1.5}), ("words", {"words": 0}), ("test", {"test": "dev"})],
)  # fmt: skip
def test_mistakes_name_their_key(key: str, given: dict[str, Any], tmp_path: Path) -> None:
    path = tables.sentences(tmp_path / "so")
    with pytest.raises(UserError) as error:
        Sentences(str(path), **{"text": "tokens", "group": "client_id"} | given).load("train")
    assert error.value.key == f"data.dataset.init_args.{key}"


def test_a_causal_network_sees_only_what_is_before() -> None:
    torch.manual_seed(0)
    net = Transformer(11, (6,), **SMALL).eval()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    other = torch.tensor([[1, 2, 3, 9, 9, 9]])
    one, two = net(tokens), net(other)
    assert torch.equal(one[:, :4], two[:, :4])
    assert not torch.equal(one[:, 4], two[:, 4])
    assert not net.masked.any()
