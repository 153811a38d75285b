"""Which settings make an experiment another one."""

import re

import pytest

from lightfed.results.settings import options

NONE = re.compile(r"(?!)")


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
    assert options({key: "1"}, but=NONE) == {}


@pytest.mark.parametrize(
    "key",
    [
        *("trainer.max_epochs", "trainer.precision", "trainer.gradient_clip_val"),
        "trainer.gradient_clip_algorithm",
        *("model.local_epochs", "model.algorithm.init_args.seed", "model.optimizer.class_path"),
        *("data.batch_size", "data.dataset.class_path", "data.partition.init_args.alpha"),
    ],
)
def test_what_was_set_is_an_option_unless_it_is_told_elsewhere(key: str) -> None:
    assert options({key: "1"}, but=NONE) == {key: "1"}
    assert options({key: "1"}, but=re.compile(re.escape(key))) == {}
