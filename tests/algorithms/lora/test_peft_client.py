"""Models of transformers with adapters: trained, exported, and loaded by plain peft."""

import dataclasses
import math
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Adam

import lightfed as lf
from lightfed.algorithms.lora.peft_client import PeftClient
from lightfed.cli import command_line as cli
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.partition.schemes import Iid
from lightfed.data.torch_data import FromTorch
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.testing import conformance
from lightfed.utils.errors import UserError
from tests.datasets.tiny import documented
from tests.small import Given, fit, server_row

peft = pytest.importorskip("peft", reason="needs the extra hf")
transformers = pytest.importorskip("transformers")

WORDS, LENGTH, CLASSES = 20, 6, 3
LORA = {"bert": {"target_modules": ["query", "value"]}, "gpt2": {"fan_in_fan_out": True}}
TASKS = {"bert": "classification", "gpt2": "causal"}


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=LENGTH, num_labels=CLASSES,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=LENGTH,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], Any]] = {"bert": bert, "gpt2": gpt2}


def samples(kind: str, number: int, seed: int) -> list[dict[str, Tensor]]:
    """Sequences of two lengths: the class is the first token's, or each token follows another."""
    rng = torch.Generator().manual_seed(seed)
    found = []
    for i in range(number):
        ids = (torch.randint(WORDS, (1,), generator=rng) + torch.arange(LENGTH - i % 2)) % WORDS
        labels = ids[0] * CLASSES // WORDS if kind == "bert" else ids
        mask = torch.ones_like(ids)
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def data(kind: str, clients: int = 4) -> FederatedDataModule:
    split = samples(kind, 16 * clients, 0), samples(kind, 20, 1)
    sizes = {"batch_size": 8, "eval_batch_size": 3}
    return FederatedDataModule(FromTorch(*split), Iid(), **sizes)  # type: ignore[arg-type]


def client(kind: str, rank: int | None, **given: Any) -> Callable[[], PeftClient]:
    settings: dict[str, Any] = {
        "base": MODELS[kind], "task": TASKS[kind], "num_labels": CLASSES, "lora": LORA[kind],
    }  # fmt: skip
    return partial(PeftClient, rank=rank, **settings | given)


def trained(rule: Any, folder: Path, kind: str, *ranks: int | None, **given: Any) -> Federation:
    """A round of two clients of each rank; the run is `folder`/run."""
    root = Federation(
        rule, [ClientGroup(2, client(kind, rank, **given)) for rank in ranks],
        optimizer=partial(SGD, lr=0.5), export=("clients",),
    )  # fmt: skip
    fit(root, data(kind, 2 * len(ranks)), folder)
    return root


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of models."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in MODELS}
    for kind, folder in folders.items():
        MODELS[kind]().save_pretrained(folder)
    return {kind: str(folder) for kind, folder in folders.items()}


def loaded(kind: str, base: str) -> Any:
    """A base by plain transformers."""
    name = "SequenceClassification" if kind == "bert" else "CausalLM"
    return getattr(transformers, f"AutoModelFor{name}").from_pretrained(base)


