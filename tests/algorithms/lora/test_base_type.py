"""A base in the type that is asked for: its bytes, what is trained on it, and what is refused."""

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD

import lightfed as lf
from lightfed.algorithms.lora.peft_client import PeftClient
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.partition.schemes import Iid
from lightfed.data.torch_data import FromTorch
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.state.frozen_base import digests
from lightfed.testing import conformance
from lightfed.utils.errors import UserError
from tests.algorithms.lora.test_peft_client import (
    LORA,
    MODELS,
    client,
    data,
    gpt2,
    refused,
    samples,
)
from tests.small import fit, server_row

peft = pytest.importorskip("peft", reason="needs the extra hf")
transformers = pytest.importorskip("transformers")

HALF = torch.bfloat16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, str]:
    """Folders of one model, by its kind and the type of its files."""
    made = {}
    for kind, make in MODELS.items():
        torch.manual_seed(0)
        net = make()
        if kind == "gpt2":  # a loop of torch alone has other draws
            net.config.update({"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0})
        for dtype in ("float32", "bfloat16", "float16"):
            folder = tmp_path_factory.mktemp(f"{kind}-{dtype}")
            copy.deepcopy(net).to(getattr(torch, dtype)).save_pretrained(folder)
            made[kind, dtype] = str(folder)
    return made


def run(folder: Path, kind: str, *ranks: int, rule: Any = lf.RankMean, **given: Any) -> Any:
    """Two rounds of two clients of each rank: the federation and its trainer."""
    export = given.pop("export", ("server",))
    root = Federation(
        rule(), [ClientGroup(2, client(kind, rank, **given)) for rank in ranks],
        optimizer=partial(SGD, lr=0.3), export=export,
    )  # fmt: skip
    trainer = fit(root, data(kind, 2 * len(ranks)), folder, rounds=2)
    return root, trainer


def numbers(fleet: Any) -> int:
    """Frozen numbers of a group."""
    return sum(p.numel() for p in fleet.groups[0].live.frozen.values())


def types_of(module: nn.Module, *, trained: bool) -> set[torch.dtype]:
    return {p.dtype for p in module.parameters() if p.requires_grad is trained}


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_half_a_base_is_held_and_written_once_for_all_ranks(
    kind: str, folders: dict[Any, str], tmp_path: Path
) -> None:
    base = folders[kind, "bfloat16"]
    root, _ = run(tmp_path, kind, 2, 4, base=base, dtype="auto", export=("server", "clients"))
    fleet = root.fleet
    assert fleet.base.bytes == 2 * numbers(fleet)
    modules = [state.module for state in fleet.groups]
    assert [types_of(module, trained=False) for module in modules] == [{HALF}] * 2
    assert [types_of(module, trained=True) for module in modules] == [{torch.float32}] * 2
    first, second = (state.live.frozen for state in fleet.groups)
    assert all(first[name].data_ptr() == second[name].data_ptr() for name in first)

    written = load_file(tmp_path / "run" / "models" / "base.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {HALF}
    # GPT-2's output layer is its embedding: it has two names in the file.
    names = [name for name in written if not name.endswith("lm_head.weight")]
    assert sum(written[name].nbytes for name in names) == fleet.base.bytes


def test_by_default_a_folder_is_float32_and_a_function_is_left_as_it_is(
    folders: dict[Any, str],
) -> None:
    for kind in MODELS:
        for dtype in ("float32", "bfloat16", "float16"):
            module = client(kind, 2, base=folders[kind, dtype])()
            assert types_of(module, trained=False) == {torch.float32}

    def half() -> nn.Module:
        net: nn.Module = gpt2().to(HALF)
        return net

    for given, expected in ((None, HALF), ("auto", HALF), ("float32", torch.float32)):
        module = client("gpt2", 2, base=half, dtype=given)()
        assert types_of(module, trained=False) == {expected}
    assert types_of(client("gpt2", 2, dtype="bfloat16")(), trained=False) == {HALF}


def test_the_default_has_the_bits_of_a_base_that_was_cast_by_hand(
    folders: dict[Any, str], tmp_path: Path
) -> None:
    def by_hand() -> nn.Module:
        net: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            folders["gpt2", "bfloat16"]
        )
        return net.float()

    first, _ = run(tmp_path / "a", "gpt2", 2, base=folders["gpt2", "bfloat16"])
    second, _ = run(tmp_path / "b", "gpt2", 2, base=by_hand)
    assert torch.equal(server_row(first), server_row(second))


def test_a_perplexity_on_half_a_base_is_near_that_on_the_whole(
    folders: dict[Any, str], tmp_path: Path
) -> None:
    """It has more digits than a number of bfloat16."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        _, trainer = run(
            tmp_path / dtype, "gpt2", 2, 4, base=folders["gpt2", "float32"], dtype=dtype
        )
        found[dtype] = float(trainer.callback_metrics["global/perplexity"])
    assert abs(found["bfloat16"] - found["float32"]) < 0.1
    assert float(torch.tensor(found["bfloat16"]).to(HALF)) != found["bfloat16"]


def test_logits_are_float32_before_the_loss(folders: dict[Any, str]) -> None:
    module = client("gpt2", 2, base=folders["gpt2", "bfloat16"], dtype="auto")()
    texts = samples("gpt2", 4, 0)[::2]
    batch = {name: torch.stack([text[name] for text in texts]) for name in texts[0]}
    loss = module.training_step(batch, 0)
    assert loss is not None
    assert loss.dtype == torch.float32

    logits = module.net(input_ids=batch["input_ids"]).logits
    assert logits.dtype == HALF
    expected = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten()
    )
    assert torch.equal(loss, expected)


def test_a_session_is_that_of_a_loop_of_peft_and_torch(
    folders: dict[Any, str], tmp_path: Path
) -> None:
    """Three rounds of one client, in which a round is one step on all of its samples."""
    given = {"base": folders["gpt2", "bfloat16"], "dtype": "auto"}
    texts = samples("gpt2", 16, 0)[::2]  # of one length
    source = FromTorch(texts, samples("gpt2", 4, 1))
    split = FederatedDataModule(source, Iid(), batch_size=len(texts))
    root = Federation(
        lf.FedAvg(), [ClientGroup(1, client("gpt2", 2, **given))], optimizer=partial(SGD, lr=0.3)
    )
    fit(root, split, tmp_path, rounds=3)

    state = root.fleet.groups[0]
    base = transformers.AutoModelForCausalLM.from_pretrained(given["base"], dtype="auto")
    config = peft.LoraConfig(r=2, lora_alpha=16, task_type="CAUSAL_LM", **LORA["gpt2"])
    net = peft.get_peft_model(base, config)
    initial = state.layout.floats.views(state.initial.floats)
    trained = {f"net.{name}": p for name, p in net.named_parameters() if p.requires_grad}
    optimizer = SGD(trained.values(), lr=0.3)
    with torch.no_grad():
        for name, p in trained.items():
            p.copy_(initial[name])
    ids = torch.stack([text["input_ids"] for text in texts])
    for _ in range(3):
        logits = net(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1].float()
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()

    found = state.layout.floats.views(server_row(root))
    for name, p in trained.items():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-4, atol=1e-6)
    assert (
        max(float((p.detach() - initial[name]).abs().max()) for name, p in trained.items()) > 0.01
    )


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_a_head_is_trained_in_float32(
    precision: str, folders: dict[Any, str], tmp_path: Path
) -> None:
    root = Federation(
        lf.RankMean(),
        [ClientGroup(2, client("bert", 2, base=folders["bert", "bfloat16"], dtype="auto"))],
        optimizer=partial(SGD, lr=0.3),
    )
    trainer = fit(root, data("bert", 2), tmp_path, rounds=1, precision=precision)
    state = root.fleet.groups[0]
    name = "net.base_model.model.classifier.modules_to_save.default.weight"
    before = state.layout.floats.views(state.initial.floats)[name]
    after = root.fleet.algorithm.model.layout.floats.views(server_row(root))[name]
    assert (after - before).abs().max() > 1e-3
    assert not torch.equal(after, after.to(HALF).float())
    assert math.isfinite(trainer.callback_metrics["global/loss"])


@pytest.mark.parametrize("layer", ["pooler", "LayerNorm", "word_embeddings"])
def test_trained_copies_within_the_body_run_on_half_a_base(
    layer: str, folders: dict[Any, str]
) -> None:
    lora = LORA["bert"] | {"modules_to_save": [layer]}
    module = client("bert", 2, base=folders["bert", "bfloat16"], dtype="auto", lora=lora)()
    texts = samples("bert", 4, 0)[::2]
    batch = {name: torch.stack([text[name] for text in texts]) for name in texts[0]}
    loss = module.training_step(batch, 0)
    assert loss is not None
    loss.backward()  # type: ignore[no-untyped-call]
    for name, p in module.named_parameters():
        if p.requires_grad:
            assert p.dtype == torch.float32
            assert p.grad is not None, name
            assert p.grad.dtype == torch.float32


def test_half_a_base_is_the_same_after_a_run(folders: dict[Any, str], tmp_path: Path) -> None:
    root, _ = run(tmp_path, "gpt2", 2, base=folders["gpt2", "bfloat16"], dtype="auto")
    state = root.fleet.groups[0]
    assert digests(state.live.frozen) == root.fleet.base.digests[0]


@pytest.mark.parametrize("rule", ["FLoRA", "FedExLoRA"])
def test_rules_that_add_to_the_base_need_float32(
    rule: str, folders: dict[Any, str], tmp_path: Path
) -> None:
    base = folders["gpt2", "bfloat16"]
    with pytest.raises(UserError, match=rf"is bfloat16, and {rule} adds .*dtype: float32"):
        run(tmp_path, "gpt2", 2, rule=getattr(lf, rule), base=base, dtype="auto")
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_types_that_a_base_cannot_have_are_refused(folders: dict[Any, str]) -> None:
    key = ".init_args.dtype"
    assert "bfloat16" in refused(key, dtype="float16")
    assert "bfloat16" in refused(key, dtype="float64")
    assert "bfloat16" in refused(key, base=folders["bert", "float16"], dtype="auto")
    assert "rank" in refused(key, base=folders["bert", "bfloat16"], dtype="auto", rank=None)
    assert "rank" in refused(key, dtype="bfloat16", rank=None)
    for bias in ("all", "lora_only"):
        lora = LORA["bert"] | {"bias": bias}
        assert "dtype: float32" in refused(key, dtype="bfloat16", lora=lora)
    assert "int8" in refused(".init_args.quantization", quantization="int4")
    assert "rank" in refused(".init_args.quantization", quantization="int8", rank=None)


def half_adapted(rate: float = 1.0) -> PeftClient:
    """A client of rank 4, or 2 at half the rate, on half a base."""
    return client("gpt2", int(4 * rate), dtype="bfloat16")()


def half_classifier(rate: float = 1.0) -> PeftClient:
    return client("bert", int(4 * rate), dtype="bfloat16")()


@pytest.mark.matrix
@pytest.mark.parametrize("model", [half_adapted, half_classifier])
def test_ranks_and_restarts_give_the_same_bits(model: Any) -> None:
    kind = "gpt2" if model is half_adapted else "bert"
    made = partial(data, kind, 7)
    conformance(lf.RankMean, model=model, levels="ab", data=made, ranks=(1, 2))
