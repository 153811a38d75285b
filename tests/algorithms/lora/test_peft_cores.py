"""Rules with cores, and with a second adapter, on models of peft, and loaded by plain peft."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

import lightfed as lf
from lightfed.algorithms.lora.adapters import Adapter
from lightfed.local.client_group import ClientGroup
from lightfed.utils.errors import UserError
from tests.algorithms.lora.test_peft_client import LORA, bases, loaded, logits, trained
from tests.small import fleet_of, random_data, run_round

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


@pytest.mark.parametrize("rule", [lf.FedDPA, lf.FedSB, partial(lf.RAVAN, 2)])
def test_a_bias_in_groups_of_unlike_scales_is_refused(rule: Any, tmp_path: Path) -> None:
    lora = LORA["bert"] | {"lora_bias": True}
    with pytest.raises(UserError) as error:
        trained(rule(), tmp_path, "bert", 2, 4, lora=lora)
    assert error.value.key == "model.clients"
    assert "lora_bias" in error.value.fix


class Layers(nn.Module):
    """Layers that peft adapts in unlike forms: an embedding, a convolution, a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 6)
        self.image = nn.Conv2d(1, 4, 2)
        self.line = nn.Linear(4 * 2 * 5, 3)

    @override
    def forward(self, x: Tensor) -> Tensor:
        words = self.words((x > 0).long() + torch.arange(4) % 4 * 2)  # (B, 4) -> (B, 4, 6)
        image = self.image(words[:, None, :3])  # (B, 4, 2, 5)
        return self.line(torch.tanh(image).flatten(1))


def layers(rank: int) -> Any:
    torch.manual_seed(0)
    names = ["words", "image", "line"]
    config = peft.LoraConfig(r=rank, lora_alpha=4, target_modules=names)
    return peft.get_peft_model(Layers(), config)


@pytest.mark.parametrize(
    "rule", [partial(lf.FedDPA, 0.0), lf.FedSB, partial(lf.RAVAN, head_rank=1)]
)
def test_every_form_of_adapters_applies_what_the_server_holds(rule: Any) -> None:
    """Of FedDPA without a weight for the own adapters."""
    groups = [ClientGroup(1, partial(layers, rank), name=f"r{rank}") for rank in (1, 3)]
    fed = fleet_of(groups, rule(), random_data([9, 9]))
    for t in range(2):
        assert run_round(fed, t)["train_loss"] > 0

    factors = fed.algorithm.server_factors()
    with torch.no_grad(), fed.deployed(1).bound(1) as module:  # of the greatest rank
        for adapter, (A, D) in zip(fed.algorithm.adapters[0], factors, strict=True):
            layer = module.get_submodule(adapter.layer)
            update = layer.get_delta_weight("default").flatten(1)
            assert update.abs().max() > 1e-3

            if isinstance(fed.algorithm, lf.FedDPA):
                torch.testing.assert_close(update, D @ A)
                continue
            tensors = dict(module.named_parameters())
            _, B = Adapter.factors(adapter, tensors)
            K = D if isinstance(fed.algorithm, lf.FedSB) else torch.diag(D[0])
            torch.testing.assert_close(update, B @ K @ A, rtol=1e-4, atol=1e-6)
