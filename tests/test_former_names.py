"""What users wrote for version 0.1 goes on working: `cohorts` for `clients`, and its class."""

from functools import partial
from pathlib import Path

import pytest
import yaml
from torch.optim import SGD

from lightfed import FedAvg, Federation
from lightfed.cli.command_line import main
from lightfed.local import client_group
from lightfed.models import MLP
from lightfed.utils.errors import UserError

CONFIG = Path("configs/quickstart.yaml")
GROUP = client_group.ClientGroup(2, partial(MLP, hidden=(3,)))


def test_the_former_argument_of_a_federation() -> None:
    with pytest.warns(DeprecationWarning, match="clients"):
        federation = Federation(FedAvg(), cohorts=[GROUP], optimizer=partial(SGD, lr=0.1))
    assert federation.num_clients == 2


def test_both_names_at_once() -> None:
    with pytest.raises(UserError) as refused:
        Federation(FedAvg(), [GROUP], cohorts=[GROUP])
    assert refused.value.key == "model.cohorts"


def test_the_former_class() -> None:
    with pytest.warns(DeprecationWarning, match="ClientGroup"):
        former = client_group.Cohort
    assert former is client_group.ClientGroup


def test_a_configuration_with_the_former_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = yaml.safe_load(CONFIG.read_text())
    config["model"]["cohorts"] = config["model"].pop("clients")
    file = tmp_path / "former.yaml"
    file.write_text(yaml.safe_dump(config))
    main(["partition", "--config", str(file)])
    assert "model.cohorts is now called model.clients" in caplog.text
