"""With one client that is always there and keeps nothing, the server holds what it has trained.

So the loss after training equals that of the server's model, for every method whose server takes
no step of its own, every network, and every layer.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

import lightfed as lf
from lightfed import networks
from lightfed.local.client_group import ClientGroup
from lightfed.state.frozen_base import digests
from lightfed.testing import conformance
from lightfed.utils.errors import UserError
from tests.promises.law.cases import METHODS, NETWORKS, OTHERS, Case, vectors
from tests.promises.law.layers import (
    Attention,
    Convolved,
    Embedded,
    Encoder,
    Padded,
    Product,
    Rare,
    Reads,
    Recurrent,
    Twice,
    adapted,
    normed_encoder,
    normed_recurrent,
    own_encoder,
)
from tests.small import fit, fleet_of, run_round

pytest.importorskip("peft", reason="needs the extra hf")

pytestmark = pytest.mark.filterwarnings("ignore")
ROUNDS = 2


def check(case: Case, folder: Path) -> None:
    """Both losses in every round; training has changed them."""
    trainer = fit(case.federation(), case.data(), folder, rounds=ROUNDS, enable_checkpointing=False)
    rounds = trainer.results.rounds
    trained = torch.tensor(rounds["trained/loss"].to_numpy())
    server = torch.tensor(rounds["global/loss"].to_numpy())
    assert len(trained) == ROUNDS
    torch.testing.assert_close(server, trained, rtol=2e-6, atol=0)
    assert abs(trained[1] / trained[0] - 1) > 1e-4, "nothing was learned, so nothing was shown"


@pytest.mark.parametrize("name", METHODS)
def test_the_server_of_every_method(name: str, tmp_path: Path) -> None:
    check(METHODS[name], tmp_path)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network(name: str, tmp_path: Path) -> None:
    check(NETWORKS[name], tmp_path)


def test_every_method_and_network_has_a_case_or_a_reason() -> None:
    methods = {
        name
        for name in dir(lf)
        if isinstance(getattr(lf, name), type) and issubclass(getattr(lf, name), lf.Algorithm)
    }
    assert METHODS.keys() | OTHERS.keys() == methods - {"Algorithm"}
    assert METHODS.keys().isdisjoint(OTHERS)
    known = {name for name in dir(networks) if isinstance(getattr(networks, name), type)}
    assert NETWORKS.keys() == known


ENCODER = adapted(Encoder, "linear1", "linear2")
ADAPTED: dict[str, tuple[Any, Any]] = {
    "encoder, FedAvg": (lf.FedAvg, ENCODER),
    "encoder, FLoRA": (lf.FLoRA, ENCODER),
    "encoder, FFALoRA": (lf.FFALoRA, ENCODER),
    "encoder, norm first": (
        lf.RankMean, adapted(partial(Encoder, norm_first=True, activation="gelu"), "linear1"),
    ),
    "encoder, attention": (lf.RankMean, adapted(Encoder, "self_attn")),
    "encoder, own adapters": (lf.FedAvg, own_encoder),
    "encoder, norms of weights": (lf.FedAvg, normed_encoder),
    "padded": (lf.RankMean, adapted(Padded, "linear1", "linear2")),
    "attention": (lf.FedAvg, adapted(Attention, "attention")),
    "lstm": (lf.FedAvg, adapted(Recurrent, target_parameters=["lstm.weight_hr_l0"])),
    "lstm, norms of weights": (lf.FedAvg, normed_recurrent),
    "adaptive softmax": (lf.FLoRA, adapted(Rare, "body", "softmax.head", "0.0", "0.1")),
    "twice": (lf.RankMean, adapted(Twice, "a")),
    "embedding": (lf.FLoRA, adapted(partial(Embedded, tied=False), "embedding")),
    "conv1d": (lf.FLoRA, adapted(partial(Convolved, 1), "conv")),
    "conv2d": (lf.FedExLoRA, adapted(partial(Convolved, 2), "conv")),
    "encoder, cores": (lf.FedSB, ENCODER),
    "attention, cores": (lf.FedSB, adapted(Attention, "attention")),
    "embedding, cores": (lf.FedSB, adapted(partial(Embedded, tied=False), "embedding")),
    "embedding, heads": (
        partial(lf.RAVAN, 1), adapted(partial(Embedded, tied=False), "embedding"),
    ),
    "conv2d, heads": (partial(lf.RAVAN, 1), adapted(partial(Convolved, 2), "conv")),
    "dilated, base unchanged": (lf.FlexLoRA, adapted(partial(Convolved, 1, dilation=2), "conv")),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTED)
def test_layers_with_adapters(name: str, tmp_path: Path) -> None:
    algorithm, model = ADAPTED[name]
    check(Case(algorithm, model, settings={"optimizer": partial(SGD, lr=0.5)}), tmp_path)


UNLIKE: dict[str, Any] = {
    "a layer with two names": adapted(Twice, "a"),
    "a product with a weight": adapted(Product, "a"),
    "logits by an embedding": adapted(partial(Embedded, tied=True), "embedding"),
    "dilated, one dimension": adapted(partial(Convolved, 1, dilation=2), "conv"),
    "dilated, two dimensions": adapted(partial(Convolved, 2, dilation=2), "conv"),
    "circular, one dimension": adapted(partial(Convolved, 1, padding_mode="circular"), "conv"),
    "circular, two dimensions": adapted(partial(Convolved, 2, padding_mode="circular"), "conv"),
}


@pytest.mark.parametrize("rule", [lf.FLoRA, lf.FedExLoRA])
@pytest.mark.parametrize("name", UNLIKE)
def test_a_base_that_cannot_take_the_updates_is_refused(name: str, rule: Any) -> None:
    with pytest.raises(UserError) as error:
        fleet_of([ClientGroup(1, UNLIKE[name])], rule(), vectors())
    layer = {"a": "model.a", "l": "model.embedding"}.get(name[0], "model.conv")
    assert layer in error.value.found
    assert rule.__name__ in error.value.found


def test_an_adapter_that_an_attention_never_calls_is_refused() -> None:
    with pytest.raises(UserError, match=r"attention\.out_proj"):
        fleet_of([ClientGroup(1, adapted(Attention, "out_proj"))], lf.FedAvg(), vectors())


def test_an_adapter_whose_weight_is_only_read_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """As torchvision's Swin reads the weights of its attention."""
    fleet_of([ClientGroup(1, adapted(Reads, "a", "b"))], lf.FedAvg(), vectors())
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "does not call net.base_model.model.a in evaluation" in warning
    caplog.clear()
    fleet_of([ClientGroup(1, adapted(Product, "a"))], lf.RankMean(), vectors())
    assert not caplog.records


def test_the_base_of_an_attention_keeps_its_bits(caplog: pytest.LogCaptureFixture) -> None:
    made = fleet_of([ClientGroup(1, adapted(Attention, "attention"))], lf.FedAvg(), vectors())
    live = made.groups[0].live
    before = digests(live.frozen)
    for t in range(3):
        run_round(made, t)
    with made.deployed(0).bound(0) as module:
        held = {name: p for name, p in module.named_parameters() if name in before}
        assert digests(held) == before
    assert "out_proj twice" in caplog.text


@pytest.mark.matrix
def test_adapters_of_an_attention_have_the_same_bits_on_any_ranks() -> None:
    conformance(lf.FedAvg, model=adapted(Attention, "attention"), data=vectors)
