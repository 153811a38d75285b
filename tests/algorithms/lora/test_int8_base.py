"""A base that torchao holds in 8 bits: it trains, resumes, and is held once for all ranks."""

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD

import lightfed as lf
from lightfed.algorithms.lora.peft_client import PeftClient
from lightfed.federation import Federation
from lightfed.lab.sharing.command import main
from lightfed.local.client_group import ClientGroup
from lightfed.state.frozen_base import digests
from lightfed.testing import conformance
from lightfed.utils.errors import UserError
from lightfed.utils.tensor_parts import held_bytes, is_wrapped
from tests.algorithms.lora.test_peft_client import bert, client, data, gpt2, refused
from tests.small import fit, server_row

pytestmark = pytest.mark.matrix
torchao = pytest.importorskip("torchao", reason="needs the extra quant")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LAYERS = {"target_modules": ["q_proj", "v_proj"]}


def llama(tied: bool = False) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=6,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    llama().bfloat16().save_pretrained(made)
    return str(made)


def int8(rank: int, folder: str, **given: Any) -> Any:
    settings = {"base": folder, "lora": LAYERS, "quantization": "int8", "dtype": "bfloat16"}
    return client("gpt2", rank, **settings | given)


def federation(folder: str, rule: Any = lf.RankMean, **given: Any) -> Federation:
    groups = [ClientGroup(2, int8(rank, folder, **given)) for rank in (2, 4)]
    export = ("server", "clients")
    return Federation(rule(), groups, optimizer=partial(SGD, lr=0.3), export=export)


def test_it_trains_is_held_once_and_stays_as_it_is(folder: str, tmp_path: Path) -> None:
    root = federation(folder)
    metrics = fit(root, data("gpt2"), tmp_path / "one", rounds=1).callback_metrics
    first = float(metrics["global/loss"])
    fleet = root.fleet

    frozen = fleet.groups[0].live.frozen
    linear = [tensor for tensor in frozen.values() if is_wrapped(tensor)]
    assert len(linear) == 2 * 7  # attention and feed-forward layers of two blocks
    assert sum(map(held_bytes, linear)) < 0.6 * sum(2 * tensor.numel() for tensor in linear)
    assert fleet.base.bytes == sum(map(held_bytes, frozen.values()))
    other = fleet.groups[1].live.frozen
    for name, tensor in frozen.items():
        if is_wrapped(tensor):
            assert other[name].qdata.data_ptr() == tensor.qdata.data_ptr()
    for state in fleet.groups:
        assert digests(state.live.frozen) == fleet.base.digests[0]

    last = tmp_path / "one" / "run" / "checkpoints" / "last.ckpt"
    resumed = federation(folder)
    trainer = fit(resumed, data("gpt2"), tmp_path / "two", rounds=4, ckpt_path=last)
    assert float(trainer.callback_metrics["global/loss"]) < first
    whole = federation(folder)
    fit(whole, data("gpt2"), tmp_path / "three", rounds=4)
    assert torch.equal(server_row(resumed), server_row(whole))


def test_its_logits_are_near_those_of_the_base(folder: str) -> None:
    ids = torch.arange(6)[None]
    with torch.no_grad():
        near = int8(2, folder)().eval()({"input_ids": ids})
        plain = int8(2, folder, quantization=None)().eval()({"input_ids": ids})
    assert 0 < (near - plain).norm() < 0.05 * plain.norm()


