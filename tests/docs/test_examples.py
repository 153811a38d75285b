"""The examples run as they are, in an empty folder; the how-to of sweeps, too."""

import importlib
import json
import re
import runpy
import shlex
import sys
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import loggers
from torch import nn

import lightfed
from lightfed.algorithms.scaffold import SCAFFOLD
from lightfed.cli import command_line
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import RoundPlan
from tests.small import fleet_of, quiet, random_data, run_round

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    quiet()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    return tmp_path


def test_a_script_has_its_own_algorithm_data_and_loggers(folder: Path) -> None:
    names = runpy.run_path(str(EXAMPLES / "four_loggers.py"))
    assert names["trainer"].results.rounds["global/accuracy"][3] > 0.5
    (run,) = folder.glob("runs/*/index.html")
    assert "FedAvgM on flowers.csv" in run.read_text()
    assert list(folder.glob("logs/*/*/events.*"))
    (table,) = folder.glob("logs/*/*/metrics.csv")
    assert "global/accuracy" in table.read_text()
    for hyperparameters in folder.glob("logs/*/*/hparams.yaml"):
        assert "beta: 0.5" in hyperparameters.read_text()


def test_the_cells_of_the_notebook_run(folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads((EXAMPLES / "own_module.ipynb").read_text())["cells"]:
        assert not cell.get("outputs"), "clear the outputs"
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["trainer"].current_epoch == 3
    assert names["last"]["accuracy"].mean() > 0.3
    assert len(torch.cat(names["outputs"])) > 0


def test_steps_of_a_server_leave_statistics_alone(folder: Path) -> None:
    """With momentum a running variance would fall below 0."""
    own = importlib.import_module("own_algorithm")
    for algorithm in (own.FedAvgM(0.9), SCAFFOLD(server_lr=2.0)):
        net = ClientGroup(2, lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
        fed = fleet_of([net], algorithm, random_data([6, 6]))
        fed.plan = RoundPlan(lr=0.5)
        for t in range(3):
            run_round(fed, t)
        first = len(algorithm.model.parameters_row)
        mean = torch.stack([fed.row(k).floats[first:] for k in range(2)]).mean(0)
        torch.testing.assert_close(algorithm.model.floats[first:], mean)


def test_the_outer_step_of_diloco_is_nesterovs(folder: Path) -> None:
    """In the first round 0.7 (1 + 0.9) times the way to the mean of the islands."""
    diloco = importlib.import_module("diloco")
    nesterov = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    ends = []
    for outer in (None, nesterov):
        fleet = diloco.train(1, 2, outer).lightning_module.fleet
        start = fleet.groups[0].initial.floats
        ends.append(fleet.algorithm.model.floats - start)
    mean, outer = ends
    assert mean.abs().max() > 1e-3
    torch.testing.assert_close(outer, 1.33 * mean, rtol=1e-4, atol=1e-6)


def test_the_commands_of_the_how_tos_fit(folder: Path) -> None:
    """Their words are parsed; nothing is trained."""
    pages = [(page, page.read_text()) for page in sorted((ROOT / "docs/howto").glob("*.md"))]
    blocks = [block for _, text in pages for block in re.findall(r"```sh\n(.*?)```", text, re.S)]
    lines = [line for block in blocks for line in block.splitlines()]
    fits = [
        shlex.split(line, comments=True)[1:] for line in lines if line.startswith("lightfed fit")
    ]
    named = [
        found[1] for _, text in pages if (found := re.search(r"algorithm: (\{class_.*?\}\})", text))
    ]
    fits += [
        ["fit", "--config=lightfed:digits/fedavg", f"--model.algorithm={one}"] for one in named
    ]
    assert len(named) == 1
    assert len(fits) >= 5
    for words in fits:
        with pytest.raises(SystemExit, match="0"):
            command_line.main([*words, "--print_config"])


@pytest.mark.matrix  # six runs
@pytest.mark.parametrize("page", ["resume", "loggers"])
def test_the_commands_of_a_how_to_run(
    page: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, with one batch a client and as many rounds as the last resumes from."""
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / f"docs/howto/{page}.md").read_text(), re.S)
    for line in block.splitlines():
        words = shlex.split(line, comments=True)[1:]
        rounds = 3 if "30" in words else 2
        words = [word for word in words if word not in ("--trainer.max_epochs", "30")]
        limits = [f"--trainer.max_epochs={rounds}", "--trainer.limit_train_batches=1"]
        command_line.main([*words, *limits])
    rounds = [path.read_text().count("\n") - 1 for path in folder.glob("runs/*/metrics.csv")]
    assert rounds == ([3] if page == "resume" else [2])


# Who runs the sh and python blocks of a page. Those of the cluster need SLURM.
RUN_BY = {
    "README.md": "configs/test_configs.py",
    "docs/commands.md": "configs/test_configs.py",
    "docs/configuration.md": "configs/test_configs.py", "docs/combine.md": "docs/test_examples.py",
    "docs/index.md": "core/cli/test_installing.py", "docs/python.md": "core/engine/test_python.py",
    "docs/tutorial.md": "docs/test_tutorial.py", "docs/data.md": "docs/test_data.py",
    "docs/lora.md": "algorithms/lora/test_peft_client.py",
    "docs/studies.md": "configs/test_studies.py", "docs/scripts.md": "docs/test_json.py",
    "docs/howto/compare.md": "lab/test_comparisons.py",
    "docs/howto/judge.md": "lab/judge/test_judge.py",
    "docs/howto/cluster.md": "slurm/test_jobs.py", "docs/howto/loggers.md": "docs/test_examples.py",
    "docs/howto/resume.md": "docs/test_examples.py", "docs/howto/sweep.md": "docs/test_examples.py",
    "docs/howto/gpu.md": "docs/test_examples.py",
    "docs/howto/share.md": "lab/sharing/test_export_command.py",
    "docs/howto/real_data.md": "docs/test_real_data.py",
}  # fmt: skip


def test_every_page_with_commands_has_a_test() -> None:
    docs = ROOT / "docs"
    pages = [ROOT / "README.md", *docs.glob("*.md"), *docs.glob("howto/*.md")]
    found = {
        str(page.relative_to(ROOT))
        for page in pages
        if re.search(r"^```(sh|python)$", page.read_text(), re.MULTILINE)
    }
    # They need a card, an idle machine, other releases of torch, or a network (tests/wheel.sh).
    by_hand = {
        "docs/kernels.md", "docs/speed.md", "docs/side_by_side.md", "docs/versions.md",
        "docs/install.md",
    }  # fmt: skip
    assert found - set(RUN_BY) <= by_hand
    assert set(RUN_BY) <= found
    assert all((ROOT / "tests" / test).is_file() for test in RUN_BY.values())


def test_the_readme_shows_pictures_and_leads_to_the_page_of_data() -> None:
    readme = (ROOT / "README.md").read_text()
    pictures = [ROOT / name for name in re.findall(r"!\[[^]]+\]\((.+?)\)", readme)]
    assert [path.suffix for path in pictures] == [".svg", ".png", ".png"]
    assert all(path.read_bytes()[:4] in (b"<svg", b"\x89PNG") for path in pictures)
    assert all(path.stat().st_size < 60_000 for path in pictures)
    assert "(docs/data.md)" in readme
    assert "(data.md)" in (ROOT / "docs/tutorial.md").read_text()


def test_the_penalty_of_the_page_adds_its_gradient() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/combine.md").read_text(), re.S)
    names: dict[str, Any] = {"lightfed": lightfed, "Tensor": torch.Tensor}
    exec(block, names)
    gradient = torch.tensor([1.0, 1.0, 1.0])
    session = SimpleNamespace(parameters=torch.tensor([2.0, -3.0, 0.0]))
    names["TowardsZero"](mu=0.5).local_gradient(session, gradient)
    assert gradient.tolist() == [1.5, 0.5, 1.0]


def test_the_files_of_the_cluster_s_commands_exist() -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/howto/cluster.md").read_text(), re.S)
    named = re.findall(r"(?:slurm|configs)/[\w/-]+\.\w+", block)
    assert len(named) >= 3
    assert all((ROOT / name).is_file() for name in named)


def test_the_loggers_of_a_configuration_are_those_of_lightning() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/howto/loggers.md").read_text(), re.S)
    for logger in yaml.safe_load(block)["trainer"]["logger"]:
        made = getattr(loggers, logger["class_path"])
        assert set(logger["init_args"]) <= {*signature(made).parameters, "config", "mode"}


@pytest.mark.parametrize("page", sorted((ROOT / "docs/papers").glob("*.md")), ids=lambda p: p.stem)
def test_a_papers_page_names_files_that_exist(page: Path) -> None:
    text = page.read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| `[^`]+\.(yaml|sweep)`", line)]
    names = [name for row in rows for name in re.findall(r"`([^`]+\.(?:yaml|sweep))`", row)]
    assert len(names) >= 4
    folders = (ROOT / "configs" / page.stem, ROOT / "configs")
    assert [name for name in names if not any(list(at.glob(name)) for at in folders)] == []
