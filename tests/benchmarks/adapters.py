"""Low-rank adapters: a round against plain peft, and FlexLoRA's server step against a dense SVD.

    python tests/benchmarks/adapters.py [--passes 3] [--layers 6] [--steps 2] [--json FILE]

`round`: ten clients fine-tune a BERT of MiniLM's shapes, rank 8 in query and value, batches of 16 x
64 tokens. The rival is the loop that one writes with peft: `set_peft_model_state_dict` of the mean,
torch's SGD, `get_peft_model_state_dict`, and their mean.
Both take turns in one process, on one thread; CPU seconds without the first round.
`svd`: one layer of 768 x 768, a sum of ranks of 80, R = 32, in float64.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

CLIENTS, BATCH, LENGTH, RANK, LR = 10, 16, 64, 8, 0.05
WORDS, CLASSES = 30_522, 2


def network(layers: int) -> Any:
    """A BERT with random values and adapters."""
    import peft
    import transformers

    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=384, num_hidden_layers=layers, num_attention_heads=12,
        intermediate_size=1536, max_position_embeddings=512, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)
        bert = transformers.BertForSequenceClassification(config)
    lora = peft.LoraConfig(
        r=RANK, lora_alpha=16, target_modules=["query", "value"], task_type="SEQ_CLS"
    )
    return peft.get_peft_model(bert, lora)


def samples(steps: int) -> list[dict[str, Tensor]]:
    """Those of all clients, one after the other."""
    draw = torch.Generator().manual_seed(0)
    count = CLIENTS * BATCH * steps
    ids = torch.randint(WORDS, (count, LENGTH), generator=draw)
    mask = torch.ones(LENGTH, dtype=torch.int64)
    return [
        {"input_ids": row, "attention_mask": mask, "labels": torch.tensor(i % CLASSES)}
        for i, row in enumerate(ids)
    ]


def ours(layers: int, steps: int) -> Callable[[int], object]:
    """A round of RankMean."""
    import lightning.pytorch as L

    import lightfed as lf
    from tests.small import Given, fleet_of, run_round

    class Client(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network(layers)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

    each = BATCH * steps
    parts = [range(k * each, (k + 1) * each) for k in range(CLIENTS)]
    rows = samples(steps)
    test = [{**row, "input_ids": row["input_ids"] + 1 - 2 * (row["input_ids"] > 0)} for row in rows]
    data = lf.FederatedDataModule(lf.FromTorch(rows, test), Given(*parts), batch_size=BATCH)
    groups = [lf.ClientGroup(CLIENTS, Client)]
    fleet = fleet_of(groups, lf.RankMean(), data, optimizer=partial(SGD, lr=LR), side_by_side="off")
    return lambda t: run_round(fleet, t)


def theirs(layers: int, steps: int) -> Callable[[int], object]:
    """A round of the loop that one writes with peft."""
    import peft

    model, rows, each = network(layers), samples(steps), BATCH * steps
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    mean = {k: v.clone() for k, v in peft.get_peft_model_state_dict(model).items()}
    model.train()

    def round(t: int) -> None:
        nonlocal mean
        sums = {name: torch.zeros_like(value) for name, value in mean.items()}
        for client in range(CLIENTS):
            peft.set_peft_model_state_dict(model, mean)
            optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
            order = torch.randperm(each) + client * each
            for batch in order.split(BATCH):
                loss = model(**{name: part[batch] for name, part in stacked.items()}).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for name, value in peft.get_peft_model_state_dict(model).items():
                sums[name] += value / CLIENTS
        mean = sums

    return round


def rounds(passes: int, layers: int, steps: int) -> dict[str, float]:
    """CPU seconds a round of each, and the median of their ratios."""
    both = ours(layers, steps), theirs(layers, steps)
    seconds: list[list[float]] = [[], []]
    for t in range(passes + 1):
        for side, round in enumerate(both):
            start = time.process_time()
            round(t)
            seconds[side].append(time.process_time() - start)
    kept = [values[1:] for values in seconds]
    ratios = [own / other for own, other in zip(*kept, strict=True)]
    return {
        "lightfed": statistics.median(kept[0]),
        "peft": statistics.median(kept[1]),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def decompositions(passes: int) -> dict[str, float]:
    """Wall seconds of FlexLoRA's merge of a layer, and of the SVD of the dense mean."""
    from lightfed.aggregation.products import Product

    draw = torch.Generator().manual_seed(0)
    ranks = [32, 16, 16, 8, 8]
    lefts = [torch.randn(768, r, generator=draw).double() for r in ranks]
    rights = [torch.randn(r, 768, generator=draw).double() for r in ranks]
    weights = [1 / len(ranks)] * len(ranks)

    def factored() -> Tensor:
        U, S, V = Product.sum(weights, lefts, rights).svd()
        return U[:, :32] * S[:32] @ V[:, :32].T

    def dense() -> Tensor:
        mean = sum(w * b @ a for w, b, a in zip(weights, lefts, rights, strict=True))
        assert isinstance(mean, Tensor)
        U, S, Vt = torch.linalg.svd(mean, full_matrices=False)
        return U[:, :32] * S[:32] @ Vt[:32]

    torch.testing.assert_close(factored(), dense())
    found: list[list[float]] = [[], []]
    for _ in range(passes):
        for side, call in enumerate((factored, dense)):
            start = time.perf_counter()
            call()
            found[side].append(time.perf_counter() - start)
    own, other = map(statistics.median, found)
    return {"factored": own, "dense": other, "ratio": own / other}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "svd": decompositions(asked.passes),
        "round": rounds(asked.passes, asked.layers, asked.steps),
    }
    for name, figures in found.items():
        print(f"{name:6}", "  ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