def test_an_export_has_adapters_and_no_base(folder: str, tmp_path: Path) -> None:
    root = federation(folder)
    fit(root, data("gpt2"), tmp_path, rounds=1)
    models = tmp_path / "run" / "models"
    assert not (models / "base.safetensors").exists()
    entries = json.loads((models / "models.json").read_text())
    assert entries["client3"]["unwritten"] == "base.json"
    assert "note" not in entries["client3"]

    # The constructor and its arguments make the base again.
    arguments = entries["client3"]["arguments"]
    again = PeftClient(**arguments).eval()
    own = {
        f"net.{name}": tensor for name, tensor in load_file(models / "client3.safetensors").items()
    }
    assert not again.load_state_dict(own, strict=False).unexpected_keys
    ids = torch.arange(6)[None]
    with torch.no_grad(), root.fleet.deployed(3).bound(3) as module:
        assert torch.equal(again({"input_ids": ids}), module({"input_ids": ids}))

    # Plain peft reads the adapters, on the base before it was quantized.
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert peft.PeftModel.from_pretrained(base, models / "client3").peft_config["default"].r == 4

    words = [str(tmp_path / "run"), "--model=client3", f"--output={tmp_path / 'shared'}"]
    with pytest.raises(UserError, match=r"^--base: not given, and no file has the quantized base"):
        main(words)
    assert main([*words, "--base=someone/base"]) == 0


@pytest.mark.parametrize("rule", ["FLoRA", "FedExLoRA"])
def test_rules_that_add_to_the_base_refuse_it(rule: str, folder: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"is quantized \(Int8Tensor\), and {rule} adds"):
        fit(federation(folder, getattr(lf, rule)), data("gpt2"), tmp_path)


def test_a_head_stays_as_it_is_and_is_trained() -> None:
    module: Any = client("bert", 2, quantization="int8", lora={"target_modules": ["query"]})()
    head = module.net.base_model.model.classifier
    assert not is_wrapped(head.original_module.weight)
    assert head.modules_to_save.default.weight.requires_grad
    pooler = module.net.base_model.model.bert.pooler.dense
    assert is_wrapped(pooler.weight)

    lora = {"target_modules": ["query"], "modules_to_save": ["pooler"]}
    module = client("bert", 2, quantization="int8", lora=lora)()
    assert not is_wrapped(module.net.base_model.model.bert.pooler.original_module.dense.weight)


def test_a_tied_output_layer_stays_as_it_is() -> None:
    module: Any = client(
        "gpt2", 2, base=partial(llama, tied=True), lora=LAYERS, quantization="int8"
    )()
    base = module.net.get_base_model()
    assert base.lm_head.weight is base.model.embed_tokens.weight
    assert not is_wrapped(base.lm_head.weight)


def tied_within() -> nn.Module:
    net = bert()
    first, second = net.bert.encoder.layer
    second.intermediate.dense.weight = first.intermediate.dense.weight
    made: nn.Module = net
    return made


def test_what_cannot_be_quantized_is_refused() -> None:
    key = ".init_args.quantization"
    assert "no nn.Linear" in refused(key, "gpt2", base=gpt2, quantization="int8")
    line = refused(key, base=tied_within, quantization="int8")
    assert "layer.1.intermediate.dense.weight" in line


def test_it_says_how_to_install_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.quantization", None)
    line = refused(".init_args.quantization", quantization="int8")
    assert "pip install lightfed[quant]" in line


def in_8_bits(rate: float = 1.0) -> PeftClient:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = llama()
    made: PeftClient = client(
        "gpt2", int(4 * rate), base=lambda: copy.deepcopy(net), lora=LAYERS,
        quantization="int8", dtype="bfloat16",
    )()  # fmt: skip
    return made


def test_ranks_and_restarts_give_the_same_bits() -> None:
    conformance(lf.RankMean, model=in_8_bits, levels="ab", data=partial(data, "gpt2", 7))


@pytest.mark.parametrize("kind", ["Linear4bit", "LinearNF4"])
def test_layers_of_bitsandbytes_are_refused(kind: str) -> None:
    layers = pytest.importorskip("bitsandbytes").nn

    def packed() -> nn.Module:
        net = llama()
        net.model.layers[0].self_attn.q_proj = getattr(layers, kind)(32, 32, bias=False)
        made: nn.Module = net
        return made

    assert kind in refused("", "gpt2", base=packed, lora=LAYERS)
