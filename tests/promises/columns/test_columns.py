"""Federations of sequences in dicts and of regressions, from Python and from the command line."""

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as L
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

import lightfed as lf
from lightfed.cli.command_line import USAGE_ERROR, main
from lightfed.federation import Federation
from lightfed.utils.errors import UserError
from tests.promises.columns.cases import LONGEST, TAGS, Tagger, line, measured, points, tagged
from tests.small import fit, fleet_of

FAST = partial(SGD, lr=0.5, momentum=0.9)


def run(folder: Path, model: Any, data: Any, *, rounds: int = 1, **given: Any) -> Any:
    given = {"optimizer": FAST, "evaluate": ("global", "personal")} | given
    federation = Federation(lf.FedAvg(), [lf.ClientGroup(4, model)], **given)
    return fit(federation, data, folder, rounds=rounds)


def last(folder: Path, name: str = "metrics") -> dict[str, float]:
    (path,) = folder.rglob(f"{name}.csv")
    *_, row = csv.DictReader(path.open())
    return {key: float(value) for key, value in row.items() if value and key != "cohort"}


def test_sequences_in_dicts_are_learned(tmp_path: Path) -> None:
    trainer = run(
        tmp_path, Tagger, tagged(), rounds=4, local_epochs=4, optimizer=partial(SGD, lr=0.3)
    )
    found = last(tmp_path)
    assert found["global/f1"] > 0.6  # of chance 0.33
    assert found["flops"] > 0
    outputs = trainer.predict(trainer.federation, datamodule=trainer.datamodule)
    assert [tuple(o.shape) for o in outputs] == [(n, LONGEST, TAGS) for n in (10, 10, 10, 3)]
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert "named columns" in json.dumps(environment)


class Weighed(NamedTuple):
    x: Tensor
    y: Tensor
    weight: Tensor