def logits(net: Any, kind: str) -> Tensor:
    ids = torch.stack([sample["input_ids"] for sample in samples(kind, 8, 2)[::2]])
    found: Tensor = net.eval()(input_ids=ids).logits
    return found


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("RankMean", "bert"),
        ("FFALoRA", "bert"),
        ("FedExLoRA", "gpt2"),
        ("FedSVD", "bert"),
        ("FedMomentum", "gpt2"),
        pytest.param("RoLoRA", "bert", marks=pytest.mark.matrix),
        pytest.param("LoRAFAIR", "gpt2", marks=pytest.mark.matrix),
        pytest.param("FedRotLoRA", "gpt2", marks=pytest.mark.matrix),
    ],
)
def test_plain_peft_gives_the_logits_of_the_run(
    rule: str, kind: str, bases: dict[str, str], tmp_path: Path
) -> None:
    made = getattr(lf, rule)()
    if rule == "FedMomentum":  # after one round nearly all of the mean is in the first components
        made = lf.FedMomentum(energy=1 - 1e-9)
    root = trained(made, tmp_path, kind, 2, 4, base=bases[kind])
    assert [state.name for state in root.fleet.groups] == ["PeftClient-r2", "PeftClient-r4"]
    models = tmp_path / "run" / "models"
    start = logits(loaded(kind, bases[kind]), kind)
    for number, rank in ((0, 2), (3, 4)):
        with torch.no_grad(), root.fleet.deployed(number).bound(number) as module:
            expected = logits(module.net, kind)
        net = peft.PeftModel.from_pretrained(loaded(kind, bases[kind]), models / f"client{number}")
        assert net.peft_config["default"].r == rank
        if made.changes_base:
            moved = (logits(net, kind) - expected).abs().max()
            assert moved > (1e-3 if rule == "FedExLoRA" else 1e-7)
            net.load_state_dict(load_file(models / "base.safetensors"), strict=False)
        found = logits(net, kind)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert (found - start).abs().max() > 1e-3
        merged = logits(net.merge_and_unload(), kind)
        torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)


def test_a_base_that_lightfed_has_trained_is_a_folder_of_transformers(tmp_path: Path) -> None:
    root = trained(lf.FedAvg(), tmp_path, "gpt2", None)
    assert root.fleet.groups[0].name == "PeftClient"
    folder = str(tmp_path / "run" / "models" / "client0")
    with torch.no_grad(), root.fleet.deployed(0).bound(0) as module:
        expected = logits(module.net, "gpt2")
    torch.testing.assert_close(logits(loaded("gpt2", folder), "gpt2"), expected, rtol=0, atol=0)
    adapted = client("gpt2", 2, base=folder)()
    torch.testing.assert_close(logits(adapted.net, "gpt2"), expected)  # B = 0


def test_bert_learns_and_reports_its_accuracy(tmp_path: Path) -> None:
    groups = [ClientGroup(2, client("bert", rank)) for rank in (2, 4)]
    root = Federation(lf.RankMean(), groups, optimizer=partial(Adam, lr=0.05), local_epochs=6)
    found = fit(root, data("bert"), tmp_path, rounds=2).callback_metrics
    assert found["global/accuracy"] > 0.6  # of three classes
    assert found["global/loss"] < 0.9


def test_perplexity_is_that_of_all_tokens_of_the_test_set(tmp_path: Path) -> None:
    root = Federation(
        lf.RankMean(), [ClientGroup(1, client("gpt2", 2))], optimizer=partial(SGD, lr=0.5)
    )
    metrics = fit(root, data("gpt2", 1), tmp_path).callback_metrics
    total, tokens = 0.0, 0
    with torch.no_grad(), root.fleet.deployed(0).bound(0) as module:
        for sample in samples("gpt2", 20, 1):
            ids = sample["input_ids"]
            losses = module.net(input_ids=ids[None]).logits[0, :-1].log_softmax(1)
            total -= float(losses.gather(1, ids[1:, None]).sum())
            tokens += len(ids) - 1
    expected = total / tokens
    assert metrics["global/loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["global/perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


def refused(key: str, kind: str = "bert", **given: Any) -> str:
    """The line about a client that cannot be built."""
    rank = given.pop("rank", 2)
    group = ClientGroup(1, client(kind, rank, **given))
    with pytest.raises(UserError) as error:
        group.build(data(kind).dataset, position=0, seed=0)
    assert error.value.key == f"model.clients.0.model{key}"
    assert error.value.status == 2
    return error.value.line


def test_what_cannot_be_adapted_is_refused(
    bases: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(".init_args.rank", rank=0)
    assert "nowhere" in refused(".init_args.base", base="nowhere")
    assert "LORA_ALHPA" in refused(".init_args.lora", lora={"LORA_ALHPA": 3})
    for theirs, ours in {"r": "rank", "lora_alpha": "alpha", "task_type": "task"}.items():
        assert ours in refused(f".init_args.lora.{theirs}", lora={theirs: 3})
    for lora in ({"target_modules": ["nothing"]}, {"target_modules": [7]}, {"target_modules": 7}):
        assert "modules" in refused(".init_args.lora", lora=lora)
    refused(".init_args.lora", lora={"target_modules": ["query"], "lora_dropout": "much"})
    (tmp_path / "config.json").write_text("{}")
    refused(".init_args.base", base=str(tmp_path))
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "pip install transformers peft" in refused(".init_args.base")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers peft" in refused(".init_args.base", base=bases["bert"])


def test_a_number_names_a_layer_of_a_sequence() -> None:
    def sequence() -> nn.Module:
        net = gpt2()
        net.lm_head = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, WORDS))
        return net

    lora = {"target_modules": [0], "exclude_modules": "transformer.*"}
    made = PeftClient(sequence, 2, task="causal", lora=lora)
    adapted = {name.split(".lora_")[0] for name, p in made.named_parameters() if "lora_" in name}
    assert len(adapted) == 1
    assert adapted.pop().endswith("lm_head.0")


