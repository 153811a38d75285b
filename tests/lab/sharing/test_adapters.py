"""Shared adapters load by plain peft, and a shared whole model by plain transformers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lightfed as lf
from lightfed.lab.sharing.command import main
from lightfed.utils.errors import UserError

pytest.importorskip("peft", reason="needs the extra hf")
pytest.importorskip("transformers")
hub = pytest.importorskip("huggingface_hub")

from tests.algorithms.lora.test_peft_client import logits, trained  # noqa: E402


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model after the code of a card has run in its folder."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    variables: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        exec(code, variables)
    return variables["model"]


@pytest.mark.parametrize("rule", ["RankMean", "FedExLoRA"])
def test_adapters_are_shared_with_their_base(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedExLoRA changes the base, so that its adapters alone are another model."""
    root = trained(getattr(lf, rule)(), tmp_path, "gpt2", 2, 4)
    shared = tmp_path / "shared"
    assert main([str(tmp_path / "run"), "--model=client3", f"--output={shared}"]) == 0

    data = hub.ModelCard.load(shared / "README.md").data
    assert (data.library_name, data.pipeline_tag) == ("peft", "text-generation")
    assert {result.metric_type for result in data.eval_results} == {"loss", "perplexity"}

    with torch.no_grad(), root.fleet.deployed(3).bound(3) as module:
        expected = logits(module.net, "gpt2")
    found = logits(loaded(shared, monkeypatch), "gpt2")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert str(tmp_path) not in (shared / "adapter_config.json").read_text()

    named = ["--base=someone/base", f"--output={tmp_path / 'named'}"]
    words = [str(tmp_path / "run"), "--model=client3", *named]
    if rule == "FedExLoRA":
        with pytest.raises(UserError, match="has changed the base"):
            main(words)
        return
    assert main(words) == 0
    assert not (tmp_path / "named" / "base").exists()
    assert hub.ModelCard.load(tmp_path / "named" / "README.md").data.base_model == "someone/base"
    assert '"someone/base"' in (tmp_path / "named" / "adapter_config.json").read_text()


def test_a_classifier_with_a_head_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained(lf.RankMean(), tmp_path, "bert", 2)
    shared = tmp_path / "shared"
    assert main([str(tmp_path / "run"), "--model=client0", f"--output={shared}"]) == 0
    with torch.no_grad(), root.fleet.deployed(0).bound(0) as module:
        expected = logits(module.net, "bert")
    found = logits(loaded(shared, monkeypatch), "bert")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert hub.ModelCard.load(shared / "README.md").data.pipeline_tag == "text-classification"


def test_a_whole_model_is_one_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained(lf.FedAvg(), tmp_path, "gpt2", None)
    shared = tmp_path / "shared"
    assert main([str(tmp_path / "run"), "--model=client0", f"--output={shared}"]) == 0
    with torch.no_grad(), root.fleet.deployed(0).bound(0) as module:
        expected = logits(module.net, "gpt2")
    found = logits(loaded(shared, monkeypatch), "gpt2")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert hub.ModelCard.load(shared / "README.md").data.library_name == "transformers"
    with pytest.raises(UserError, match="is no adapter"):
        main([str(tmp_path / "run"), "--model=client0", "--base=someone/base"])
