"""What is read from config.yaml, and which settings make an experiment another one."""

import re
from pathlib import Path

import pytest

from lightfed.results.settings import options, read_settings
from lightfed.utils.errors import UserError


@pytest.mark.parametrize(
    "key",
    [
        *("trainer.devices", "trainer.name", "seed_everything"),
        *("model.seed", "model.store", "model.accumulate", "model.exchange_buffer"),
        *("model.export", "model.evaluate.0", "model.eval_clients"),
        *("data.dataset.init_args.root", "data.dataset.init_args.download"),
        *("data.eval_batch_size", "data.channels_last"),
    ],
)
def test_where_and_how_it_was_run_is_no_option(key: str) -> None:
    assert options({key: "1"}) == {}


@pytest.mark.parametrize(
    "key",
    [
        *("trainer.max_epochs", "trainer.precision", "trainer.gradient_clip_val"),
        "trainer.gradient_clip_algorithm",
        *("model.local_epochs", "model.algorithm.init_args.mu", "model.optimizer.class_path"),
        *("data.batch_size", "data.dataset.class_path", "data.partition.init_args.alpha"),
    ],
)
def test_what_was_set_is_an_option_unless_it_is_reported_elsewhere(key: str) -> None:
    assert list(options({key: "1"}).values()) == ["1"]
    assert options({key: "1"}, but=re.compile(re.escape(key))) == {}


def test_an_option_has_a_short_name_and_a_class_its_last_one() -> None:
    found = {"data.partition.class_path": "lightfed.data.Iid", "data.batch_size": "8"}
    assert options(found) == {"partition": "Iid", "batch_size": "8"}
    inner = {"model.clients.0.model.init_args.width": "4", "model.optimizer.init_args.lr": "1"}
    assert options(inner) == {"clients 0 model width": "4", "lr": "1"}
    unspoken = re.compile(r"^model\.clients\.0\.model\.")
    assert options(inner, unspoken=unspoken) == {"width": "4", "lr": "1"}


CONFIG = """\
# lightning
trainer: {max_epochs: 030}
model:
  clients:
  - level: 'a'
    rate: null
  - count: 1e-3
    on: yes
  evaluate: []
  none:
"""


def test_settings_are_the_texts_of_the_file() -> None:
    assert read_settings(CONFIG, Path("config.yaml")) == {
        "trainer.max_epochs": "030",
        "model.clients.0.level": "a",
        "model.clients.0.rate": "null",
        "model.clients.1.count": "1e-3",
        "model.clients.1.on": "yes",
        "model.evaluate": "[]",
    }
    assert read_settings("", Path("config.yaml")) == {}


def test_a_file_that_is_not_yaml_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^report: runs/a/config.yaml cannot be read: ") as caught:
        read_settings("model: {a: 1", Path("runs/a/config.yaml"))
    assert "\n" not in str(caught.value)
