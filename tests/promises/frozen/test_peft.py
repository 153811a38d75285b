"""A `PeftModel` is a client's network as it is: its base is held once, its adapters are the row."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.topology.topology import Ring
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.partition.schemes import Iid
from lightfed.data.torch_data import FromTorch
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.testing.conformance import conformance
from tests.small import fit

peft = pytest.importorskip("peft", reason="needs the extra hf")
transformers = pytest.importorskip("transformers")

WORDS, LENGTH, CLASSES = 40, 6, 3


class Classifier(nn.Module):
    """(B, T) tokens -> (B, C) logits of a small BERT with adapters in its attention."""

    def __init__(self, num_classes: int = CLASSES, rate: float = 1.0) -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=LENGTH, num_labels=num_classes,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(3)
            bert = transformers.BertForSequenceClassification(config)
        lora = peft.LoraConfig(
            r=int(8 * rate), lora_alpha=8, target_modules=["query", "value"], task_type="SEQ_CLS"
        )
        self.bert = peft.get_peft_model(bert, lora)

    @override
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.bert(input_ids=x.long()).logits
        return logits


def data(clients: int = 7) -> FederatedDataModule:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(WORDS, (12 * clients, LENGTH), generator=rng)
    split = TensorDataset(x, x[:, 0] % CLASSES), TensorDataset(x[:9], x[:9, 0] % CLASSES)
    names = [str(label) for label in range(CLASSES)]
    return FederatedDataModule(FromTorch(*split, classes=names), Iid(), batch_size=8)


ALGORITHMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fedavg": (FedAvg, {}),
    "heterofl": (partial(HeteroFL, mask=False), {"levels": "ab"}),
    "standalone": (Standalone, {}),
    "dispfl": (partial(DisPFL, topology=Ring(), density=0.5, rounds=3), {"fraction": 1.0}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_and_restarts_give_the_same_bits(name: str) -> None:
    algorithm, settings = ALGORITHMS[name]
    conformance(algorithm, model=Classifier, data=data, **settings)


def test_adapters_are_sent_and_exports_give_the_logits_of_the_run(tmp_path: Path) -> None:
    root = Federation(
        Standalone(), [ClientGroup(3, Classifier)], optimizer=partial(SGD, lr=0.1),
        export=("clients",),
    )  # fmt: skip
    fit(root, data(3), tmp_path, rounds=1)
    models = tmp_path / "run" / "models"
    base, own = (load_file(models / f"{name}.safetensors") for name in ("base", "client1"))
    assert {name.split(".")[-3] for name in own if "lora" in name} == {"lora_A", "lora_B"}
    assert all("lora" in name or "classifier" in name for name in own)
    net = Classifier()
    net.load_state_dict(base | own)
    net.eval()
    x = torch.randint(WORDS, (5, LENGTH))
    rows = root.fleet.deployed(1)
    with torch.no_grad(), rows.bound(1) as module:
        expected = module(x)
        torch.testing.assert_close(net(x), expected, rtol=0, atol=0)
        merged = net.bert.merge_and_unload()
        found = merged(input_ids=x).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