def test_batches_without_a_label_that_counts_are_skipped() -> None:
    """Texts of one token have no next one; a mean over none would be no number."""
    module = client("gpt2", 2)().eval()
    short = {"input_ids": torch.tensor([[3], [4]]), "labels": torch.tensor([[3], [4]])}
    unlabelled = {"input_ids": torch.tensor([[3, 4]]), "labels": torch.full((1, 2), -100)}
    for batch in (short, unlabelled):
        assert module.training_step(batch, 0) is None
        module.validation_step(batch, 0)
    whole = {"input_ids": torch.tensor([[3, 4]]), "labels": torch.tensor([[3, 4]])}
    loss = module.training_step(whole, 0)
    assert loss is not None
    module.validation_step(whole, 0)
    assert float(module.loss.compute()) == pytest.approx(float(loss.detach()), rel=1e-6)


def test_tokens_are_counted_beyond_float32() -> None:
    module = client("gpt2", 2)()
    module.loss.update(1.0, weight=2**25)
    module.loss.update(1.0, weight=1)
    assert float(module.loss.weight) == 2**25 + 1


@pytest.mark.parametrize("algorithm", [lf.RankMean, lf.SCAFFOLD, lf.FedNova])
def test_a_client_of_short_texts_gives_finite_figures(algorithm: Any, tmp_path: Path) -> None:
    """All batches of one client are skipped, and some of the other's."""
    texts = samples("gpt2", 8, 0)
    for text in texts[:5]:
        text |= {name: column[:1] for name, column in text.items()}
    source = FromTorch(texts, samples("gpt2", 8, 1))
    split = FederatedDataModule(source, Given([0, 1, 2, 3], [4, 5, 6, 7]), batch_size=1)
    root = Federation(
        algorithm(), [ClientGroup(2, client("gpt2", 2))], optimizer=partial(SGD, lr=0.1)
    )
    trainer = fit(root, split, tmp_path, rounds=2)
    rounds = trainer.results.rounds
    assert rounds["train_loss"].notna().all()
    assert (rounds["train_loss"] > 0).all()
    assert rounds["global/loss"].notna().all()
    assert server_row(root).isfinite().all()


def made() -> nn.Module:
    """A base, by its dotted name."""
    model: nn.Module = gpt2()
    return model


def test_a_configuration_names_a_function_that_makes_the_base() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PeftClient, "model")
    given = {"base": f"{__name__}.made", "rank": 2, "task": "causal", "lora": LORA["gpt2"]}
    net = parser.instantiate(parser.parse_object({"model": given})).model.net
    assert isinstance(net, peft.PeftModelForCausalLM)


# Values of keys of LoraConfig that are not the default.
KEYS: dict[str, Any] = {
    "target_modules": ["query"],
    "exclude_modules": ["value"],
    "lora_dropout": 0.5,
    "bias": "lora_only",
    "use_rslora": True,
    "modules_to_save": ["pooler"],
    "init_lora_weights": "gaussian",
    "layers_to_transform": [1],
    "rank_pattern": {"query": 1},
    "alpha_pattern": {"query": 3},
    "trainable_token_indices": {"word_embeddings": [1, 2]},
    "runtime_config": {"ephemeral_gpu_offload": True},
    "lora_bias": True,
    "use_dora": True,
    "target_parameters": ["key.weight"],
}


