"""100 clients with adapters of rank 4 to 64 on one frozen base of 100 million numbers: memory.

    python benchmarks/frozen_base.py [--clients 100] [--dtypes float32,bfloat16,int8] [--json FILE]

The base is a Llama of 12 layers with random weights; queries and values have adapters. Every client
keeps its own (Standalone), so that all of them are held. Each run is a process of its own, and does
one round with one step for each client. The limit is

    base + 1.15 x adapters + CONSTANT

above what the process holds before the run, all imports and the first step of a small model of the
same kind included. It is compared with resident memory after the round, in which freed memory is
given back to the system first. Files are those that the run writes.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

RANKS = (4, 8, 16, 32, 64)
WIDTH, HIDDEN, LAYERS, HEADS, WORDS, LENGTH = 768, 2048, 12, 12, 16_384, 8

# Bytes besides base and adapters: for each group of clients an initial row of its adapters, the
# gradients of a client, and activations of a batch.
CONSTANT = 100e6
_SLACK = 1.15


def config(*, small: bool = False) -> Any:
    from transformers import LlamaConfig

    width, hidden, layers = (64, 128, 1) if small else (WIDTH, HIDDEN, LAYERS)
    return LlamaConfig(
        vocab_size=64 if small else WORDS, hidden_size=width, intermediate_size=hidden,
        num_hidden_layers=layers, num_attention_heads=HEADS if not small else 2,
        num_key_value_heads=HEADS if not small else 2, max_position_embeddings=64,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def write_base(folder: str, *, small: bool = False) -> None:
    """Write a model with random weights in bfloat16, as checkpoints of large models are."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(config(small=small)).bfloat16().save_pretrained(folder)


def adapter_numbers(rank: int) -> int:
    """Trained numbers of a client: A and B of two square layers in each block."""
    return LAYERS * 2 * rank * 2 * WIDTH


def texts(clients: int, words: int) -> Any:
    import lightfed as lf

    rng = torch.Generator().manual_seed(0)

    def drawn(number: int) -> list[dict[str, Tensor]]:
        ids = torch.randint(words, (number, LENGTH), generator=rng)
        return [{"input_ids": row, "labels": row} for row in ids]

    source = lf.FromTorch(drawn(2 * clients), drawn(2))
    return lf.FederatedDataModule(source, lf.Iid(), batch_size=2)


def one_round(base: str, dtype: str, clients: int, words: int, folder: str) -> Any:
    """Train a round, and return the fleet after it."""
    import lightfed as lf
    from lightfed.runs.run_logger import RunLogger

    held: dict[str, Any] = {"dtype": dtype}
    if dtype == "int8":
        held = {"dtype": "bfloat16", "quantization": "int8"}
    lora = {"target_modules": ["q_proj", "v_proj"]}
    groups = []
    for position, rank in enumerate(RANKS):
        count = clients // len(RANKS) + (position < clients % len(RANKS))
        make = partial(lf.PeftClient, base, rank, task="causal", lora=lora, **held)
        groups.append(lf.ClientGroup(count, make))
    root = lf.Federation(
        lf.Standalone(), groups, optimizer=partial(SGD, lr=0.1), local_steps=1, evaluate=(),
        export=("server",),
    )  # fmt: skip
    trainer = lf.FederatedTrainer(
        max_epochs=1, accelerator="cpu", logger=RunLogger(folder, "run"), enable_page=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(root, datamodule=texts(clients, words))
    return root.fleet


def resident() -> int:
    """Return the bytes of this process in memory, without what it has freed."""
    from lightfed.utils.memory import trim_heap

    gc.collect()
    trim_heap()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(base: str, small: str, dtype: str, clients: int) -> dict[str, Any]:
    """Return the figures of a run in this process."""
    with tempfile.TemporaryDirectory() as folder:
        one_round(small, dtype, len(RANKS), 64, folder)
    before = resident()

    with tempfile.TemporaryDirectory() as folder:
        fleet = one_round(base, dtype, clients, WORDS, folder)
        after = resident()
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        written = 0
        for path in Path(folder, "run", "models").glob("base.*"):
            written += path.stat().st_size

    adapters = sum(4 * state.layout.size * state.group.count for state in fleet.groups)
    limit = fleet.base.bytes + _SLACK * adapters + CONSTANT
    return {
        "dtype": dtype,
        "clients": clients,
        "numbers of the base": sum(p.numel() for p in fleet.groups[0].live.frozen.values()),
        "base, MB": fleet.base.bytes / 1e6,
        "base on disk, MB": written / 1e6,
        "adapters, MB": adapters / 1e6,
        "adapters, numbers as expected": all(
            state.layout.parameter_numel == adapter_numbers(rank)
            for state, rank in zip(fleet.groups, RANKS, strict=True)
        ),
        "resident, MB": (after - before) / 1e6,
        "limit, MB": limit / 1e6,
        # At some time of the run: while a base is loaded, or its file is written.
        "peak, MB": (peak - before) / 1e6,
        "holds": after - before <= limit,
        "besides base and adapters, MB": (after - before - fleet.base.bytes - adapters) / 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--dtypes", default="float32,bfloat16,int8")
    parser.add_argument("--json")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.run:
        base, small, dtype = options.run
        print(json.dumps(measure(base, small, dtype, options.clients)))
        return 0

    results = []
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as small:
        write_base(base)
        write_base(small, small=True)
        for dtype in options.dtypes.split(","):
            call = [sys.executable, __file__, "--run", base, small, dtype]
            call.append(f"--clients={options.clients}")
            done = subprocess.run(call, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(results[-1], indent=1), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["holds"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
