"""`lightfed export`: a folder with a model and its card, as the hub of Hugging Face reads it."""

import csv
import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lightfed as lf
from lightfed.cli import command_line
from lightfed.networks.cnn import Conv
from lightfed.utils.errors import UserError
from tests.small import quiet

hub = pytest.importorskip("huggingface_hub", reason="needs the extra hf")

CONFIGURATION = """
trainer: {max_epochs: 2, accelerator: cpu, enable_page: false, enable_progress_bar: false}
model:
  algorithm: HeteroFL
  export: [server, groups, clients]
  clients:
    - {count: 2, level: a, model: {class_path: Conv, init_args: {hidden: [4, 8, 8, 8]}}}
    - {count: 2, level: b, model: {class_path: Conv, init_args: {hidden: [4, 8, 8, 8]}}}
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
data: {dataset: Digits, partition: {class_path: Dirichlet, init_args: {alpha: 5}}, batch_size: 32}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of HeteroFL of two seeds, and of clients that train alone."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("export")
        patch.chdir(folder)
        quiet()
        Path("mine.yaml").write_text(CONFIGURATION)
        fit = ["fit", "--config=mine.yaml"]
        for seed in (0, 1):
            command_line.main([*fit, f"--trainer.name=s{seed}", f"--model.seed={seed}"])
        alone = ["--model.algorithm=Standalone", "--model.export=[clients]"]
        command_line.main([*fit, "--trainer.name=alone", *alone])
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def export(*words: str) -> None:
    """Run the command; an error that a user can cause is raised."""
    from lightfed.lab.sharing.command import main

    assert main(list(words)) == 0


def read_card(folder: Path) -> Any:
    """A card as the hub's own reader understands it."""
    return hub.ModelCard.load(folder / "README.md")


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The variables after the code of a card has run in its folder."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    variables: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        exec(code, variables)
    return variables


def standardized(variables: dict[str, Any], x: Tensor) -> Tensor:
    """Stored samples as the card's code says."""
    pixels = x / 255 if x.dtype == torch.uint8 else x
    result: Tensor = (pixels - variables["mean"]) / variables["std"]
    return result


def last_row(path: Path, **where: str) -> dict[str, str]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if where.items() <= row.items()][-1]


def test_the_servers_model_has_the_accuracy_of_its_card(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export("runs/s0", "--output=shared", "--license=apache-2.0")
    shared = here / "shared"
    names = sorted(path.name for path in shared.iterdir())
    assert names == ["README.md", "config.json", "model.safetensors"]

    card = read_card(shared)
    data = card.data
    assert (data.license, data.library_name) == ("apache-2.0", "lightfed")
    assert {"federated-learning", "heterofl"} <= set(data.tags)
    of_type = {result.metric_type: result for result in data.eval_results}
    assert of_type["accuracy"].dataset_name == "Digits: the global test set"
    assert of_type["accuracy"].task_type == "image-classification"
    assert data.metrics == list(of_type)

    variables = loaded(shared, monkeypatch)
    test = lf.Digits().load("test")
    with torch.no_grad():
        outputs = variables["network"](standardized(variables, test.x))
    accuracy = float((outputs.argmax(1) == test.y).float().mean())
    assert accuracy == pytest.approx(of_type["accuracy"].metric_value, abs=1e-6)
    reported = last_row(here / "runs/s0/metrics.csv")["global/accuracy"]
    assert of_type["accuracy"].metric_value == float(reported)


def test_a_card_says_what_was_done(here: Path) -> None:
    export("runs/s0", "--output=said")
    text = (here / "said" / "README.md").read_text()
    assert read_card(here / "said").data.license is None
    environment = json.loads(Path("runs/s0/environment.json").read_text())
    with Path("runs/s0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    up = sum(float(row["bytes_up"]) for row in rows)
    for expected in (
        "https://arxiv.org/abs/2010.01264",
        "Dirichlet (alpha 5",
        "seed 0",
        "4, by group: a: 2 clients",
        "| rounds | 2 |",
        f"| sent by clients | {up / 1000:.1f} kB |",
        "MFLOPs",
        f"commit {environment['commit']}",
        environment["lightfed"],
    ):
        assert expected in text
    assert str(here) not in text


def test_the_hubs_mixin_loads_the_folder(here: Path) -> None:
    class Shared(Conv, hub.PyTorchModelHubMixin):  # type: ignore[misc, name-defined]
        pass

    export("runs/s0", "--model=b", "--output=for-mixin")
    network = Shared.from_pretrained(str(here / "for-mixin"))
    tensors = load_file(here / "for-mixin" / "model.safetensors")
    assert len(tensors["blocks.0.weight"]) == 2  # half of the channels of group a
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, tensors[name])

    # What an upload sends is read without a network.
    for path in (here / "for-mixin").iterdir():
        hub.CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=path)


def test_a_groups_model_has_its_width(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export("runs/s0", "--model=b", "--output=b")
    network = loaded(here / "b", monkeypatch)["network"]
    first_client = load_file("runs/s0/models/client2.safetensors")
    assert network.state_dict().keys() == first_client.keys()
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, first_client[name])

    values = {result.metric_value for result in read_card(here / "b").data.eval_results}
    row = last_row(Path("runs/s0/metrics.csv"))
    assert values == {float(row["personal/accuracy/b"]), float(row["local/accuracy/b"])}
    assert "put layers of the type Scaler into training mode" in (here / "b/README.md").read_text()