def test_every_key_of_peft_is_taken_or_named_as_ours() -> None:
    """By the name and with the type that it has there, whatever keys this version has."""
    refusals: dict[str, UserError] = {}
    for field in dataclasses.fields(peft.LoraConfig):
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        value = KEYS.get(field.name, default)
        lora = LORA["bert"] | {field.name: value}
        group = ClientGroup(1, client("bert", 2, lora=lora))
        try:
            module: Any = group.build(data("bert").dataset, position=0, seed=0)
        except UserError as error:
            refusals[field.name] = error
            continue

        taken = getattr(module.net.peft_config["default"], field.name)
        if field.name == "modules_to_save":  # peft adds the head
            assert set(taken) >= {*(value or ())}
        elif dataclasses.is_dataclass(taken) and isinstance(value, dict):
            assert dataclasses.asdict(taken) == value
        elif field.name in KEYS:
            assert (sorted(taken) if isinstance(taken, set) else taken) == value
    ours = {"r", "lora_alpha", "task_type", "base_model_name_or_path", "revision", "peft_type"}
    assert refusals.keys() == {*ours, "inference_mode"}
    for name, error in refusals.items():
        assert error.key == f"model.clients.0.model.init_args.lora.{name}"
        assert error.fix.startswith("remove it: ")


@pytest.mark.parametrize("name", ["eva", "corda", "lora_ga"])
def test_initial_values_that_need_data_are_refused(name: str) -> None:
    lora = LORA["bert"] | {"init_lora_weights": name}
    assert name in refused(".init_args.lora.init_lora_weights", lora=lora)


@pytest.mark.matrix
def test_the_commands_and_the_code_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch a client in a round; few documented functions instead of all."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = documented(tmp_path / "sources")
    monkeypatch.setattr("lightfed.datasets.text.source_folders", lambda: sources)
    page = (Path(__file__).parents[3] / "docs" / "lora.md").read_text()
    (commands,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    fits = [line for line in commands.splitlines() if line.startswith("lightfed fit")]
    for line in fits:
        short = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=1"]
        cli.main([*shlex.split(line)[1:], *short, "--trainer.enable_page=false"])
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    assert "FedExLoRA" in fits[1]
    merged, row = found["whole"].state_dict(), load_file("runs/chars/models/client3.safetensors")
    base, name = load_file("runs/chars/models/base.safetensors"), "transformer.h.0.attn.c_attn"
    A, B = (row[f"base_model.model.{name}.lora_{part}.default.weight"] for part in "AB")
    whole = base[f"base_model.model.{name}.base_layer.weight"] + (B @ A).T  # s is 1
    torch.testing.assert_close(merged[f"{name}.weight"], whole)
    first = load_file("runs/base/models/client0/model.safetensors")[f"{name}.weight"]
    assert not torch.equal(base[f"base_model.model.{name}.base_layer.weight"], first)


def adapted(rate: float = 1.0) -> PeftClient:
    """A client of rank 4, or 2 at half the rate."""
    return client("gpt2", int(4 * rate))()


@pytest.mark.matrix
def test_ranks_and_restarts_give_the_same_bits() -> None:
    conformance(lf.FedExLoRA, model=adapted, levels="ab", data=partial(data, "gpt2", 7))


@pytest.mark.parametrize("name", ["use_dora", "lora_bias"])
def test_updates_that_are_not_s_b_a_are_refused(name: str, tmp_path: Path) -> None:
    """A bias of B is scaled, too, and clients of unlike rank have unlike scales."""
    with pytest.raises(UserError) as error:
        trained(lf.RankMean(), tmp_path, "bert", 2, 4, lora=LORA["bert"] | {name: True})
    assert error.value.key == "model.clients"
    assert name in error.value.fix