class Frozen(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.hidden.requires_grad_(False)


def test_flops_are_those_of_a_step_on_two_samples() -> None:
    fleet = fleet_of(
        [lf.ClientGroup(2, Tagger), lf.ClientGroup(2, Frozen)], lf.Standalone(), tagged()
    )
    whole, frozen = fleet.groups
    # Sequences of 9 words: 10 places of a convolution of 2 words, and 9 of a linear layer.
    assert whole.flops == frozen.flops == 2 * (10 * 2 * 8 * 8 + 9 * 8 * TAGS)
    assert whole.passes == 3
    assert 2 < frozen.passes < 3


class Paced(Tagger):
    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / (1 + self.trainer.current_epoch)


def test_a_step_may_ask_the_trainer(tmp_path: Path) -> None:
    run(tmp_path, Paced, tagged())
    assert last(tmp_path)["flops"] > 0


class Weighted(L.LightningModule):
    """Takes the named tuples of its data set."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: Weighed, batch_idx: int) -> Tensor:
        assert type(batch) is Weighed
        return (batch.weight * (self.net(batch.x).squeeze(1) - batch.y).square()).mean()

    def validation_step(self, batch: Weighed, batch_idx: int) -> None:
        self.log("error", self.training_step(batch, batch_idx))


def test_a_step_takes_named_tuples(tmp_path: Path) -> None:
    rows = [Weighed(x, y, torch.tensor(i % 3 / 2)) for i, (x, y) in enumerate(points(40))]
    data = lf.FederatedDataModule(lf.FromTorch(rows[:30], rows[30:]), lf.Quantity(1.0))
    run(tmp_path, Weighted, data, rounds=10, optimizer=partial(SGD, lr=0.2))
    assert last(tmp_path)["global/error"] < 0.5  # of the targets' variance, about 5


@pytest.mark.parametrize("side_by_side", ["off", 2])
def test_a_regression_reports_its_whole_test_set(side_by_side: Any, tmp_path: Path) -> None:
    given = {"side_by_side": side_by_side, "optimizer": partial(SGD, lr=0.1)}
    trainer = run(tmp_path, line, measured(), rounds=8, **given)
    found = last(tmp_path)
    assert found["global/r2"] > 0.95
    y = points(40, seed=1).tensors[1]
    outputs = torch.cat(trainer.predict(trainer.federation, datamodule=trainer.datamodule))
    error = outputs.squeeze(1) - y
    assert found["global/loss"] == pytest.approx(float(error.square().mean()), rel=1e-5)
    assert found["global/mae"] == pytest.approx(float(error.abs().mean()), rel=1e-5)
    r2 = 1 - error.square().sum() / (y - y.mean()).square().sum()
    assert found["global/r2"] == pytest.approx(float(r2), rel=1e-5)
    assert found["flops"] > 0


def test_a_client_with_one_test_sample_has_no_r2(tmp_path: Path) -> None:
    data = lf.FederatedDataModule(lf.FromTorch(points(8), points(4, seed=1)), lf.Iid())
    run(tmp_path, line, data)
    found = last(tmp_path)
    assert "personal/mae" in found
    assert "personal/r2" not in found


@pytest.fixture
def regression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with run.yaml."""
    monkeypatch.chdir(tmp_path)
    here = "tests.promises.columns.cases.Points"
    dataset = {
        name: {"class_path": here, "init_args": {"seed": seed}}
        for seed, name in enumerate(("train", "test"))
    }
    model = {"class_path": "lightfed.MLP", "init_args": {"hidden": [16]}}
    given = {
        "trainer": {"max_epochs": 3, "accelerator": "cpu", "enable_progress_bar": False},
        "model": {
            "algorithm": "FedAvg",
            "clients": [{"count": 3, "model": model}],
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
            "local_epochs": 5,
        },
        "data": {
            "dataset": {"class_path": "FromTorch", "init_args": dataset}, "partition": "Iid",
        },
    }  # fmt: skip
    Path("run.yaml").write_text(yaml.safe_dump(given))


@pytest.mark.usefixtures("regression")
def test_a_regression_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["fit", "--config", "run.yaml"])
    assert last(tmp_path)["global/r2"] > 0.8
    main(["partition", "--config", "run.yaml"])
    out = capsys.readouterr().out
    assert "of FromTorch, seed 0: 60 training samples" in out
    assert "global mae" in out


def refused(folder: Path, key: str, model: Any, data: Any, **given: Any) -> str:
    with pytest.raises(UserError) as error:
        run(folder, model, data, **given)
    assert error.value.key == key
    return error.value.line


def test_models_that_do_not_fit_columns_are_refused(tmp_path: Path) -> None:
    key = "model.clients.0.model"
    assert "named columns" in refused(tmp_path, key, line, tagged())
    short = partial(Tagger, positions=LONGEST - 1)
    assert "max_length" in refused(tmp_path, key, short, tagged())
    wide = partial(nn.Linear, 3, 2)
    assert "(2, 1)" in refused(tmp_path, key, wide, measured())


@pytest.mark.parametrize("algorithm", [lf.HeteroFL, lf.MaxCommon, lf.FedProto])
def test_methods_that_need_networks_refuse_columns(algorithm: Any, tmp_path: Path) -> None:
    federation = Federation(algorithm(), [lf.ClientGroup(4, Tagger)], optimizer=FAST)
    with pytest.raises(UserError) as error:
        fit(federation, tagged(), tmp_path)
    assert error.value.key.startswith("model.")


def test_a_pack_of_columns_says_why_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, Tagger, tagged(), side_by_side=2)
    assert "its samples have named columns" in caplog.text


@pytest.mark.usefixtures("regression")
def test_a_partition_by_classes_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(
            [
                "fit",
                "--config",
                "run.yaml",
                "--data.partition=Dirichlet",
                "--data.partition.alpha=1",
            ]
        )
    assert left.value.code == USAGE_ERROR
    assert "error: data.partition:" in capsys.readouterr().err
