"""lightfed from Python: the documented example, its files, and its trainer afterwards."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from inspect import isabstract
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import lightfed as lf
from lightfed.cli.errors import accepted
from lightfed.utils.errors import UserError
from lightfed.utils.recorded import Recorded, arguments
from tests import forked
from tests.small import quiet

ROOT = Path(__file__).parents[3]


def example() -> str:
    """The script in the documentation."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    return blocks[0].replace("max_epochs=20", "max_epochs=2, accelerator='cpu', devices=RANKS")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The names of the example after it has run, in a folder of its own."""
    quiet()
    names = {"__name__": "example", "RANKS": 1}
    with chdir(tmp_path_factory.mktemp("python")):
        exec(compile(example(), "example.py", "exec"), names)
        yield names


def test_the_example_is_short_and_leaves_what_the_command_does(fitted: dict[str, Any]) -> None:
    assert sum(bool(line.strip()) for line in example().splitlines()) <= 25
    (folder,) = Path("runs").glob("*/")
    expected = {"config.yaml", "environment.json", "index.html", "metrics.csv", "clients.csv"}
    assert expected <= {path.name for path in folder.iterdir()}
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["clients"][1]["model"] == {"class_path": "example.Net"}
    assert config["model"]["optimizer"]["init_args"] == {"lr": 0.1}
    assert config["data"]["partition"]["init_args"]["alpha"] == 0.5
    assert config["trainer"]["max_epochs"] == 2


