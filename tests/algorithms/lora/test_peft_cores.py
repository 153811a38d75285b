"""Rules with cores, and with a second adapter, on models of peft, and loaded by plain peft."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lightfed as lf
from tests.algorithms.lora.test_peft_client import LORA, bases, loaded, logits, trained

__all__ = ["bases"]  # a fixture
peft = pytest.importorskip("peft", reason="needs the extra hf")


@pytest.mark.parametrize(
    ("rule", "kind", "more"),
    [
        (lf.FedSB, "gpt2", {}),
        (partial(lf.RAVAN, 2), "bert", {}),
        (partial(lf.FedDPA, 0.3), "bert", {}),
        (partial(lf.FedDPA, 0.3), "gpt2", {"use_rslora": True}),
    ],
)
def test_plain_peft_gives_the_logits_of_the_run(
    rule: Any, kind: str, more: dict[str, Any], bases: dict[str, str], tmp_path: Path
) -> None:
    lora = {"base": bases[kind], "lora": LORA[kind] | more}
    root = trained(rule(), tmp_path, kind, 2, 4, **lora)
    models = tmp_path / "run" / "models"
    start = logits(loaded(kind, bases[kind]), kind)
    for number, rank in ((0, 2), (3, 4)):
        with torch.no_grad(), root.fleet.deployed(number).bound(number) as module:
            expected = logits(module.net, kind)
            assert module.net.peft_config["default"].r == rank  # the export has not changed it

        net = peft.PeftModel.from_pretrained(loaded(kind, bases[kind]), models / f"client{number}")
        both = isinstance(root.algorithm, lf.FedDPA)
        assert net.peft_config["default"].r == (2 * rank if both else rank)
        found = logits(net, kind)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert (found - start).abs().max() > 1e-3
        merged = logits(net.merge_and_unload(), kind)
        torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)
