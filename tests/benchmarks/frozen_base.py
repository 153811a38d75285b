"""100 clients that fine-tune one frozen model by adapters of rank 4 to 32: memory, bytes, files.

    python tests/benchmarks/frozen_base.py [--layers 6] [--json FILE]

The model has the shapes of MiniLM-L6 (22.7 M values, drawn at random); queries and values have
adapters, and the head is trained. Runs with 10 and with 100 clients take processes of their own.
`dense` are the figures of a row that held all parameters.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

RANKS = (32, 16, 8, 4)
WIDTH, HIDDEN, HEADS, WORDS, LENGTH, CLASSES = 384, 1536, 12, 30_522, 8, 2


class Adapted(nn.Module):
    """A frozen linear layer W with B A beside it; B starts at 0."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, WIDTH) / WIDTH**0.5)
        self.b = nn.Parameter(torch.zeros(WIDTH, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Layer(nn.Module):
    """Attention and a feed-forward network, each normalised behind its residual."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.query, self.value = Adapted(rank), Adapted(rank)
        frozen = {
            "key": nn.Linear(WIDTH, WIDTH), "out": nn.Linear(WIDTH, WIDTH),
            "norm": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, HIDDEN),
            "down": nn.Linear(HIDDEN, WIDTH), "last": nn.LayerNorm(WIDTH),
        }  # fmt: skip
        self.frozen = nn.ModuleDict(frozen).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.query(x), self.frozen["key"](x), self.value(x))
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = self.frozen["norm"](x + self.frozen["out"](seen))
        return self.frozen["last"](x + self.frozen["down"](F.gelu(self.frozen["up"](x))))


class MiniLM(nn.Module):
    """(B, T) tokens -> (B, 2) logits of the first token; the base is the same for all ranks."""

    def __init__(self, rank: int, layers: int = 6) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            words = {"words": nn.Embedding(WORDS, WIDTH), "places": nn.Embedding(512, WIDTH),
                     "kinds": nn.Embedding(2, WIDTH), "norm": nn.LayerNorm(WIDTH)}  # fmt: skip
            self.embed = nn.ModuleDict(words).requires_grad_(False)
            self.pool = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        blocks = []
        for place in range(layers):
            with torch.random.fork_rng():
                torch.manual_seed(place)
                blocks.append(Layer(max(RANKS)))
        self.layers = nn.Sequential(*blocks)
        for part in self.layers.modules():
            if isinstance(part, Adapted):
                part.a = nn.Parameter(part.a[:rank].clone())
                part.b = nn.Parameter(part.b[:, :rank].clone())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.long()
        places = torch.arange(x.shape[1], device=x.device)
        x = self.embed["words"](x) + self.embed["places"](places) + self.embed["kinds"].weight[0]
        x = self.layers(self.embed["norm"](x))
        return self.head(torch.tanh(self.pool(x[:, 0])))


def numbers(rank: int, layers: int) -> int:
    """Trained numbers of a client: 2 adapters a layer, and the head."""
    return 2 * layers * rank * 2 * WIDTH + WIDTH * CLASSES + CLASSES


def federation(algorithm: Any, clients: int, layers: int) -> Any:
    import lightfed as lf

    groups = [
        lf.ClientGroup(clients // len(RANKS) + (i < clients % len(RANKS)),
                       partial(MiniLM, rank, layers), name=f"r{rank}")
        for i, rank in enumerate(RANKS)
    ]  # fmt: skip
    return lf.Federation(
        algorithm, groups, optimizer=partial(SGD, lr=0.1), local_steps=1, evaluate=()
    )


def tokens(clients: int) -> Any:
    import lightfed as lf

    rng = torch.Generator().manual_seed(0)
    x = torch.randint(WORDS, (2 * clients, LENGTH), generator=rng)
    y = torch.arange(2 * clients) % CLASSES
    data = lf.FromTorch(TensorDataset(x, y), TensorDataset(x[:2], y[:2]), classes=["0", "1"])
    return lf.FederatedDataModule(data, lf.Iid(), batch_size=2)


def resident() -> int:
    """Bytes of this process in memory."""
    from lightfed.utils.memory import trim_heap

    gc.collect()
    trim_heap()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def alive() -> int:
    """Bytes of all tensors, each memory counted once."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor):
            memory = thing.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
    return sum(found.values())


def run(algorithm: Any, clients: int, layers: int, folder: str) -> tuple[Any, dict[str, Any]]:
    """Two rounds, and what is left after them."""
    import lightfed as lf
    from lightfed.runs.checkpoint import shard_folder, tag_of
    from lightfed.runs.run_logger import RunLogger

    root, data = federation(algorithm, clients, layers), tokens(clients)
    trainer = lf.FederatedTrainer(
        max_epochs=2, accelerator="cpu", logger=RunLogger(folder, "run"), enable_page=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(root, datamodule=data)
    fleet, last = root.fleet, Path(folder, "run", "checkpoints", "last.ckpt")
    shards = [*shard_folder(last).glob(f"{tag_of(last)}/*")]
    rows = [fleet.groups[fleet.home_group(k)].row_bytes for k in range(clients)]
    server = sum(x.nbytes for x in root.state_dict().values())
    return fleet, {
        "clients": clients,
        "rows": sum(rows) if fleet.stateful else 0,
        "server": server,
        "base": fleet.base.bytes,
        "alive": alive(),
        "resident": resident(),
        "checkpoint": sum(path.stat().st_size for path in [last, *shards]),
        "numbers": {s.name: s.layout.floats.numel for s in fleet.groups},
        "sent": fleet.ledger.totals[:, 0].tolist(),
        "received": fleet.ledger.totals[:, 1].tolist(),
        "groups": [fleet.home_group(k) for k in range(clients)],
    }


def measured(which: str, clients: int, layers: int) -> dict[str, Any]:
    """The figures of a run in a process of its own."""
    call = [sys.executable, __file__, "--run", which, str(clients), "--layers", str(layers)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def one(which: str, clients: int, layers: int) -> None:
    import lightfed as lf

    algorithm = lf.Standalone() if which == "standalone" else lf.HeteroFL(mask=False)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(algorithm, clients, layers, folder)[1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--run", nargs=2)
    parser.add_argument("--json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.run:
        one(asked.run[0], int(asked.run[1]), asked.layers)
        return
    layers = asked.layers
    few, many = (measured("standalone", n, layers) for n in (10, 100))
    sent = measured("heterofl", 100, layers)
    expected = [numbers(RANKS[g], layers) for g in sent["groups"]]
    dense = 4 * sum(p.numel() for p in MiniLM(RANKS[1], layers).parameters())
    own = [4 * numbers(RANKS[g], layers) for g in many["groups"]]
    report = {
        "numbers a row": [many["numbers"], {f"r{r}": numbers(r, layers) for r in RANKS}],
        "a dense row, numbers": dense // 4,
        "sent and received in two rounds are 8 bytes a number": [
            sent[key] == [8.0 * n for n in expected] for key in ("sent", "received")
        ],
        "checkpoint over rows and server": many["checkpoint"] / (many["rows"] + many["server"]),
        "checkpoint, dense": 100 * dense,
        "tensors alive, MB": many["alive"] / 1e6,
        "limit: base, server and adapters, + 20 %, MB": 1.2
        * (many["base"] + many["server"] + sum(own)) / 1e6,
        "tensors alive, dense, MB": 101 * dense / 1e6,
        "growth of memory from 10 to 100 clients, MB": (many["resident"] - few["resident"]) / 1e6,
        "limit: 90 adapters + 20 %, MB": 1.2
        * (sum(own) - sum(4 * numbers(RANKS[g], layers) for g in few["groups"])) / 1e6,
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if asked.json:
        Path(asked.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