def run_script(folder: Path) -> "subprocess.CompletedProcess[str]":
    run = [sys.executable, "script.py"]
    env = {k: v for k, v in os.environ.items() if k not in ("MASTER_PORT", "LOCAL_RANK")}
    return subprocess.run(run, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.matrix  # two processes import torch
def test_two_ranks_from_the_same_script(tmp_path: Path, fitted: dict[str, Any]) -> None:
    (tmp_path / "script.py").write_text(example().replace("RANKS", "2"))
    done = run_script(tmp_path)
    assert done.returncode == 0, done.stderr
    (one,), (two,) = (list(path.glob("runs/*/clients.csv")) for path in (Path(), tmp_path))
    assert one.read_text() == two.read_text()


def test_a_script_ends_in_a_user_s_error_and_says_nothing_of_other_runs(tmp_path: Path) -> None:
    text = example().replace("max_epochs=2", "max_epochs=1")
    text = text.replace("RANKS", "1, enable_progress_bar=False")
    (tmp_path / "script.py").write_text(f"{text}\ntrainer.predict(federation, data, client=99)\n")
    done = forked.run_script(tmp_path / "script.py", tmp_path)
    assert done.returncode == 1
    before, _, trace = done.stderr.partition("Traceback ")
    assert before == ""
    assert trace.splitlines()[-1].startswith("lightfed.utils.errors.UserError: predict: client 99 ")
    assert done.stdout.startswith("HeteroFL-Digits-s0: ")


def test_a_second_fit_starts_from_nothing_or_not_at_all(fitted: dict[str, Any]) -> None:
    trainer, federation, data = (fitted[name] for name in ("trainer", "federation", "data"))
    other = lf.FederatedTrainer(max_epochs=1, accelerator="cpu", logger=False)
    with pytest.raises(UserError, match=r"^model: a Federation that has run"):
        other.fit(federation, data)
    groups = [lf.ClientGroup(2, fitted["Net"])]
    with pytest.raises(UserError, match=r"^model: .*a second one"):
        trainer.fit(lf.Federation(lf.FedAvg(), groups, optimizer=fitted["sgd"]), data)


AGAIN = """
sgd, data = partial(torch.optim.SGD, lr=0.1), lf.FederatedDataModule(lf.Digits(), lf.Iid())
failed = []  # trainers that keep what they have taken
for path in ("nothing.ckpt", None):
    federation = lf.Federation(lf.FedAvg(), [lf.ClientGroup(4, Net)], optimizer=sgd)
    trainer = lf.FederatedTrainer(max_epochs=1, devices=2, accelerator="cpu", enable_page=False)
    try:
        trainer.fit(federation, data, ckpt_path=path)
    except ValueError as error:
        failed.append(trainer)
print("ranks", trainer.strategy.world_size)
"""


@pytest.mark.matrix  # two processes import torch
def test_ranks_meet_after_a_fit_that_has_failed_before(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(example().partition("groups = ")[0] + AGAIN)
    done = run_script(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks 2") == 2


def test_predictions_are_those_of_the_metrics(fitted: dict[str, Any]) -> None:
    trainer, federation, data = (fitted[name] for name in ("trainer", "federation", "data"))
    (tested,) = trainer.test(federation, data)
    labels = torch.cat([data.global_test_batch(i)[1] for i in range(data.global_test_batches())])
    found = torch.cat(trainer.predict(federation, datamodule=data)).argmax(1) == labels
    assert found.float().mean() == pytest.approx(tested["global/accuracy"])
    batches = list(data.test_batches(5))
    outputs = trainer.predict(federation, datamodule=data, client=5)
    found = torch.cat(outputs).argmax(1) == torch.cat([y for _, y in batches])
    clients = trainer.results.clients.query("round == 2 and client == 5")
    assert found.float().mean() == pytest.approx(clients["accuracy"].item())
    assert trainer.results.rounds["global/accuracy"][2] == pytest.approx(tested["global/accuracy"])
    with pytest.raises(UserError, match="client 8 of 8"):
        trainer.predict(federation, datamodule=data, client=8)


def test_the_other_examples_run(fitted: dict[str, Any], tmp_path: Path) -> None:
    """What the page does with a finished run, and the readme's own script."""
    page, readme = ((ROOT / name).read_text() for name in ("docs/python.md", "README.md"))
    (after,) = re.findall(r"```python\n(trainer\.results.*?)```", page, re.DOTALL)
    (script,) = re.findall(r"```python\n(import lightfed as lf\n.*?)```", readme, re.DOTALL)
    batches = list(fitted["data"].test_batches(5))
    exec(after, fitted | {"loader": [x for x, _ in batches]})
    (plain,) = re.findall(r"```python\n(from safetensors.*?)```", page, re.DOTALL)
    exec(plain, exported := dict(fitted))
    final = fitted["trainer"].results.rounds["global/accuracy"].iloc[-1]
    assert exported["accuracy"] == pytest.approx(final)
    script = script.replace("max_epochs=20, devices=2", "max_epochs=1, accelerator='cpu'")
    names = dict(fitted)
    with chdir(tmp_path):
        exec(script, names)
        assert names["trainer"].results.clients["client"].nunique() == 8


def test_a_finished_run_says_how_to_go_on(
    fitted: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fitted["trainer"].fit(fitted["federation"], fitted["data"], ckpt_path="last")
    assert "has finished its 2 rounds; give a larger trainer.max_epochs" in capsys.readouterr().out


def test_several_ranks_in_a_notebook_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # of a run of another test
    assert lf.FederatedTrainer(accelerator="cpu", devices=1).strategy.launcher is None
    with pytest.raises(UserError, match="lightfed fit") as refused:
        lf.FederatedTrainer(accelerator="cpu", devices=2)
    assert refused.value.key == "trainer.devices"


RECORDED = [
    made
    for name in lf.__all__
    if isinstance(made := getattr(lf, name), type)
    and issubclass(made, Recorded)
    and not isabstract(made)
]


@pytest.mark.parametrize("cls", RECORDED, ids=lambda cls: cls.__name__)
def test_objects_know_the_arguments_that_a_configuration_may_have(cls: type) -> None:
    names = dict.fromkeys(accepted(cls), 1)
    made = Recorded.__new__(cls, **names)  # whatever their bounds are
    assert arguments(made) == names