def test_a_clients_own_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export("runs/alone", "--model=client3", "--output=own")
    network: nn.Module = loaded(here / "own", monkeypatch)["network"]
    assert torch.equal(
        network.state_dict()["blocks.0.weight"],
        load_file("runs/alone/models/client3.safetensors")["blocks.0.weight"],
    )
    results = {r.metric_type: r.metric_value for r in read_card(here / "own").data.eval_results}
    row = last_row(Path("runs/alone/clients.csv"), client="3")
    assert results == {"accuracy": float(row["accuracy"]), "loss": float(row["loss"])}


def test_several_seeds_give_an_interval(here: Path) -> None:
    export("runs/s0", "runs/s1", "--output=seeds")
    finals = [
        float(last_row(Path(f"runs/s{seed}/metrics.csv"))["global/accuracy"]) for seed in (0, 1)
    ]
    mean = sum(finals) / 2
    half = 12.706204736 * abs(finals[0] - finals[1]) / 2  # t of one degree of freedom
    expected = f"{100 * mean:.2f} +- {100 * half:.2f} %"
    card = read_card(here / "seeds")
    (accuracy,) = [r for r in card.data.eval_results if r.metric_type == "accuracy"]
    assert accuracy.metric_value == finals[0]
    assert f"mean of seeds 0-1: {expected}" in accuracy.metric_name
    assert f"| {expected} |" in card.text


def test_runs_that_are_no_seeds_of_each_other_are_refused(here: Path) -> None:
    with pytest.raises(UserError, match="another experiment"):
        export("runs/s0", "runs/alone")
    with pytest.raises(UserError, match="seed 0, as another run has"):
        export("runs/s0", "runs/s0")


@pytest.mark.parametrize("model", ["nobody", "client9"])
def test_a_model_that_was_not_exported_is_refused(model: str, here: Path) -> None:
    with pytest.raises(UserError, match=r"--model.*client0, .*server.*--ckpt_path last"):
        export("runs/s0", f"--model={model}")


def test_what_a_user_has_written_is_not_replaced(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = here / "kept"
    export("runs/s0", "--output=kept")
    first = (shared / "README.md").read_text()
    export("runs/s0", "--output=kept", "--license=mit")
    second = (shared / "README.md").read_text()
    assert first != second  # an unchanged card of lightfed's is

    own = second.replace("## Evaluation", "## Limits\n\nDigits only.\n\n## Evaluation")
    (shared / "README.md").write_text(own)
    weights = (shared / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(UserError, match=r"not as lightfed has written it.*--keep-card"):
        export("runs/s1", "--output=kept")
    assert (shared / "README.md").read_text() == own
    assert (shared / "model.safetensors").stat().st_mtime_ns == weights

    export("runs/s1", "--output=kept", "--keep-card")
    assert (shared / "README.md").read_text() == own
    tensors = load_file(shared / "model.safetensors")
    expected = load_file("runs/s1/models/server.safetensors")
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)

    other = here / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json is there already"):
        export("runs/s0", "--output=other")
    assert [path.name for path in other.iterdir()] == ["config.json"]


def test_values_that_are_not_finite_are_no_results(here: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    copytree("runs/s0", run)
    lines = (run / "metrics.csv").read_text().splitlines()
    last = lines[-1].split(",")
    last[lines[0].split(",").index("global/loss")] = "nan"
    (run / "metrics.csv").write_text("\n".join([*lines[:-1], ",".join(last), ""]))
    export(str(run), f"--output={tmp_path / 'shared'}")
    results = read_card(tmp_path / "shared").data.eval_results
    assert [result.metric_type for result in results] == ["accuracy"]
    assert all(math.isfinite(result.metric_value) for result in results)


def test_the_commands_and_the_code_of_the_page_run(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate(("mine", "mine-2", "mine-3")):
        run = tmp_path / "runs" / name
        copytree("runs/s0", run)
        environment = json.loads((run / "environment.json").read_text())
        (run / "environment.json").write_text(json.dumps(environment | {"seed": seed}))
    monkeypatch.chdir(tmp_path)

    page = (Path(__file__).parents[3] / "docs/howto/share.md").read_text()
    commands, upload = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    for line in commands.splitlines():
        program, command, *words = shlex.split(line, comments=True)
        assert (program, command) == ("lightfed", "export")
        export(*words)
    assert (tmp_path / "shared" / "model.safetensors").is_file()
    folder = upload.split()[-1]
    assert (tmp_path / folder / "README.md").is_file()

    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    variables: dict[str, Any] = {}
    exec(code, variables)
    tensors = load_file(tmp_path / folder / "model.safetensors")
    assert torch.equal(
        variables["network"].state_dict()["blocks.0.weight"], tensors["blocks.0.weight"]
    )


class Unnamed(nn.Module):
    """A network that takes a function, which no file can hold."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(self.layer(x))
        return result


def test_a_network_whose_arguments_no_file_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from functools import partial

    from tests.small import SGD_HALF, fit, random_data

    groups = [lf.ClientGroup(2, partial(Unnamed, activation=torch.relu))]
    federation = lf.Federation(lf.FedAvg(), groups, optimizer=SGD_HALF)
    fit(federation, random_data([4, 4]), tmp_path)
    export(str(tmp_path / "run"), f"--output={tmp_path / 'shared'}")
    assert not (tmp_path / "shared" / "config.json").exists()
    tensors = loaded(tmp_path / "shared", monkeypatch)["tensors"]
    Unnamed(torch.relu).load_state_dict(tensors)
    assert "does not say how" in (tmp_path / "shared" / "README.md").read_text()
